"""The found side: what a host's probe answered, typed. An answer is untrusted input.

Every section is its model or :class:`Unknown`; nothing is ever changed on the strength of an Unknown.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bringup.errors import HostError

SIZE_LIMIT_BYTES = 4 << 20
"""An answer is some tens of kilobytes; a larger one is a mistake or an attack, and is not read."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
# C0 without tab and newline, DEL, C1, and the marks that turn the direction of what a terminal shows.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# How JSON writes what is not printable, or no JSON at all; the dashes and dots that probes write are neither.
_SUSPECT = re.compile(r"\\[bfr]|\\u(?!20(?:1[0-9a-f]|2[0-7]))|NaN|Infinity")

T = TypeVar("T")


class _Model(BaseModel):
    # Every model would be built alone, and again as a part of HostState, which is the only one that is parsed.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Unknown(_Model):
    """A section that could not be looked at, and why. Never the same as absent."""

    error: str


class Os(_Model):
    """The distribution and the machine. ``user_id`` is the probe's own; not 0 means it could not see all."""

    id: str
    id_like: tuple[str, ...]
    version_id: str
    codename: str
    pretty_name: str
    machine: str
    libc: str | None
    cpus: int
    memory_bytes: int | None
    user_id: int

    @property
    def release(self) -> str:
        """Return the key that locks and repository tables use, such as ``debian12-x86_64``."""
        return f"{self.id}{self.version_id.replace('.', '')}-{self.machine}"


class KernelModule(_Model):
    """The NVIDIA module modprobe would take for one kernel. ``is_signed`` None: compressed, not looked at."""

    path: str
    version: str | None
    flavour: Literal["open", "closed"] | None
    signer: str | None
    is_signed: bool | None


class InstalledKernel(_Model):
    """One kernel below /lib/modules. ``nvidia`` None: no NVIDIA module; ``initramfs_mtime_s`` None: no image."""

    release: str
    has_headers: bool
    has_nouveau: bool
    nvidia: KernelModule | None
    initramfs_mtime_s: float | None


class Kernel(_Model):
    """The running kernel and the installed ones.

    ``next_release`` None: not certain which one boots next. ``compiler`` built the running kernel,
    ``default_compiler`` would build a module now.
    """

    release: str
    boot_id: str | None
    command_line: tuple[str, ...]
    compiler: str | None
    default_compiler: str | None
    tainted: int | None
    next_release: str | None
    next_witness: str
    installed: tuple[InstalledKernel, ...]
    nouveau_conf_mtime_s: float | None
    iommu_groups: int
    reboot_required: bool

    def is_nouveau_off(self, kernel: InstalledKernel) -> bool:
        """Return whether nouveau stays off when that kernel boots.

        It has no nouveau, or our modprobe file is there and the kernel's initramfs, where there is one, was
        made after it.
        """
        if not kernel.has_nouveau:
            return True
        written = self.nouveau_conf_mtime_s
        return written is not None and (kernel.initramfs_mtime_s is None or kernel.initramfs_mtime_s >= written)

    def find(self, release: str | None) -> InstalledKernel | None:
        """Return the installed kernel of that release, or None."""
        return next((kernel for kernel in self.installed if kernel.release == release), None)


class SecureBoot(_Model):
    """Secure Boot: None stands for "could not be read", and for a key that nobody asked about."""

    is_enabled: bool | None
    witness: str
    signing_key: str | None
    is_key_enrolled: bool | None


class Package(_Model):
    """A package dpkg knows; ``status`` abbreviated as ``dpkg -l`` prints it, ``ii`` or ``hi`` being whole."""

    version: str
    status: str

    @property
    def is_installed(self) -> bool:
        """Return whether the package is installed and configured."""
        return self.status[1:] == "i"

    @property
    def is_held(self) -> bool:
        """Return whether apt is told to leave the package as it is."""
        return self.status.startswith("h")


class BrokenPackage(_Model):
    """A package that dpkg left half-way."""

    name: str
    version: str
    status: str


