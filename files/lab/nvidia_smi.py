#!/usr/bin/python3
"""nvidia-smi of a bringup lab host: answers from the host description and the driver recorded as loaded at boot.

Messages, layout and exit codes are those of the real program where a caller may depend on them: 2 a wrong argument,
6 no device, 9 no driver, 12 no library, 18 another library version, 255 a GPU that is not there any more.
Nothing is measured; a description never changes by itself.
"""

import functools
import json
import os
import re
import signal
import sys
import time

# Set by tests only: a directory that stands for the host's root.
ROOT = os.environ.get("BRINGUP_LAB_ROOT", "")
DESCRIPTION = ROOT + "/usr/lib/bringup-lab/host.json"
LIBRARY = ROOT + "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
RELEASE = ROOT + "/usr/share/bringup-lab/nvidia-smi.json"
COLUMN = 55

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)
NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "
    "Please make sure that the NVIDIA Display Driver is properly installed and present in your system."
)
DEPRECATED = "Requested functionality has been deprecated"

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks"""

P2P_LEGEND = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""

# Which sections of -q each value of -d shows.
DISPLAY = {
    "MEMORY": {"FB Memory Usage", "BAR1 Memory Usage", "Conf Compute Protected Memory Usage"},
    "UTILIZATION": {"Utilization"},
    "ECC": {"ECC Mode", "ECC Errors"},
    "TEMPERATURE": {"Temperature"},
    "POWER": {"GPU Power Readings"},
    "CLOCK": {"Clocks", "Max Clocks"},
    "COMPUTE": {"Compute Mode"},
    "PIDS": {"Processes"},
    "PERFORMANCE": {"Performance State", "Clocks Event Reasons"},
    "PAGE_RETIREMENT": {"Retired Pages"},
    "ROW_REMAPPER": {"Remapped Rows"},
    "SUPPORTED_CLOCKS": set(),
    "ACCOUNTING": {"Accounting Mode", "Accounting Mode Buffer Size"},
}


def stop(message, code):
    print(message)
    sys.exit(code)


def read(path):
    try:
        with open(path) as stream:
            return stream.read().strip()
    except OSError:
        return None


class Machine:
    """The description, and what of the driver is loaded, installed and running."""

    def __init__(self):
        with open(DESCRIPTION) as stream:
            self.described = json.load(stream)
        self.model = self.described["model"]
        self.loaded = read(ROOT + "/sys/module/nvidia/version")
        self.is_open = "Open Kernel Module" in (read(ROOT + "/proc/driver/nvidia/version") or "")
        self.installed = None
        if os.path.exists(LIBRARY):
            self.installed = os.path.realpath(LIBRARY).partition(".so.")[2]
        self.cuda = json.loads(read(RELEASE) or '{"cuda": "N/A"}')["cuda"]

    def check(self):
        """End as the real program does where it cannot talk to the driver or finds no GPU."""
        if self.installed is None:
            stop(NO_LIBRARY, 12)
        if self.loaded is None:
            stop(NO_DRIVER, 9)
        if self.loaded != self.installed:
            short = ".".join(self.installed.split(".")[:2])
            stop("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: " + short, 18)
        if not self.described["gpus"] or not (self.is_open or self.model["closed_modules"]):
            stop("No devices were found", 6)
        for gpu in self.described["gpus"]:
            if gpu["is_lost"]:
                place = gpu["bus_id"].upper()
                stop("Unable to determine the device handle for GPU" + place + ": Unknown Error", 255)

    @property
    def gpus(self):
        return self.described["gpus"]

    @property
    def persistence(self):
        return "Enabled" if is_running(ROOT + "/run/nvidia-persistenced/nvidia-persistenced.pid") else "Disabled"

    @property
    def fabric(self):
        """Return state and status of the fabric; a GPU without NVLink says neither."""
        if self.model["fabric"] == "none":
            return "N/A", "N/A"
        if is_running(ROOT + "/run/nvidia-fabricmanager/nv-fabricmanager.pid"):
            return "Completed", "Success"
        return "In Progress", "N/A"

    def link(self, one, other):
        """Return how two GPUs are connected, in the words of ``topo -m``."""
        if one is other:
            return " X "
        if self.model["links"] and one["has_nvlink"] and other["has_nvlink"]:
            return "NV%d" % self.model["links"]
        return "NODE" if one["numa_node"] == other["numa_node"] else "SYS"


def is_running(pid_file):
    pid = read(pid_file)
    return bool(pid) and os.path.exists("/proc/" + pid)


def long_bus_id(gpu):
    return "0000" + gpu["bus_id"].upper()


@functools.lru_cache(maxsize=None)
def processes():
    """Return (gpu index, pid, name) of every process that has a GPU's device file open."""
    found = []
    for pid in sorted((entry for entry in os.listdir("/proc") if entry.isdigit()), key=int):
        try:
            handles = os.listdir("/proc/%s/fd" % pid)
        except OSError:
            continue
        opened = set()
        for handle in handles:
            try:
                target = os.readlink("/proc/%s/fd/%s" % (pid, handle))
            except OSError:
                continue
            match = re.match(r"/dev/nvidia(\d+)$", target[len(ROOT) :])
            if match:
                opened.add(int(match.group(1)))
        name = (read("/proc/%s/cmdline" % pid) or "").split("\0")[0] or "[unknown]"
        found += [(index, int(pid), name) for index in sorted(opened)]
    return found


