"""The one diff: what a stack wants of a host, compared with what the probe found.

It is the drift report, the plan, and the condition under which operations act. Rules stand in the order in
which the deploy acts. A rule that needs a section nobody could look at says nothing here; ``unknowns`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bringup import wanted
from bringup.catalog import FabricKind
from bringup.host_state import (
    Driver,
    GpuProcess,
    HostState,
    InspectedEnvironment,
    Unknown,
    Verification,
)
from bringup.stack import LockedPackage, LockedPackages, Stack
from bringup.wanted import NVIDIA, Site

T = TypeVar("T")
VerificationState = Literal["verified", "stale", "none"]

SHOWN_ITEMS = 4
"""How many packages a difference names before it counts the rest."""


@dataclass(frozen=True)
class Path:
    """A pattern of paths that ``diff`` can emit, the task that removes such a difference, and what it means."""

    pattern: str
    task: str
    meaning: str


@dataclass(frozen=True)
class Difference:
    """One thing that is not as the stack wants it.

    ``wanted`` None: nothing should be there; ``found`` None: nothing is there.
    """

    path: str
    wanted: str | None
    found: str | None

    @property
    def area(self) -> str:
        """Return the first part of the path, such as ``driver``."""
        return self.path.split(".", 1)[0]

    @property
    def task(self) -> str:
        """Return the task of the deploy that removes this difference."""
        return next(path.task for path in PATHS if fnmatchcase(self.path, path.pattern))


class _NotKnown(Exception):
    """A rule needs something that nobody could look at, or that the lock does not say."""


@dataclass
class _View:
    """The stack, the site and the host as one rule sees them, and the paths that differ so far."""

    stack: Stack
    state: HostState
    site: Site
    found: set[str]

    def known(self, value: T | Unknown) -> T:
        if isinstance(value, Unknown):
            raise _NotKnown(value.error)
        return value

    def differs(self, pattern: str) -> bool:
        return any(fnmatchcase(path, pattern) for path in self.found)

    @property
    def release(self) -> str:
        return self.known(self.state.os).release

    @property
    def locked(self) -> LockedPackages | None:
        return self.stack.locked_packages(self.release)

    @property
    def driver(self) -> Driver:
        return self.known(self.state.driver)

    @property
    def fabric_kind(self) -> FabricKind:
        kind = wanted.fabric_kind(self.stack, self.state)
        if kind is None:
            raise _NotKnown("the GPUs could not be looked at")
        return kind

    @property
    def family(self) -> tuple[str, ...]:
        self.known(self.state.dpkg)
        return wanted.driver_family(self.stack, self.state, self.locked)

    def file(self, path: str) -> str | None:
        """Return the hash of one of our files, None when it is not there."""
        files = self.known(self.state.files)
        if path not in files:
            raise _NotKnown(f"the probe was not asked for {path}")
        file = files[path]
        return None if file is None else file.sha256 or "not a regular file"


@dataclass(frozen=True)
class Judgement:
    """What one evaluation of every rule gave; ``diff`` and ``unknowns`` return its halves."""

    differences: tuple[Difference, ...]
    unknowns: tuple[str, ...]


Finds = Iterator[tuple[str, str | None, str | None]]
_RULES: list[tuple[tuple[Path, ...], Callable[[_View], Finds]]] = []


def _rule(*paths: Path) -> Callable[[Callable[[_View], Finds]], Callable[[_View], Finds]]:
    """Register a rule with every path it can emit."""

    def register(function: Callable[[_View], Finds]) -> Callable[[_View], Finds]:
        _RULES.append((paths, function))
        return function

    return register


def diff(stack: Stack, state: HostState, site: Site = NVIDIA) -> tuple[Difference, ...]:
    """Return what is not as wanted, in the order in which the deploy acts; empty on a converged host."""
    return judge(stack, state, site).differences


def unknowns(stack: Stack, state: HostState, site: Site = NVIDIA) -> tuple[str, ...]:
    """Return what could not be compared and why, such as ``fabric.service: systemd is not running``.

    Not empty means that the host's state is unknown, never that it is as wanted.
    """
    return judge(stack, state, site).unknowns


def judge(stack: Stack, state: HostState, site: Site = NVIDIA) -> Judgement:
    """Return differences and unknowns together: comparing is most of what a host costs that is as wanted."""
    differences: list[Difference] = []
    unknown: list[str] = []
    view = _View(stack, state, site, set())
    for paths, rule in _RULES:
        found: list[Difference] = []
        try:
            for item in rule(view):
                found.append(Difference(*item))
        except _NotKnown as error:
            unknown.append(f"{paths[0].pattern}: {error}")
        differences.extend(found)
        view.found.update(difference.path for difference in found)
    return Judgement(tuple(differences), tuple(unknown))


def _listed(items: Iterable[str]) -> str:
    """Return items in one line, the first few by name."""
    names = list(items)
    shown = ", ".join(names[:SHOWN_ITEMS])
    return shown if len(names) <= SHOWN_ITEMS else f"{shown} and {len(names) - SHOWN_ITEMS} more"


def _file_difference(view: _View, path: str, name: str, text: str, wish: str) -> Finds:
    """Yield a difference when one of our files is not there or has another content."""
    seen = view.file(path)
    if seen != wanted.sha256(text):
        yield name, wish, None if seen is None else f"{path} has other content"


def _package_difference(view: _View, name: str, locked: Iterable[LockedPackage], whole: str) -> Finds:
    """Yield one difference for all packages that are not installed in exactly their locked version."""
    dpkg = view.known(view.state.dpkg)
    packages = list(locked)
    wrong = []
    for package in packages:
        installed = dpkg.installed(package.name)
        if installed is None or installed.version != package.version:
            wrong.append((package, installed))
    if not wrong:
        return
    if all(installed is None for _, installed in wrong) and len(wrong) == len(packages):
        yield name, f"{whole}: {len(packages)} packages", None
        return
    yield (
        name,
        _listed(f"{package.name} {package.version}" for package, _ in wrong),
        _listed(f"{p.name} {installed.version if installed else 'not installed'}" for p, installed in wrong),
    )


# ---------------------------------------------------------------- preflight


@_rule(Path("pin", "preflight", "The wanted stack was rolled back here and must not return by itself."))
def _pin(view: _View) -> Finds:
    pin = view.known(view.state.pin)
    if pin is not None and pin.digest == view.stack.digest:
        yield "pin", None, f"{pin.digest}, since {pin.since}: {pin.reason}"


# ---------------------------------------------------------------- driver


@_rule(Path("apt.key", "driver", "The key file of NVIDIA's repository holds the wanted key and no other."))
def _key(view: _View) -> Finds:
    if view.locked is None:
        return
    repository = wanted.repository(view.state, view.site)
    if repository is None:
        raise _NotKnown(f"no repository is known for {view.release}: name one with bringup_apt_url")
    key = view.known(view.state.apt).keys.get(wanted.KEY_FILE)
    if key is None:
        raise _NotKnown(f"the probe did not look at {wanted.KEY_FILE}")
    if key.fingerprints != (repository[1],):
        found = ", ".join(key.fingerprints) or key.error
        yield "apt.key", repository[1], None if found == "absent" else found


@_rule(Path("apt.source", "driver", "bringup's own apt source is there as written."))
def _source(view: _View) -> Finds:
    if view.locked is None:
        return
    repository = wanted.repository(view.state, view.site)
    if repository is None:
        raise _NotKnown(f"no repository is known for {view.release}: name one with bringup_apt_url")
    text = wanted.source_text(repository[0])
    yield from _file_difference(view, wanted.SOURCE_FILE, "apt.source", text, repository[0])


@_rule(Path("apt.preferences", "driver", "Every locked package is pinned at its locked version."))
def _preferences(view: _View) -> Finds:
    if view.locked is not None:
        text = wanted.preferences_text(view.locked)
        wish = "the locked packages pinned"
        yield from _file_difference(view, wanted.PREFERENCES_FILE, "apt.preferences", text, wish)


@_rule(Path("driver.unattended_upgrades", "driver", "Unattended upgrades leave the whole family alone."))
def _unattended_upgrades(view: _View) -> Finds:
    family = view.family
    if not family:
        return
    blacklist = frozenset(view.known(view.state.apt).blacklist)
    # The entries that we write are found at a glance; another's may be any regular expression.
    unlisted = [name for name in family if wanted.blacklist_entry(name) not in blacklist]
    patterns = [_pattern(entry) for entry in blacklist] if unlisted else []
    free = [name for name in unlisted if not any(p is not None and p.match(name) for p in patterns)]
    if free:
        yield (
            "driver.unattended_upgrades",
            f"{len(family)} packages blacklisted",
            None if len(free) == len(family) else f"not blacklisted: {_listed(free)}",
        )


def _pattern(entry: str) -> re.Pattern[str] | None:
    """Return a blacklist entry as unattended-upgrades reads it; None for one it would reject."""
    try:
        return re.compile(entry)
    except re.error:
        return None


@_rule(Path("driver.nouveau", "driver", "nouveau is off: by our modprobe file, and not loaded."))
def _nouveau(view: _View) -> Finds:
    if view.locked is None:
        return
    text = wanted.nouveau_text()
    found = list(_file_difference(view, wanted.NOUVEAU_FILE, "driver.nouveau", text, "nouveau off"))
    if not found and "nouveau" in view.driver.modules:
        found = [("driver.nouveau", "nouveau off", "nouveau is loaded")]
    yield from found


@_rule(Path("kernel.hold", "driver", "With policy hold, every installed kernel package is on hold."))
def _kernel_hold(view: _View) -> Finds:
    if view.stack.kernel.policy != "hold":
        return
    packages = view.known(view.state.dpkg).packages
    kernel = {n: p for n, p in packages.items() if wanted.is_kernel_package(n) and p.is_installed}
    free = sorted(name for name, package in kernel.items() if not package.is_held)
    if free:
        yield "kernel.hold", f"{len(kernel)} kernel packages held", f"not held: {_listed(free)}"


@_rule(Path("driver.packages", "driver", "The driver's packages are installed as exactly the locked set."))
def _driver_packages(view: _View) -> Finds:
    if wanted.is_driver_kept(view.stack, view.state):
        yield from _mixed_packages(view)
        return
    view.known(view.state.driver)
    if view.locked is None or not view.locked.driver:
        raise _NotKnown(f"the lock holds no driver packages for {view.release}: run bringup lock")
    whole = f"{view.stack.driver.version} {view.stack.driver.flavour}"
    yield from _package_difference(view, "driver.packages", view.locked.driver, whole)


def _mixed_packages(view: _View) -> Finds:
    """Yield a difference when a driver that is kept has packages of another version beside it."""
    loaded = view.driver.loaded
    version = loaded.version if loaded else None
    packages = view.known(view.state.dpkg).packages
    other = sorted(
        f"{name} {package.version}"
        for name, package in packages.items()
        if package.is_installed
        and wanted.is_of_driver_version(name)
        and re.match(r"\d{3}\.\d+", wanted.upstream(package.version))
        and not wanted.upstream(package.version).startswith(f"{version}")
    )
    if other:
        yield "driver.packages", f"all of {version}", _listed(other)


@_rule(Path("fabric.packages", "driver", "The packages of the NVSwitch fabric are the locked set."))
def _fabric_packages(view: _View) -> Finds:
    kind = view.fabric_kind
    if kind == "none" or wanted.is_driver_kept(view.stack, view.state):
        return
    locked = view.locked.fabric.get(kind) if view.locked else None
    if not locked:
        raise _NotKnown(f"the lock holds no {kind} packages for {view.release}: run bringup lock")
    own = {package.name for package in view.locked.driver} if view.locked else set()
    packages = [package for package in locked if package.name not in own]
    yield from _package_difference(view, "fabric.packages", packages, kind)


@_rule(Path("driver.hold", "driver", "Every package of the driver and its fabric is on hold."))
def _hold(view: _View) -> Finds:
    family = view.family
    packages = view.known(view.state.dpkg).packages
    installed = [name for name in family if name in packages and packages[name].is_installed]
    # dpkg lifts the hold of a package that it replaces: one of another version is driver.packages' line already.
    locked = {} if wanted.is_driver_kept(view.stack, view.state) else wanted.locked_versions(view.locked)
    as_locked = [name for name in installed if packages[name].version == locked.get(name, packages[name].version)]
    free = [name for name in as_locked if not packages[name].is_held]
    if family and not installed:
        yield "driver.hold", f"{len(family)} packages held", None
    elif free:
        yield "driver.hold", f"{len(family)} packages held", f"not held: {_listed(free)}"


@_rule(Path("fabric.ib_umad", "driver", "ib_umad is loaded now and at every boot, where NVLink 5 needs it."))
def _ib_umad(view: _View) -> Finds:
    if view.fabric_kind != "nvlink5":
        return
    wish = "ib_umad loaded, at every boot"
    text = wanted.fabric_modules_text()
    found = list(_file_difference(view, wanted.FABRIC_MODULES_FILE, "fabric.ib_umad", text, wish))
    # The boot that brings the driver brings the module too.
    is_reboot_ahead = not wanted.is_driver_accepted(view.stack, view.state)
    if not found and not is_reboot_ahead and not view.known(view.state.fabric).is_ib_umad_loaded:
        found = [("fabric.ib_umad", wish, "ib_umad is not loaded")]
    yield from found


@_rule(Path("driver.loaded", "driver", "The kernel runs the wanted driver; a difference needs a reboot."))
def _loaded(view: _View) -> Finds:
    loaded = view.driver.loaded
    if wanted.is_driver_accepted(view.stack, view.state):
        return
    driver = view.stack.driver
    wish = f"{driver.version} {driver.flavour}"
    if driver.policy == "at_least":
        wish = f"at least {driver.minimum or driver.version} {driver.flavour}"
        on_disk = sorted({library.version for library in view.driver.libcuda} - {loaded.version if loaded else ""})
        if loaded and on_disk:
            wish = f"{', '.join(on_disk)} {driver.flavour}, which lies on disk"
    yield "driver.loaded", wish, f"{loaded.version} {loaded.flavour or ''}".strip() if loaded else None


@_rule(Path("driver.persistence", "driver", "GPUs stay initialised while nobody uses them."))
def _persistence(view: _View) -> Finds:
    services = view.state.services
    gpus = view.state.gpus
    listed = () if isinstance(gpus, Unknown) else gpus.listed or ()
    is_persistent = bool(listed) and all(gpu.is_persistent for gpu in listed)
    if isinstance(services, Unknown):
        if not is_persistent:
            raise _NotKnown(services.error)
        return
    yield from _unit(view, "driver.persistence", wanted.PERSISTENCE_UNIT, is_absence_fine=is_persistent)


def _unit(view: _View, path: str, name: str, *, is_absence_fine: bool = False) -> Finds:
    """Yield a difference unless a unit is enabled and active."""
    unit = view.known(view.state.services).get(name)
    if unit is None or unit.load != "loaded":
        if not is_absence_fine:
            yield path, f"{name} enabled and active", None
    elif unit.active != "active" or unit.enabled not in ("enabled", "static", "alias", "generated"):
        yield path, f"{name} enabled and active", f"{unit.enabled or 'no unit file'} and {unit.active}"


@_rule(Path("fabric.service", "driver", "The fabric manager is enabled and runs, where the boards need it."))
def _fabric_service(view: _View) -> Finds:
    if view.fabric_kind != "none":
        yield from _unit(view, "fabric.service", wanted.FABRIC_UNIT)


# ---------------------------------------------------------------- cuda


@_rule(Path("cuda.alternatives", "cuda", "The links that move are frozen: alternatives in manual mode."))
def _alternatives(view: _View) -> Finds:
    toolkits = view.known(view.state.toolkits)
    majors = {version.split(".")[0] for version in view.stack.cuda.toolkits}
    names = ["cuda", *sorted(f"cuda-{major}" for major in majors)]
    present = [name for name in names if name in toolkits.alternatives]
    moving = [name for name in present if toolkits.alternatives[name].mode != "manual"]
    packaged = [v for v in view.stack.cuda.toolkits if v not in view.stack.cuda.runfiles]
    if moving:
        found = ", ".join(f"{name} is {toolkits.alternatives[name].mode}" for name in moving)
        yield "cuda.alternatives", f"{', '.join(present)} manual", found
    elif not present and packaged and not any(version in toolkits.installed for version in packaged):
        # Not there yet: the toolkits to come will register them in automatic mode.
        yield "cuda.alternatives", f"{', '.join(names)} manual", None


@_rule(Path("cuda.toolkit.*", "cuda", "A toolkit's packages are the locked set, or its runfile is installed."))
def _toolkits(view: _View) -> Finds:
    for version in view.stack.cuda.toolkits:
        path = f"cuda.toolkit.{version}"
        installed = view.known(view.state.toolkits).installed.get(version)
        if version in view.stack.cuda.runfiles:
            if installed is None or not installed.has_nvcc:
                yield path, f"{version} from {view.stack.cuda.runfiles[version].file}", None
            continue
        if view.locked is not None and view.locked.toolkits.get(version):
            packages = wanted.toolkit_packages(view.stack, view.locked, version)
            yield from _package_difference(view, path, packages, version)
        elif installed is None or not (installed.has_nvcc or installed.nvrtc):
            raise _NotKnown(f"the lock holds no packages of {version} for {view.release}: run bringup lock")


# ---------------------------------------------------------------- linker


@_rule(Path("linker.conf", "linker", "bringup's loader entry names the versioned directories."))
def _linker_conf(view: _View) -> Finds:
    if not view.stack.linker:
        return
    machine = view.known(view.state.os).machine
    directories = [wanted.library_directory(v, machine) for v in wanted.linked_toolkits(view.stack)]
    text = wanted.linker_text(view.stack, machine)
    yield from _file_difference(view, wanted.LINKER_FILE, "linker.conf", text, ", ".join(directories))


@_rule(Path("linker.lib*", "linker", "The loader's first hit for a SONAME lies in the wanted toolkit."))
def _sonames(view: _View) -> Finds:
    if not view.stack.linker or view.differs("linker.conf"):
        return
    loader = view.known(view.state.loader)
    for soname, version in view.stack.linker.items():
        if view.differs(f"cuda.toolkit.{version}"):
            continue
        first = loader.first(soname)
        # By the text of the path: a hit through /usr/local/cuda is right today and wrong after a flip.
        if first is None or not first.path.startswith(wanted.toolkit_directory(version) + "/"):
            yield f"linker.{soname}", wanted.toolkit_directory(version), first.path if first else None


# ---------------------------------------------------------------- environment


@_rule(
    Path("environment.distribution.*", "environment", "A distribution has its locked version, and none is extra."),
    Path("environment.files.*", "environment", "A distribution's files are as they were installed."),
    Path("environment.strays", "environment", "Nothing lies in site-packages that belongs to no distribution."),
    Path("environment.existing", "environment", "The existing environment that the stack names is there."),
)
def _environment(view: _View) -> Finds:
    existing = view.stack.python.existing
    if existing is not None:
        yield from _existing_environment(view, existing)
        return
    environments = view.known(view.state.environment)
    serving = environments.serving
    if serving is None or serving.digest != _env_digest(view):
        return
    inspected = environments.inspect(environments.current or "")
    if inspected is None:
        raise _NotKnown("the probe did not look into the serving environment")
    locked = view.stack.locked_distributions(wanted.platform(view.stack, view.state) or "")
    yield from _distributions(inspected, locked)
    if inspected.strays:
        yield "environment.strays", None, _listed(inspected.strays)


def _distributions(inspected: InspectedEnvironment, locked: Mapping[str, str]) -> Finds:
    for name in sorted({*locked, *inspected.distributions}):
        want, found = locked.get(name), inspected.distributions.get(name)
        if want != found:
            yield f"environment.distribution.{name}", want, found
        elif name in inspected.changed or name in inspected.unlike_record:
            paths = inspected.unlike_record.get(name, ())
            yield f"environment.files.{name}", "as installed", f"changed: {_listed(paths)}" if paths else "changed"


def _existing_environment(view: _View, path: str) -> Finds:
    inspected = view.known(view.state.environment).inspect(path)
    if inspected is None or inspected.python is None or not inspected.has_interpreter:
        yield "environment.existing", f"a Python environment at {path}", None
        return
    for step in view.stack.python.steps:
        for text in step.requirements:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            found = inspected.distributions.get(name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                yield f"environment.distribution.{name}", str(requirement.specifier) or "any version", found


def _env_digest(view: _View) -> str:
    name = wanted.platform(view.stack, view.state)
    if name is None:
        raise _NotKnown("the host's machine type could not be looked at")
    digest = view.stack.env_digest(name)
    if digest is None:
        raise _NotKnown(f"the lock holds no wheels for {name}: run bringup lock")
    return digest


@_rule(Path("environment.launcher", "environment", "The launcher that services use is the one bringup ships."))
def _launcher(view: _View) -> Finds:
    if view.stack.python.existing is not None or view.site.launcher_sha256 is None:
        return
    files = view.known(view.state.files)
    file = files.get(wanted.LAUNCHER_FILE)
    wish = "the launcher of this bringup, executable"
    if file is None or file.sha256 != view.site.launcher_sha256:
        yield "environment.launcher", wish, None if file is None else "other content"
    elif file.mode & 0o555 != 0o555:
        yield "environment.launcher", wish, f"mode {file.mode:04o}"


# ---------------------------------------------------------------- verify


@_rule(Path("verification", "verify", "A record proves this environment, driver and these GPUs."))
def _verification(view: _View) -> Finds:
    record = view.known(view.state.verification)
    if record is None:
        yield "verification", "verified", None
        return
    if other := _other_than_verified(view, record):
        yield "verification", "verified", f"verified for {other}"


def _other_than_verified(view: _View, record: Verification) -> str | None:
    """Return what the record holds for that is not so now, or None when all of it is.

    What another difference already names is left out: one cause gives one line.
    """
    if problem := _other_environment(view, record):
        return problem
    if record.limits_digest != wanted.limits_digest(view.stack):
        return f"other limits ({record.limits_digest})"
    if view.differs("driver.packages") or view.differs("driver.loaded"):
        return None
    loaded = view.driver.loaded
    version = loaded.version if loaded else None
    if record.driver_version != version:
        return f"driver {record.driver_version}"
    listed = view.known(view.state.gpus).listed
    if listed is None:
        if record.gpu_uuids or record.mig_modes:
            raise _NotKnown(view.driver.smi_message or "nvidia-smi does not list the GPUs")
        return None
    if record.gpu_uuids != tuple(gpu.uuid for gpu in listed):
        return f"other GPUs ({len(record.gpu_uuids)} of them)"
    if record.mig_modes and record.mig_modes != tuple(gpu.mig_mode for gpu in listed):
        return "another MIG mode"
    return None


def _other_environment(view: _View, record: Verification) -> str | None:
    existing = view.stack.python.existing
    if existing is not None:
        return None if record.environment == existing else f"environment {record.environment}"
    digest = _env_digest(view)
    serving = view.known(view.state.environment).serving
    if serving is not None and serving.digest == digest:
        return None if record.environment == serving.name else f"environment {record.environment}"
    return None if record.environment.startswith(f"{digest}-") else f"environment {record.environment}"


# ---------------------------------------------------------------- switch


@_rule(Path("cuda.default", "switch", "/usr/local/cuda points at the default toolkit."))
def _cuda_default(view: _View) -> Finds:
    link = view.known(view.state.toolkits).links.get(wanted.CUDA_LINK)
    want = wanted.toolkit_directory(view.stack.cuda.default)
    if link is None or link.resolved != want:
        yield "cuda.default", want, link.resolved if link else None


@_rule(Path("service.file", "switch", "The service variables file holds the stack's variables."))
def _service_file(view: _View) -> Finds:
    if view.stack.python.existing is None:
        text = wanted.service_text(view.stack)
        wish = _listed(sorted(wanted.service_variables(view.stack)))
        yield from _file_difference(view, wanted.SERVICE_FILE, "service.file", text, wish)


@_rule(Path("environment.current", "switch", "current points at a whole environment of the wanted digest."))
def _current(view: _View) -> Finds:
    if view.stack.python.existing is not None:
        return
    digest = _env_digest(view)
    environments = view.known(view.state.environment)
    serving = environments.serving
    if serving is None:
        found = environments.current
        yield "environment.current", digest, f"{found.rsplit('/', 1)[-1]}, not whole" if found else None
        return
    inspected = environments.inspect(environments.current or "")
    if serving.digest != digest:
        yield "environment.current", digest, serving.name
    elif serving.is_tainted:
        yield "environment.current", digest, f"{serving.name}, tainted"
    elif inspected is not None and not inspected.has_interpreter:
        yield "environment.current", digest, f"{serving.name}, its interpreter is gone"


PATHS: tuple[Path, ...] = tuple(path for paths, _ in _RULES for path in paths)
"""Every path that ``diff`` can emit, in the order in which the deploy acts."""


# ---------------------------------------------------------------- what else the deploy must know


def verification_state(
    stack: Stack, state: HostState, site: Site = NVIDIA, *, judged: Judgement | None = None
) -> VerificationState:
    """Return whether the host is proved. Stale: proved, but before this boot; that alone is no difference.

    ``judged`` is what ``judge`` gave for the same three; None: it is asked.
    """
    record = state.verification
    if record is None or isinstance(record, Unknown):
        return "none"
    differences = (judged or judge(stack, state, site)).differences
    if any(difference.path == "verification" for difference in differences):
        return "none"
    kernel = state.kernel
    is_this_boot = not isinstance(kernel, Unknown) and kernel.boot_id == record.boot_id
    return "verified" if is_this_boot else "stale"


def verification(
    stack: Stack, state: HostState, site: Site = NVIDIA, *, judged: Judgement | None = None
) -> dict[str, Any]:
    """Return the verification's state, when it was measured (None: never), and what it measured."""
    known = verification_state(stack, state, site, judged=judged)
    record = state.verification
    if known == "none" or record is None or isinstance(record, Unknown):
        return {"state": "none", "measured_at_s": None, "backends": ()}
    backends = tuple(backend.model_dump() for backend in record.backends)
    return {"state": known, "measured_at_s": record.measured_at_s, "backends": backends}


def gpus_in_use(state: HostState) -> tuple[GpuProcess, ...] | Unknown:
    """Return the processes that use a GPU, NVIDIA's own daemons left out.

    Unknown when nobody could look; it is true as a condition, so a host that cannot be read counts as busy.
    """
    if isinstance(state.processes, Unknown):
        return state.processes
    return tuple(p for p in state.processes.gpu if p.is_computing or p.unit not in wanted.DAEMONS)