class Dpkg(_Model):
    """Packages of the families of interest, and every half-way one whatever its name."""

    architecture: str | None
    packages: Mapping[str, Package]
    broken: tuple[BrokenPackage, ...]
    is_interrupted: bool

    def installed(self, name: str) -> Package | None:
        """Return the package when it is installed and configured, else None."""
        package = self.packages.get(name)
        return package if package is not None and package.is_installed else None


class AptSource(_Model):
    """One active apt source entry; URIs without credentials. ``signed_by`` None: any trusted key."""

    file: str
    line: int
    types: tuple[str, ...]
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None
    is_trusted: bool


class AptKey(_Model):
    """A key file that a source names: its fingerprints, or why there are none."""

    fingerprints: tuple[str, ...] = ()
    error: str | None = None


class AptPreference(_Model):
    """One pin of apt's preferences."""

    file: str
    line: int
    package: str
    pin: str
    priority: int


class Apt(_Model):
    """Apt's sources, keys, pins, and the effective settings of unattended-upgrades."""

    sources: tuple[AptSource, ...]
    keys: Mapping[str, AptKey]
    preferences: tuple[AptPreference, ...]
    blacklist: tuple[str, ...]
    is_unattended: bool
    checks_dates: bool
    has_proxy: bool


class LoadedDriver(_Model):
    """The kernel module in use. ``flavour`` None: the kernel shows only its version."""

    version: str | None
    flavour: Literal["open", "closed"] | None
    witness: str


class DriverLibrary(_Model):
    """One copy of libcuda.so on disk; not packaged means that a runfile or a container runtime put it there."""

    path: str
    version: str
    is_packaged: bool


class DriverTool(_Model):
    """The nvidia-smi that a plain call would run."""

    path: str
    is_packaged: bool


class DkmsEntry(_Model):
    """A version of the NVIDIA module in dkms' tree. ``kernel`` None: added, built for no kernel."""

    version: str
    kernel: str | None
    is_built: bool


class Driver(_Model):
    """The driver as loaded and as on disk. ``smi_status`` None: nvidia-smi is absent or did not answer."""

    loaded: LoadedDriver | None
    modules: tuple[str, ...]
    libcuda: tuple[DriverLibrary, ...]
    nvidia_smi: DriverTool | None
    smi_status: int | None
    smi_message: str | None
    nouveau_blacklist: tuple[str, ...]
    is_nouveau_off_at_boot: bool
    runfile: tuple[str, ...]
    dkms: tuple[DkmsEntry, ...]
    has_firmware: bool


class PciFunction(_Model):
    """An NVIDIA function on the PCI bus; ids in lower-case hexadecimal, the class in four digits."""

    address: str
    device_id: str
    class_id: str
    bound_to: str | None
    numa_node: int | None


class Gpu(_Model):
    """A GPU as the driver lists it; None where nvidia-smi says N/A."""

    index: int
    name: str
    uuid: str
    address: str
    driver_version: str
    compute_capability: str | None
    memory_bytes: int | None
    mig_mode: str | None
    is_persistent: bool
    ecc_mode: str | None
    pcie_generation_max: int | None
    pcie_width_max: int | None
    fabric_state: str | None
    fabric_status: str | None


class Gpus(_Model):
    """The GPUs on the bus and as listed by the driver. ``listed`` None: the driver does not answer."""

    pci: tuple[PciFunction, ...]
    switches: tuple[PciFunction, ...]
    listed: tuple[Gpu, ...] | None


class Fabric(_Model):
    """The NVSwitch fabric: switches of the nvswitch driver, and the management functions of NVLink 5."""

    switches: int
    infiniband: tuple[str, ...]
    switch_management: tuple[str, ...]
    is_ib_umad_loaded: bool
    ib_umad_files: tuple[str, ...]


class Toolkit(_Model):
    """A CUDA toolkit directory. ``release`` None: no version.json; ``nvrtc`` holds real file names."""

    path: str
    release: str | None
    has_nvcc: bool
    nvrtc: tuple[str, ...]
    targets: tuple[str, ...]