# --- fields of --query-gpu: name -> (unit, value)


def fields(machine, gpu):
    model = machine.model
    state, status = machine.fabric
    used = 512 * sum(1 for index, _, _ in processes() if index == gpu["index"])
    mig = "Enabled" if gpu["is_mig"] else "Disabled"
    return {
        "timestamp": ("", time.strftime("%Y/%m/%d %H:%M:%S.000")),
        "driver_version": ("", machine.loaded),
        "count": ("", str(len(machine.gpus))),
        "name": ("", model["name"]),
        "gpu_name": ("", model["name"]),
        "serial": ("", gpu["serial"]),
        "uuid": ("", gpu["uuid"]),
        "gpu_uuid": ("", gpu["uuid"]),
        "index": ("", str(gpu["index"])),
        "pci.bus_id": ("", long_bus_id(gpu)),
        "gpu_bus_id": ("", long_bus_id(gpu)),
        "pci.domain": ("", "0x0000"),
        "pci.bus": ("", "0x" + gpu["bus_id"][5:7].upper()),
        "pci.device": ("", "0x00"),
        "pci.device_id": ("", "0x%s10DE" % model["pci_device"].upper()),
        "pci.sub_device_id": ("", "0x%s10DE" % model["pci_subsystem"].upper()),
        "pcie.link.gen.current": ("", "5"),
        "pcie.link.gen.gpucurrent": ("", "5"),
        "pcie.link.gen.max": ("", "5"),
        "pcie.link.gen.gpumax": ("", "5"),
        "pcie.link.gen.hostmax": ("", "5"),
        "pcie.link.width.current": ("", "16"),
        "pcie.link.width.max": ("", "16"),
        "persistence_mode": ("", machine.persistence),
        "accounting.mode": ("", "Disabled"),
        "driver_model.current": ("", "N/A"),
        "vbios_version": ("", model["vbios"]),
        "inforom.image": ("", model["inforom"]),
        "gsp.mode.current": ("", "Enabled"),
        "fan.speed": ("%", "[N/A]"),
        "pstate": ("", "P0"),
        "memory.total": ("MiB", str(model["memory_mib"])),
        "memory.reserved": ("MiB", str(model["reserved_mib"])),
        "memory.used": ("MiB", str(used)),
        "memory.free": ("MiB", str(model["memory_mib"] - model["reserved_mib"] - used)),
        "compute_mode": ("", "Default"),
        "compute_cap": ("", model["compute_capability"]),
        "utilization.gpu": ("%", "0"),
        "utilization.memory": ("%", "0"),
        "ecc.mode.current": ("", "Enabled"),
        "ecc.mode.pending": ("", "Enabled"),
        "ecc.errors.corrected.volatile.total": ("", "0"),
        "ecc.errors.corrected.aggregate.total": ("", "0"),
        "ecc.errors.uncorrected.volatile.total": ("", str(gpu["uncorrectable_errors"])),
        "ecc.errors.uncorrected.aggregate.total": ("", str(gpu["uncorrectable_errors"])),
        "temperature.gpu": ("", "33"),
        "temperature.memory": ("", "33" if model["links"] else "N/A"),
        "power.management": ("", "Enabled"),
        "power.draw": ("W", "%.2f" % model["idle_power_w"]),
        "power.draw.average": ("W", "%.2f" % model["idle_power_w"]),
        "power.draw.instant": ("W", "%.2f" % model["idle_power_w"]),
        "power.limit": ("W", "%.2f" % model["power_limit_w"]),
        "enforced.power.limit": ("W", "%.2f" % model["power_limit_w"]),
        "power.default_limit": ("W", "%.2f" % model["power_limit_w"]),
        "power.min_limit": ("W", "%.2f" % model["power_minimum_w"]),
        "power.max_limit": ("W", "%.2f" % model["power_limit_w"]),
        "clocks.sm": ("MHz", "345"),
        "clocks.current.sm": ("MHz", "345"),
        "clocks.mem": ("MHz", str(model["max_memory_mhz"])),
        "clocks.max.sm": ("MHz", str(model["max_sm_mhz"])),
        "clocks.max.mem": ("MHz", str(model["max_memory_mhz"])),
        "mig.mode.current": ("", mig),
        "mig.mode.pending": ("", mig),
        "fabric.state": ("", state),
        "fabric.status": ("", status),
        "remapped_rows.correctable": ("", "0"),
        "remapped_rows.uncorrectable": ("", "0"),
        "remapped_rows.pending": ("", "Yes" if gpu["is_remap_pending"] else "No"),
        "remapped_rows.failure": ("", "Yes" if gpu["has_remap_failed"] else "No"),
        "retired_pages.pending": ("", "[N/A]"),
        "addressing_mode": ("", "None"),
        "platform.module_id": ("", str(gpu["index"] + 1)),
    }


def print_csv(wanted, rows, options):
    """Print rows of {field: (unit, value)} as the real program does."""
    if "noheader" not in options:
        heads = []
        for name, unit in wanted:
            heads.append("%s [%s]" % (name, unit) if unit and "nounits" not in options else name)
        print(", ".join(heads))
    for row in rows:
        cells = []
        for column, value in enumerate(row):
            unit = wanted[column][1]
            plain = not unit or "nounits" in options or value.startswith("[")
            cells.append(value if plain else "%s %s" % (value, unit))
        print(", ".join(cells))


def query_gpus(machine, names, options, selected):
    rows = [fields(machine, gpu) for gpu in selected]
    for name in names:
        if name not in rows[0]:
            stop('Field "%s" is not a valid field to query.\n' % name, 2)
    wanted = [(name, rows[0][name][0]) for name in names]
    print_csv(wanted, [[row[name][1] for name in names] for row in rows], options)


def query_apps(machine, names, options):
    machine_gpus = {gpu["index"]: gpu for gpu in machine.gpus}
    aliases = {"name": "process_name", "used_memory": "used_gpu_memory"}
    wanted, keys = [], []
    for name in names:
        key = aliases.get(name, name)
        if key not in ("pid", "process_name", "used_gpu_memory", "gpu_uuid", "gpu_name", "gpu_bus_id", "timestamp"):
            stop('Field "%s" is not a valid field to query.\n' % name, 2)
        keys.append(key)
        wanted.append((key, "MiB" if key == "used_gpu_memory" else ""))
    rows = []
    for index, pid, name in processes():
        gpu = machine_gpus.get(index)
        if gpu is None:
            continue
        values = {
            "pid": str(pid),
            "process_name": name,
            "used_gpu_memory": "512",
            "gpu_uuid": gpu["uuid"],
            "gpu_name": machine.model["name"],
            "gpu_bus_id": long_bus_id(gpu),
            "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
        }
        rows.append([values[key] for key in keys])
    print_csv(wanted, rows, options)


# --- the tree of -q: (label, tag of -x, value or children)