class Link(_Model):
    """A symbolic link such as /usr/local/cuda: its text, and where it ends."""

    target: str | None
    resolved: str
    exists: bool


class Alternative(_Model):
    """A group of update-alternatives. ``choices`` maps path to priority."""

    mode: str
    link: str
    link_target: str | None
    target: str | None
    choices: Mapping[str, int]


class Toolkits(_Model):
    """The toolkits below /usr/local, the links that move, and files of a distribution's own toolkit."""

    installed: Mapping[str, Toolkit]
    links: Mapping[str, Link]
    alternatives: Mapping[str, Alternative]
    system: tuple[str, ...]


class LoaderDirectory(_Model):
    """One directory of the loader's configuration, in the order ldconfig reads them."""

    file: str
    line: int
    directory: str
    resolved: str
    exists: bool


class LoaderHit(_Model):
    """One file the loader's cache names for a SONAME; ``path`` as the cache spells it."""

    path: str
    resolved: str
    exists: bool


class Loader(_Model):
    """The loader's configuration and cache for this machine's architecture."""

    directories: tuple[LoaderDirectory, ...]
    hits: Mapping[str, tuple[LoaderHit, ...]]
    preload: tuple[str, ...]
    is_cache_older: bool

    def first(self, soname: str) -> LoaderHit | None:
        """Return what a process without its own search path gets for a SONAME, or None."""
        hits = self.hits.get(soname, ())
        return hits[0] if hits else None


class Interpreter(_Model):
    """A Python interpreter of the system."""

    path: str
    has_headers: bool
    has_ensurepip: bool


class Python(_Model):
    """The system's interpreters by minor version, and the version the probe itself ran under."""

    interpreters: Mapping[str, Interpreter]
    probe: str


class EnvironmentEntry(_Model):
    """One directory below envs. Not complete: its marker was never written."""

    name: str
    is_complete: bool
    digest: str | None
    generation: int | None
    python: str | None
    is_tainted: bool

    @property
    def tainted(self) -> bool:
        """Return ``is_tainted`` by the name that the results document gives it."""
        return self.is_tainted


class InspectedEnvironment(_Model):
    """What an environment holds. ``changed``: same version as the marker says, other files.

    ``fingerprints`` None for a distribution without RECORD. ``unlike_record`` names missing files and, when
    the look was deep, files whose hash is not RECORD's. ``python`` None: no site-packages there.
    """

    path: str
    resolved: str
    python: str | None
    has_interpreter: bool
    distributions: Mapping[str, str]
    fingerprints: Mapping[str, str | None]
    changed: tuple[str, ...]
    unlike_record: Mapping[str, tuple[str, ...]]
    strays: tuple[str, ...]


class Environments(_Model):
    """The environments bringup built. ``current`` None: nothing serves."""

    current: str | None
    is_current_whole: bool
    environments: tuple[EnvironmentEntry, ...]
    inspected: tuple[InspectedEnvironment, ...]
    is_deep: bool

    @property
    def serving(self) -> EnvironmentEntry | None:
        """Return the complete environment that ``current`` points at, or None."""
        if self.current is None:
            return None
        name = self.current.rsplit("/", 1)[-1]
        return next((entry for entry in self.environments if entry.name == name and entry.is_complete), None)

    def inspect(self, path: str) -> InspectedEnvironment | None:
        """Return the inspected environment at a path, links followed or not; None when there is none."""
        return next((item for item in self.inspected if path in (item.path, item.resolved)), None)


class GpuProcess(_Model):
    """A process that holds a GPU's device file open or computes on one."""

    pid: int
    command: str
    user_id: int | None
    unit: str | None
    devices: tuple[str, ...]
    is_computing: bool


class EnvironmentProcess(_Model):
    """A process that runs from an environment, and what shows it (maps, cmdline, cwd, environ)."""

    pid: int
    command: str
    user_id: int | None
    unit: str | None
    environment: str
    witnesses: tuple[str, ...]


class Processes(_Model):
    """Processes that use a GPU, and processes that run from an environment."""

    gpu: tuple[GpuProcess, ...]
    environment: tuple[EnvironmentProcess, ...]


class Space(_Model):
    """A file system as seen from a directory, or from its nearest parent when it is not there yet.

    ``free_inodes`` None: the file system makes inodes as it needs them.
    """

    exists: bool
    device: int
    total_bytes: int
    free_bytes: int
    free_inodes: int | None
    is_noexec: bool
    is_readonly: bool


class Time(_Model):
    """The host's clock when the probe began and when it answered. ``keeper`` None: nothing keeps it."""

    started_s: float
    answered_s: float
    keeper: str | None


class _Record(BaseModel):
    """A file bringup itself left on the host. Fields that a newer bringup wrote are left aside."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class MeasurementKey(_Record):
    """What must be equal before two bandwidths may be compared. None: it could not be read."""

    gpu_model: str
    gpus: int = Field(ge=0)
    topology: str | None = None
    nccl_version: str | None = None
    algorithm: str | None = None


class BackendRecord(_Record):
    """What one all-reduce backend gave at one payload, or why it gave nothing; bandwidths in 10**9 bytes/s."""

    backend: str
    state: Literal["measured", "missing", "not_run"]
    payload_bytes: int | None = Field(default=None, ge=0)
    ranks: int | None = Field(default=None, ge=1)
    busbw_gb_per_s: float | None = None
    algbw_gb_per_s: float | None = None
    latency_us: float | None = None
    verdict: Literal["pass", "warn", "fail"] | None = None
    required: bool = False
    reason: str | None = None
    key: MeasurementKey | None = None


class Verification(_Record):
    """The record of the last verify that passed, and what it holds for.

    ``environment`` is the name of a built environment (digest-generation) or the path of an existing one.
    ``gpu_uuids`` and ``mig_modes`` stand in the order of the driver's index. ``measured_at_s`` is seconds
    since the Unix epoch.
    """

    schema_: Literal[1] = Field(alias="schema")
    environment: str
    limits_digest: str
    driver_version: str | None
    gpu_uuids: tuple[str, ...]
    mig_modes: tuple[str | None, ...] = ()
    boot_id: str | None
    measured_at_s: float
    simulated: tuple[str, ...] = ()
    backends: tuple[BackendRecord, ...] = ()


class Pin(_Record):
    """What a rollback left: the stack digest that must not return by itself, why, and since when (RFC 3339)."""

    digest: str
    reason: str
    since: str


class Assigned(_Record):
    """The stack that a rollout assigned to this host."""

    name: str
    digest: str


class LockHolder(_Model):
    """The process that holds one of apt's locks."""

    pid: int
    command: str


class OurLock(_Model):
    """One of bringup's locks. ``holder_pid`` None: free; ``note`` is what the holder wrote about itself."""

    holder_pid: int | None
    note: Mapping[str, Any] | None


class Locks(_Model):
    """Who holds apt's and dpkg's locks, and bringup's own."""

    apt: Mapping[str, LockHolder]
    run: OurLock
    work: OurLock
    reservation: Mapping[str, Any] | None


class Service(_Model):
    """A systemd unit in systemd's own words; ``load`` is not-found where there is none."""

    load: str
    active: str
    sub: str
    enabled: str
    needs_reload: bool
    main_pid: int | None


class Variable(_Model):
    """A variable that a file sets. ``value`` None: it may hold a secret and was not read."""

    file: str
    line: int
    name: str
    value: str | None


class HostFile(_Model):
    """A file of bringup's own. ``sha256`` None: not a regular file."""

    sha256: str | None
    size_bytes: int
    mode: int
    user_id: int


class CloudInit(_Model):
    """Whether cloud-init is still at work."""

    state: Literal["absent", "disabled", "running", "done"]