def tree(machine, gpu):
    model = machine.model
    state, status = machine.fabric
    mig = "Enabled" if gpu["is_mig"] else "Disabled"
    errors = str(gpu["uncorrectable_errors"])
    bus = gpu["bus_id"][5:7].upper()
    capped = "%.2f W" % model["power_limit_w"]
    draw = "%.2f W" % model["idle_power_w"]
    healthy = "N/A"
    in_use = [(pid, name) for index, pid, name in processes() if index == gpu["index"]]
    used = 512 * len(in_use)
    inactive = "Not Active"
    zeros = [
        ("SRAM Correctable", "sram_correctable", "0"),
        ("SRAM Uncorrectable Parity", "sram_uncorrectable_parity", "0"),
        ("SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded", "0"),
        ("DRAM Correctable", "dram_correctable", "0"),
        ("DRAM Uncorrectable", "dram_uncorrectable", errors),
    ]
    banks = model["remap_banks"]
    return [
        ("Product Name", "product_name", model["name"]),
        ("Product Brand", "product_brand", "NVIDIA"),
        ("Product Architecture", "product_architecture", model["architecture"]),
        ("Display Mode", "display_mode", DEPRECATED),
        ("Display Attached", "display_attached", "Yes"),
        ("Display Active", "display_active", "Disabled"),
        ("Persistence Mode", "persistence_mode", machine.persistence),
        ("Addressing Mode", "addressing_mode", "None"),
        ("MIG Mode", "mig_mode", [("Current", "current_mig", mig), ("Pending", "pending_mig", mig)]),
        ("Accounting Mode", "accounting_mode", "Disabled"),
        ("Accounting Mode Buffer Size", "accounting_mode_buffer_size", "4000"),
        ("Driver Model", "driver_model", [("Current", "current_dm", "N/A"), ("Pending", "pending_dm", "N/A")]),
        ("Serial Number", "serial", gpu["serial"]),
        ("GPU UUID", "uuid", gpu["uuid"]),
        ("GPU PDI", "pdi", "0x0000000000000000"),
        ("Minor Number", "minor_number", str(gpu["index"])),
        ("VBIOS Version", "vbios_version", model["vbios"]),
        ("MultiGPU Board", "multigpu_board", "No"),
        ("Board ID", "board_id", "0x%s00" % bus.lower().lstrip("0")),
        ("Board Part Number", "board_part_number", model["board_part_number"]),
        ("GPU Part Number", "gpu_part_number", model["part_number"]),
        ("FRU Part Number", "gpu_fru_part_number", "N/A"),
        (
            "Platform Info",
            "platformInfo",
            [
                ("Chassis Serial Number", "chassis_serial_number", "N/A"),
                ("Slot Number", "slot_number", "N/A"),
                ("Tray Index", "tray_index", "N/A"),
                ("Host ID", "host_id", "N/A"),
                ("Peer Type", "peer_type", "N/A"),
                ("Module Id", "module_id", str(gpu["index"] + 1)),
                ("GPU Fabric GUID", "gpu_fabric_guid", "N/A"),
            ],
        ),
        (
            "Inforom Version",
            "inforom_version",
            [
                ("Image Version", "img_version", model["inforom"]),
                ("OEM Object", "oem_object", "2.1"),
                ("ECC Object", "ecc_object", "7.16"),
                ("Power Management Object", "pwr_object", "N/A"),
            ],
        ),
        ("GPU C2C Mode", "c2c_mode", "Disabled"),
        (
            "GPU Virtualization Mode",
            "gpu_virtualization_mode",
            [
                ("Virtualization Mode", "virtualization_mode", "None"),
                ("Host VGPU Mode", "host_vgpu_mode", "N/A"),
                ("vGPU Heterogeneous Mode", "vgpu_heterogeneous_mode", "N/A"),
            ],
        ),
        ("GPU Recovery Action", "gpu_recovery_action", "Reboot" if gpu["is_remap_pending"] else "None"),
        ("GSP Firmware Version", "gsp_firmware_version", machine.loaded),
        (
            "PCI",
            "pci",
            [
                ("Bus", "pci_bus", "0x" + bus),
                ("Device", "pci_device", "0x00"),
                ("Domain", "pci_domain", "0x0000"),
                ("Base Classcode", "pci_base_class", "0x3"),
                ("Sub Classcode", "pci_sub_class", "0x2"),
                ("Device Id", "pci_device_id", "0x%s10DE" % model["pci_device"].upper()),
                ("Bus Id", "pci_bus_id", long_bus_id(gpu)),
                ("Sub System Id", "pci_sub_system_id", "0x%s10DE" % model["pci_subsystem"].upper()),
                (
                    "GPU Link Info",
                    "pci_gpu_link_info",
                    [
                        (
                            "PCIe Generation",
                            "pcie_gen",
                            [
                                ("Max", "max_link_gen", "5"),
                                ("Current", "current_link_gen", "5"),
                                ("Device Current", "device_current_link_gen", "5"),
                                ("Device Max", "max_device_link_gen", "5"),
                                ("Host Max", "max_host_link_gen", "5"),
                            ],
                        ),
                        (
                            "Link Width",
                            "link_widths",
                            [("Max", "max_link_width", "16x"), ("Current", "current_link_width", "16x")],
                        ),
                    ],
                ),
                (
                    "Bridge Chip",
                    "pci_bridge_chip",
                    [("Type", "bridge_chip_type", "N/A"), ("Firmware", "bridge_chip_fw", "N/A")],
                ),
                ("Replays Since Reset", "replay_counter", "0"),
                ("Replay Number Rollovers", "replay_rollover_counter", "0"),
                ("Tx Throughput", "tx_util", "0 KB/s"),
                ("Rx Throughput", "rx_util", "0 KB/s"),
                ("Atomic Caps Outbound", "atomic_caps_outbound", "N/A"),
                ("Atomic Caps Inbound", "atomic_caps_inbound", "N/A"),
            ],
        ),
        ("Fan Speed", "fan_speed", "N/A"),
        ("Performance State", "performance_state", "P0"),
        (
            "Clocks Event Reasons",
            "clocks_event_reasons",
            [
                ("Idle", "clocks_event_reason_gpu_idle", "Active"),
                ("Applications Clocks Setting", "clocks_event_reason_applications_clocks_setting", inactive),
                ("SW Power Cap", "clocks_event_reason_sw_power_cap", inactive),
                ("HW Slowdown", "clocks_event_reason_hw_slowdown", inactive),
                ("    HW Thermal Slowdown", "clocks_event_reason_hw_thermal_slowdown", inactive),
                ("    HW Power Brake Slowdown", "clocks_event_reason_hw_power_brake_slowdown", inactive),
                ("Sync Boost", "clocks_event_reason_sync_boost", inactive),
                ("SW Thermal Slowdown", "clocks_event_reason_sw_thermal_slowdown", inactive),
                ("Display Clock Setting", "clocks_event_reason_display_clocks_setting", inactive),
            ],
        ),
        (
            "FB Memory Usage",
            "fb_memory_usage",
            [
                ("Total", "total", "%d MiB" % model["memory_mib"]),
                ("Reserved", "reserved", "%d MiB" % model["reserved_mib"]),
                ("Used", "used", "%d MiB" % used),
                ("Free", "free", "%d MiB" % (model["memory_mib"] - model["reserved_mib"] - used)),
            ],
        ),
        (
            "BAR1 Memory Usage",
            "bar1_memory_usage",
            [
                ("Total", "total", "%d MiB" % model["bar1_mib"]),
                ("Used", "used", "1 MiB"),
                ("Free", "free", "%d MiB" % (model["bar1_mib"] - 1)),
            ],
        ),
        (
            "Conf Compute Protected Memory Usage",
            "cc_protected_memory_usage",
            [("Total", "total", "0 MiB"), ("Used", "used", "0 MiB"), ("Free", "free", "0 MiB")],
        ),
        ("Compute Mode", "compute_mode", "Default"),
        (
            "Utilization",
            "utilization",
            [
                ("GPU", "gpu_util", "0 %"),
                ("Memory", "memory_util", "0 %"),
                ("Encoder", "encoder_util", "0 %"),
                ("Decoder", "decoder_util", "0 %"),
                ("JPEG", "jpeg_util", "0 %"),
                ("OFA", "ofa_util", "0 %"),
            ],
        ),
        ("ECC Mode", "ecc_mode", [("Current", "current_ecc", "Enabled"), ("Pending", "pending_ecc", "Enabled")]),
        (
            "ECC Errors",
            "ecc_errors",
            [
                ("Volatile", "volatile", list(zeros)),
                (
                    "Aggregate",
                    "aggregate",
                    [*zeros, ("SRAM Threshold Exceeded", "sram_threshold_exceeded", "No")],
                ),
                (
                    "Aggregate Uncorrectable SRAM Sources",
                    "aggregate_uncorrectable_sram_sources",
                    [
                        ("SRAM L2", "sram_l2", "0"),
                        ("SRAM SM", "sram_sm", "0"),
                        ("SRAM Microcontroller", "sram_microcontroller", "0"),
                        ("SRAM PCIE", "sram_pcie", "0"),
                        ("SRAM Other", "sram_other", "0"),
                    ],
                ),
                ("Channel Repair Pending", "channel_repair_pending", "No"),
                ("TPC Repair Pending", "tpc_repair_pending", "No"),
                ("Unrepairable Memory", "unrepairable_memory", "No"),
            ],
        ),
        (
            "Remapped Rows",
            "remapped_rows",
            [
                ("Correctable Error", "remapped_row_corr", "0"),
                ("Inactive Correctable Error", "remapped_row_corr_inactive", "0"),
                ("Uncorrectable Error", "remapped_row_unc", errors),
                ("Inactive Uncorrectable Error", "remapped_row_unc_inactive", "0"),
                ("Pending", "remapped_row_pending", "Yes" if gpu["is_remap_pending"] else "No"),
                ("Remapping Failure Occurred", "remapped_row_failure", "Yes" if gpu["has_remap_failed"] else "No"),
                (
                    "Bank Remap Availability Histogram",
                    "row_remapper_histogram",
                    [
                        ("Max", "row_remapper_histogram_max", "%d bank(s)" % banks),
                        ("High", "row_remapper_histogram_high", "0 bank(s)"),
                        ("Partial", "row_remapper_histogram_partial", "0 bank(s)"),
                        ("Low", "row_remapper_histogram_low", "0 bank(s)"),
                        ("None", "row_remapper_histogram_none", "0 bank(s)"),
                    ],
                ),
            ],
        ),
        (
            "Temperature",
            "temperature",
            [
                ("GPU Current Temp", "gpu_temp", "33 C"),
                ("GPU T.Limit Temp", "gpu_temp_tlimit", "54 C"),
                ("GPU Shutdown T.Limit Temp", "gpu_temp_max_tlimit_threshold", "-8 C"),
                ("GPU Slowdown T.Limit Temp", "gpu_temp_slow_tlimit_threshold", "-2 C"),
                ("GPU Max Operating T.Limit Temp", "gpu_temp_max_gpu_tlimit_threshold", "0 C"),
                ("GPU Target Temperature", "gpu_target_temperature", "N/A"),
                ("Memory Current Temp", "memory_temp", "33 C" if model["links"] else "N/A"),
                ("Memory Max Operating T.Limit Temp", "gpu_temp_max_mem_tlimit_threshold", "0 C"),
            ],
        ),
        (
            "GPU Power Readings",
            "gpu_power_readings",
            [
                ("Average Power Draw", "average_power_draw", draw),
                ("Instantaneous Power Draw", "instant_power_draw", draw),
                ("Current Power Limit", "current_power_limit", capped),
                ("Requested Power Limit", "requested_power_limit", capped),
                ("Default Power Limit", "default_power_limit", capped),
                ("Min Power Limit", "min_power_limit", "%.2f W" % model["power_minimum_w"]),
                ("Max Power Limit", "max_power_limit", capped),
            ],
        ),
        (
            "Clocks",
            "clocks",
            [
                ("Graphics", "graphics_clock", "345 MHz"),
                ("SM", "sm_clock", "345 MHz"),
                ("Memory", "mem_clock", "%d MHz" % model["max_memory_mhz"]),
                ("Video", "video_clock", "765 MHz"),
            ],
        ),
        (
            "Max Clocks",
            "max_clocks",
            [
                ("Graphics", "graphics_clock", "%d MHz" % model["max_sm_mhz"]),
                ("SM", "sm_clock", "%d MHz" % model["max_sm_mhz"]),
                ("Memory", "mem_clock", "%d MHz" % model["max_memory_mhz"]),
                ("Video", "video_clock", "1545 MHz"),
            ],
        ),
        (
            "Fabric",
            "fabric",
            [
                ("State", "state", state),
                ("Status", "status", status),
                ("CliqueId", "cliqueId", "0" if state == "Completed" else "N/A"),
                (
                    "ClusterUUID",
                    "clusterUuid",
                    "00000000-0000-0000-0000-000000000000" if state == "Completed" else "N/A",
                ),
                (
                    "Health",
                    "health",
                    [
                        ("Summary", "summary", healthy),
                        ("Bandwidth", "bandwidth", healthy),
                        ("Route Recovery in progress", "route_recovery_in_progress", healthy),
                        ("Route Unhealthy", "route_unhealthy", healthy),
                        ("Access Timeout Recovery", "access_timeout_recovery", healthy),
                        ("Incorrect Configuration", "incorrect_configuration", healthy),
                        ("Partition Assigned", "partition_assigned", healthy),
                    ],
                ),
            ],
        ),
        ("Processes", "processes", in_use),
        ("Capabilities", "capabilities", [("EGM", "egm", "disabled")]),
    ]


def print_text(machine, gpus, only):
    print("\n==============NVSMI LOG==============\n")
    for label, value in (
        ("Timestamp", time.strftime("%a %b %e %H:%M:%S %Y")),
        ("Driver Version", machine.loaded),
        ("CUDA Version", machine.cuda),
    ):
        print(label.ljust(COLUMN) + ": " + value)
    print("\n" + "Attached GPUs".ljust(COLUMN) + ": %d" % len(machine.gpus))
    for gpu in gpus:
        print("GPU " + long_bus_id(gpu))
        for label, tag, value in tree(machine, gpu):
            if only is not None and label not in only:
                continue
            if tag == "processes":
                print_processes(value)
            else:
                print_branch(label, value, 1)
        print()


def print_branch(label, value, depth):
    margin = "    " * depth
    if isinstance(value, str):
        print((margin + label).ljust(COLUMN) + ": " + value)
        return
    print(margin + label)
    for child, _, below in value:
        print_branch(child, below, depth + 1)


def print_processes(found):
    if not found:
        print("    Processes".ljust(COLUMN) + ": None")
        return
    print("    Processes")
    for pid, name in found:
        for label, value in (
            ("GPU instance ID", "N/A"),
            ("Compute instance ID", "N/A"),
            ("Process ID", str(pid)),
            ("    Type", "C"),
            ("    Name", name),
            ("    Used GPU Memory", "512 MiB"),
        ):
            print(("        " + label).ljust(COLUMN) + ": " + value)


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def print_xml(machine, gpus):
    print('<?xml version="1.0" ?>')
    print('<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">')
    print("<nvidia_smi_log>")
    for tag, value in (
        ("timestamp", time.strftime("%a %b %e %H:%M:%S %Y")),
        ("driver_version", machine.loaded),
        ("cuda_version", machine.cuda),
        ("attached_gpus", str(len(machine.gpus))),
    ):
        print("\t<%s>%s</%s>" % (tag, escape(value), tag))
    for gpu in gpus:
        print('\t<gpu id="%s">' % long_bus_id(gpu))
        for _, tag, value in tree(machine, gpu):
            if tag == "processes":
                value = [("", "process_info", process_info(pid, name)) for pid, name in value]
            print_element(tag, value, 2)
        print("\t</gpu>\n")
    print("</nvidia_smi_log>")