class HostState(_Model):
    """Everything one probe said about one host."""

    schema_: Literal[1] = Field(alias="schema")
    os: Os | Unknown
    kernel: Kernel | Unknown
    secure_boot: SecureBoot | Unknown
    dpkg: Dpkg | Unknown
    apt: Apt | Unknown
    driver: Driver | Unknown
    gpus: Gpus | Unknown
    fabric: Fabric | Unknown
    toolkits: Toolkits | Unknown
    loader: Loader | Unknown
    python: Python | Unknown
    environment: Environments | Unknown
    processes: Processes | Unknown
    space: Mapping[str, Space] | Unknown
    time: Time | Unknown
    verification: Verification | Unknown | None
    pin: Pin | Unknown | None
    assigned: Assigned | Unknown | None
    locks: Locks | Unknown
    services: Mapping[str, Service] | Unknown
    env_files: tuple[Variable, ...] | Unknown
    files: Mapping[str, HostFile | None] | Unknown
    cloud_init: CloudInit | Unknown
    simulated: tuple[str, ...]
    seconds: Mapping[str, float] = Field(default_factory=dict)
    received_at_s: float | None = Field(default=None, exclude=True)
    """When the controller received the answer, by the controller's clock; no part of the answer."""

    @property
    def current_environment(self) -> EnvironmentEntry | None:
        """Return the complete environment that serves; None when none does or nobody could look."""
        return None if isinstance(self.environment, Unknown) else self.environment.serving

    @property
    def pin_found(self) -> Pin | None:
        """Return the pin on the host; None when there is none or it could not be read."""
        return None if isinstance(self.pin, Unknown) else self.pin

    @property
    def assigned_stack(self) -> Assigned | None:
        """Return the stack a rollout assigned; None when none did or the record could not be read."""
        return None if isinstance(self.assigned, Unknown) else self.assigned

    def unknown_sections(self) -> Mapping[str, str]:
        """Return the sections that could not be looked at, with the reason."""
        values = ((name, getattr(self, name)) for name in SECTIONS)
        return {name: value.error for name, value in values if isinstance(value, Unknown)}


SECTIONS = tuple(name for name in HostState.model_fields if name not in ("schema_", "seconds", "received_at_s"))
"""The names of the sections."""


@functools.cache
def _when_known(section: str) -> TypeAdapter[Any]:
    """Return the type that a section's value must have when it is known."""
    annotation: Any = HostState.model_fields[section].annotation
    members = get_args(annotation)
    if Unknown not in members:
        return TypeAdapter(annotation)
    return TypeAdapter(functools.reduce(operator.or_, (member for member in members if member is not Unknown)))


_RECORDS = frozenset({"verification", "pin", "assigned"})
_MUST_BE_KNOWN = frozenset({"simulated"})


def probe_parameters(stack: Any, *, deep: bool = False) -> dict[str, Any]:
    """Return what the probe must be asked so that a ``Stack`` can be compared: names, never a wanted version.

    The type is left open because the wanted and the found side do not import each other.
    """
    existing = stack.python.existing
    locked = stack.lock.packages.values() if stack.lock else ()
    packages = {
        package.name
        for release in locked
        for group in (release.driver, *release.fabric.values(), *release.toolkits.values())
        for package in group
    }
    return {
        "sonames": sorted(stack.linker),
        "packages": sorted(packages),
        "units": sorted(stack.service.restart),
        "environments": [existing] if existing else [],
        "deep": deep,
    }


def parse(answer: str | bytes, *, host: str | None = None, received_at_s: float | None = None) -> HostState:
    """Return what a probe's standard output says; its last line that is not empty holds the document.

    A record that bringup left on the host and that somebody spoiled is Unknown: it is no fault of the probe.
    What is simulated must be known: on it hangs whether a look-alike may be called one.
    Raises HostError when there is no document, when it is larger than SIZE_LIMIT_BYTES, or when a value has
    the wrong shape; the error names the key path.
    """
    line = _last_line(answer, host)
    if (state := _as_expected(line)) is not None:
        return state.model_copy(update={"received_at_s": received_at_s})
    document = _document(line, host)
    schema = document.get("schema")
    if schema != 1:
        raise _wrong(host, "schema", "1", schema)
    values: dict[str, Any] = {name: _section(name, document, host) for name in SECTIONS}
    seconds = document.get("seconds", {})
    try:
        return HostState(schema=1, seconds=seconds, received_at_s=received_at_s, **values)
    except ValidationError as error:
        raise _wrong_shape(host, "", error) from None