def process_info(pid, name):
    return [
        ("", "gpu_instance_id", "N/A"),
        ("", "compute_instance_id", "N/A"),
        ("", "pid", str(pid)),
        ("", "type", "C"),
        ("", "process_name", name),
        ("", "used_memory", "512 MiB"),
    ]


# The text form writes these numbers with 0x before them, the XML form without.
BARE = ("pci_bus", "pci_device", "pci_domain", "pci_base_class", "pci_sub_class", "pci_device_id", "pci_sub_system_id")


def print_element(tag, value, depth):
    margin = "\t" * depth
    if isinstance(value, str):
        shown = value[2:] if tag in BARE and value.startswith("0x") else value
        print("%s<%s>%s</%s>" % (margin, tag, escape(shown), tag))
        return
    print("%s<%s>" % (margin, tag))
    for _, child, below in value:
        print_element(child, below, depth + 1)
    print("%s</%s>" % (margin, tag))


# --- the table without arguments


def print_table(machine):
    bar = "+-----------------------------------------+------------------------+----------------------+"
    print(time.strftime("%a %b %e %H:%M:%S %Y").ljust(31))
    print("+" + "-" * 89 + "+")
    head = " NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s " % (
        machine.loaded,
        machine.loaded,
        machine.cuda,
    )
    print("|" + head.ljust(89)[:89] + "|")
    print(bar)
    print("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |")
    print("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |")
    print("|                                         |                        |               MIG M. |")
    print("|=========================================+========================+======================|")
    model = machine.model
    mode = "On" if machine.persistence == "Enabled" else "Off"
    found = processes()
    for gpu in machine.gpus:
        used = 512 * sum(1 for index, _, _ in found if index == gpu["index"])
        name = model["name"] if len(model["name"]) <= 26 else model["name"][:23] + "..."
        print(
            "| %3d  %-26s %7s | %18s Off | %20d |"
            % (gpu["index"], name, mode, "  " + long_bus_id(gpu), gpu["uncorrectable_errors"])
        )
        print(
            "| N/A   33C    P0           %4.0fW / %4dW | %7dMiB / %6dMiB |      0%%      Default |"
            % (model["idle_power_w"], model["power_limit_w"], used, model["memory_mib"])
        )
        mig = "Enabled" if gpu["is_mig"] else "Disabled"
        print("|                                         |                        | %20s |" % mig)
        print(bar)
    print()
    print("+" + "-" * 89 + "+")
    print("| Processes:                                                                              |")
    print("|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |")
    print("|        ID   ID                                                               Usage      |")
    print("|=========================================================================================|")
    if not found:
        print("|  No running processes found                                                             |")
    for index, pid, name in found:
        print("|  %3d   N/A  N/A  %15d      C   %-38s  512MiB |" % (index, pid, name[:38]))
    print("+" + "-" * 89 + "+")


# --- topo and nvlink


def print_topology(machine):
    names = ["GPU%d" % gpu["index"] for gpu in machine.gpus]
    print("\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m")
    for gpu in machine.gpus:
        cells = [machine.link(gpu, other) for other in machine.gpus]
        print("\t".join(["GPU%d" % gpu["index"], *cells, gpu["cpus"], str(gpu["numa_node"]), "", "N/A"]))
    print(LEGEND)


def print_p2p(machine, kind):
    if kind not in ("r", "w", "n", "a", "p"):
        stop("Invalid argument for -p2p: " + kind, 2)
    print(" \t\x1b[4m" + "\t".join("GPU%d" % gpu["index"] for gpu in machine.gpus) + "\t\x1b[0m")
    for gpu in machine.gpus:
        cells = []
        for other in machine.gpus:
            linked = machine.link(gpu, other).startswith("NV")
            fine = linked if kind in ("n", "a") else kind in ("r", "w") or (kind == "p" and not linked)
            cells.append("X" if gpu is other else "OK" if fine else "NS")
        print(" GPU%d\t" % gpu["index"] + "\t".join(cells) + "\t")
    print(P2P_LEGEND, end="")


def print_nvlink(machine, arguments):
    if not machine.model["links"]:
        return
    for gpu in machine.gpus:
        print("GPU %d: %s (UUID: %s)" % (gpu["index"], machine.model["name"], gpu["uuid"]))
        for link in range(machine.model["links"]):
            if arguments[:1] in (["-e"], ["--errorcounters"]):
                for label in ("Replay", "Recovery", "CRC"):
                    print("\t Link %d: %s Errors: 0" % (link, label))
                print()
            elif gpu["has_nvlink"]:
                print("\t Link %d: %.3f GB/s" % (link, machine.model["link_gb_per_s"]))
            else:
                print("\t Link %d: <inactive>" % link)