def _as_expected(line: str) -> HostState | None:
    """Return the state in one pass when every section has its shape and no text needs cleaning; else None.

    That is nearly every answer, and the long way costs ten times as much. It comes to the same result: it is only
    needed to say what is wrong, and where.
    """
    if not line.isprintable() or _SUSPECT.search(line):
        return None
    try:
        state = HostState.model_validate_json(line, strict=True)
    except ValidationError:
        return None
    # An error must not pass for a mapping that has one key.
    is_odd = any(isinstance(value, Mapping) and set(value) == {"error"} for _, value in state)
    return None if is_odd or "received_at_s" in state.model_fields_set else state


def _last_line(answer: str | bytes, host: str | None) -> str:
    data = answer.encode("utf-8", "surrogatepass") if isinstance(answer, str) else answer
    if len(data) > SIZE_LIMIT_BYTES:
        raise HostError(
            "host probe answered too much",
            host=host,
            why=f"wanted at most {SIZE_LIMIT_BYTES} bytes, found {len(data)}",
        )
    lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    if not lines:
        raise HostError("host probe did not answer", host=host, why="its output is empty")
    return lines[-1]


def _document(line: str, host: str | None) -> dict[str, Any]:
    try:
        document = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HostError(
            "host probe's answer is no JSON document",
            host=host,
            why=f"{error}; its last line begins with {clean(line[:80])!r}",
        ) from None
    if not isinstance(document, dict):
        raise HostError("host probe's answer is no JSON object", host=host, why=f"found {type(document).__name__}")
    try:
        cleaned: dict[str, Any] = _cleaned(document)
    except RecursionError:
        raise HostError("host probe's answer is nested too deeply", host=host) from None
    return cleaned


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def clean(text: str) -> str:
    """Return text without escape sequences, control characters and direction marks; tab and newline stay."""
    if text.isprintable():
        return text  # none of those can be printed, and nearly every text is one that can
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    return value


def _section(name: str, document: Mapping[str, Any], host: str | None) -> Any:
    if name not in document and name not in _MUST_BE_KNOWN:
        return Unknown(error=f"the probe's answer has no section {name}")
    value = document.get(name)
    if isinstance(value, dict) and set(value) == {"error"} and name not in _MUST_BE_KNOWN:
        return _validated(TypeAdapter(Unknown), name, value, host)
    try:
        return _validated(_when_known(name), name, value, host)
    except HostError as error:
        if name in _RECORDS:
            return Unknown(error=error.why or error.what)
        raise


def _validated(adapter: TypeAdapter[T], name: str, value: Any, host: str | None) -> T:
    try:
        # Strict JSON: a number is no text and a text no number, while a list may become a tuple.
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise _wrong_shape(host, name, error) from None


def _wrong_shape(host: str | None, section: str, error: ValidationError) -> HostError:
    first = error.errors(include_url=False)[0]
    path = section
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return _wrong(host, clean(path.lstrip(".")), message, first["input"])


def _wrong(host: str | None, path: str, wanted: str, found: object) -> HostError:
    shown = clean(repr(found))
    return HostError(
        "host probe's answer has the wrong shape",
        host=host,
        why=f"{path}: wanted {wanted}, found {shown if len(shown) <= 80 else shown[:79] + '…'}",
        hint="the probe belongs to this version of bringup: reinstall bringup, or look at the host",
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an answer; ``docs/reference/probe.schema.json`` holds it."""
    schema = HostState.model_json_schema(by_alias=True)
    del schema["properties"]["received_at_s"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Answer of host_probe.py"}