def select(machine, wanted):
    if wanted is None:
        return machine.gpus
    chosen = []
    for each in wanted.split(","):
        found = [
            gpu
            for gpu in machine.gpus
            if each.lower() in (str(gpu["index"]), gpu["uuid"].lower(), gpu["bus_id"], long_bus_id(gpu).lower())
        ]
        if not found:
            stop("No devices were found", 6)
        chosen += found
    return chosen


def value_of(arguments, *names):
    """Return the value of an option in either spelling (``--a=b``, ``-a b``), None when it is not there."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            if equals:
                return value
            return arguments[position + 1] if position + 1 < len(arguments) else ""
    return None


def print_version(machine):
    short = ".".join((machine.installed or "N/A").split(".")[:2])
    print("NVIDIA-SMI version  : %s" % (machine.installed or "N/A"))
    print("NVML version        : %s" % short)
    print("DRIVER version      : %s" % (machine.loaded or "Not Found"))
    print("CUDA Version        : %s" % machine.cuda)


def main(arguments):
    machine = Machine()
    if "--version" in arguments:
        print_version(machine)
        return
    machine.check()
    formats = (value_of(arguments, "--format", "-f") or "").split(",")
    gpus = select(machine, value_of(arguments, "--id", "-i"))
    query = value_of(arguments, "--query-gpu")
    apps = value_of(arguments, "--query-compute-apps")
    if query is not None or apps is not None:
        if "csv" not in formats:
            stop("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n", 2)
        if query is not None:
            query_gpus(machine, [name.strip() for name in query.split(",")], formats, gpus)
        else:
            query_apps(machine, [name.strip() for name in apps.split(",")], formats)
    elif arguments[:1] == ["topo"]:
        if "-m" in arguments or "--matrix" in arguments:
            print_topology(machine)
        else:
            print_p2p(machine, value_of(arguments, "-p2p", "--p2pstatus") or "")
    elif arguments[:1] == ["nvlink"]:
        print_nvlink(machine, arguments[1:])
    elif "-L" in arguments or "--list-gpus" in arguments:
        for gpu in gpus:
            print("GPU %d: %s (UUID: %s)" % (gpu["index"], machine.model["name"], gpu["uuid"]))
    elif "-q" in arguments or "--query" in arguments or "-x" in arguments:
        shown = value_of(arguments, "-d", "--display")
        only = None
        if shown is not None:
            only = set()
            for name in shown.split(","):
                if name.upper() not in DISPLAY:
                    stop("Invalid display option: " + name, 2)
                only |= DISPLAY[name.upper()]
        if "-x" in arguments or "--xml-format" in arguments:
            print_xml(machine, gpus)
        else:
            print_text(machine, gpus, only)
    elif arguments:
        stop("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n", 2)
    else:
        print_table(machine)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `nvidia-smi | head` ends quietly
    main(sys.argv[1:])
