"""The table of checks: each makes rows of the facts that look.py gathered (pure)."""

from collections.abc import Callable, Iterator

import msgspec

from deviceplugin.doctor.model import Row, State, of_reason, row, well
from deviceplugin.doctor.reasons import DoctorCode
from deviceplugin.status.model import PluginStatus
from mpsd.common.reason import Reason, reason_of, reasons_of
from mpsd.localapi.snapshot import DaemonState, Snapshot

DISK_LOW_BYTES = 64 << 20
INOTIFY_LOW = 128
"""Instances of one user: the kernel's default. A kubelet and a runtime as the same user take some tens."""


class Place(msgspec.Struct, frozen=True):
    """A directory of the config. `trouble`: why it can't be looked at; `free_bytes` for root alone, None: unknown."""

    setting: str
    path: str
    exists: bool
    free_bytes: int | None = None
    trouble: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on the node. Empty texts: no objection. `cdi_errors`: file -> what is wrong there. `own_files`:
    allocation keys of our CDI files, None: not looked at. `driver_trouble`: what a look at the driver without mpsd
    said; None: mpsd was asked."""

    snapshot: Snapshot | None = None
    plugin: PluginStatus | None = None
    mpsd_error: Reason | None = None
    plugin_error: Reason | None = None
    attention: tuple[Reason, ...] = ()
    driver: str = ""
    driver_trouble: str | None = None
    simulated: bool = False
    assumed: bool = False
    """No config was named: what is missing from the default directories may be in others."""
    mps_binary: str | None = None
    socket_objection: str = ""
    closed: str = ""
    places: tuple[Place, ...] = ()
    nofile: str = ""
    inotify_instances: int | None = None
    kubelet_missing: str = ""
    cdi_errors: dict[str, tuple[str, ...]] = {}
    own_files: tuple[str, ...] | None = None
    clock_kept: bool | None = None


def rows_of(facts: Facts) -> list[Row]:
    """All rows, each check's in the order of the table; what else needs attention last."""
    found = [one for check in CHECKS for one in check(facts)]
    told = {one.reason.message for one in found if one.reason is not None}
    return found + [of_reason("attention", State.WARN, why) for why in facts.attention if why.message not in told]


def _processes(facts: Facts) -> Iterator[Row]:
    if facts.assumed:
        yield row("config", State.UNKNOWN, DoctorCode.NO_CONFIG, "the default directories are looked at")
    for name, answer, error in (
        ("mpsd", facts.snapshot, facts.mpsd_error),
        ("plugin", facts.plugin, facts.plugin_error),
    ):
        yield of_reason(name, State.FAIL, error) if error is not None else well(name, "answers" if answer else "")


def _driver(facts: Facts) -> Iterator[Row]:
    if facts.driver_trouble:
        yield row("driver", State.FAIL, DoctorCode.NO_DRIVER, facts.driver_trouble)
        return
    yield well("driver", facts.driver or "simulated")
    snapshot = facts.snapshot
    if snapshot is None:
        return
    if not snapshot.gpus:
        why = snapshot.why
        yield (
            of_reason("GPUs", State.FAIL, why)
            if why is not None
            else row("GPUs", State.FAIL, DoctorCode.NO_GPU, "mpsd knows no GPU")
        )
    for gpu in snapshot.gpus:
        name = f"GPU {gpu.info.index}"
        major, minor = gpu.info.compute_capability
        if gpu.why is not None:
            yield of_reason(name, State.FAIL, gpu.why)
        elif gpu.why_not_shared is not None:
            yield of_reason(name, State.OK if gpu.excluded else State.WARN, gpu.why_not_shared)
        else:
            yield well(name, f"compute capability {major}.{minor}, compute mode {gpu.driver_compute_mode}")


def _daemons_run(facts: Facts) -> bool:
    """Then mpsd found the program, whatever the mount namespace of this command has."""
    gpus = facts.snapshot.gpus if facts.snapshot is not None else ()
    return any(gpu.daemon is not None and gpu.daemon.state is DaemonState.READY for gpu in gpus)


def _mps(facts: Facts) -> Iterator[Row]:
    if facts.simulated:
        yield well("MPS program", "simulated")
    elif _daemons_run(facts):
        yield well("MPS program", "its daemons run")
    elif facts.mps_binary is None:
        yield row("MPS program", State.FAIL, DoctorCode.NO_MPS_BINARY, "the control program of MPS was not found")
    else:
        yield well("MPS program", facts.mps_binary)


def _limits(facts: Facts) -> Iterator[Row]:
    if facts.snapshot is None:
        yield row("hard limits", State.UNKNOWN, DoctorCode.NOT_TOLD, "only mpsd knows whether limits can be hard")
    elif whys := facts.snapshot.hard_limits.why_not:
        yield from (of_reason("hard limits", State.WARN, why) for why in whys)
    else:
        yield well("hard limits", facts.snapshot.hard_limits.backend)


def _directories(facts: Facts) -> Iterator[Row]:
    if facts.socket_objection:
        text = f"a daemon can't serve: {facts.socket_objection}"
        yield row("socket paths", State.FAIL, DoctorCode.PATH_TOO_LONG, text)
    else:
        yield well("socket paths", "short enough")
    if facts.closed:
        yield row("run root", State.FAIL, DoctorCode.CLOSED, facts.closed)
    for place in facts.places:
        if place.trouble:
            yield row(place.setting, State.UNKNOWN, DoctorCode.CANNOT_LOOK, f"{place.path}: {place.trouble}")
        elif not place.exists:
            state = State.UNKNOWN if facts.assumed else State.WARN
            yield row(place.setting, state, DoctorCode.NO_DIRECTORY, f"{place.path} is not there")
        elif place.free_bytes is not None and place.free_bytes < DISK_LOW_BYTES:
            text = f"{place.path} has {place.free_bytes >> 20} MiB left, below {DISK_LOW_BYTES >> 20}"
            yield row(place.setting, State.FAIL, DoctorCode.DISK_FULL, text)
        else:
            yield well(place.setting, place.path)


def _kernel(facts: Facts) -> Iterator[Row]:
    yield (
        row("open files", State.WARN, DoctorCode.FEW_FILES, f"of this command: {facts.nofile}")
        if facts.nofile
        else well("open files")
    )
    instances = facts.inotify_instances
    if instances is None:
        yield row("inotify", State.UNKNOWN, DoctorCode.CANNOT_LOOK, "the kernel's inotify limits can't be read")
    elif instances < INOTIFY_LOW:
        text = f"fs.inotify.max_user_instances is {instances}, below {INOTIFY_LOW}"
        yield row("inotify", State.WARN, DoctorCode.FEW_WATCHES, text)
    else:
        yield well("inotify", f"{instances} instances for a user")
    if facts.clock_kept:
        yield well("clock", "kept in time")
    else:
        state = State.UNKNOWN if facts.clock_kept is None else State.WARN
        yield row("clock", state, DoctorCode.NO_CLOCK, "the kernel knows of nothing that keeps it in time")


def _cdi(facts: Facts) -> Iterator[Row]:
    plugin = facts.plugin
    objections = reasons_of(plugin.cdi_objections, plugin.cdi_objection_codes) if plugin is not None else ()
    yield from (of_reason("CDI devices", State.FAIL, why) for why in objections)
    for path, faults in facts.cdi_errors.items():
        yield row("CDI files", State.WARN, DoctorCode.CDI_NOT_USABLE, f"{path}: {'; '.join(faults)}")
    if not facts.cdi_errors and not objections:
        yield well("CDI files", "each can be used, no device is defined twice")
    if facts.own_files is None:
        yield row("stale CDI files", State.UNKNOWN, DoctorCode.CANNOT_LOOK, "the CDI directory can't be listed")
        return
    if plugin is None:
        yield row("stale CDI files", State.UNKNOWN, DoctorCode.NOT_TOLD, "only the plugin knows its allocations")
        return
    live = {allocation.key for allocation in plugin.allocations}
    stale = [key for key in facts.own_files if key not in live]
    yield from (row("stale CDI files", State.WARN, DoctorCode.STALE_FILE, f"of allocation {key}") for key in stale)
    if not stale:
        yield well("stale CDI files", "none")


def _kubelet(facts: Facts) -> Iterator[Row]:
    if facts.kubelet_missing:
        state = State.UNKNOWN if facts.assumed else State.FAIL
        yield row("kubelet", state, DoctorCode.NO_KUBELET, facts.kubelet_missing)
    else:
        yield well("kubelet", "both sockets are there")
    plugin = facts.plugin
    if plugin is None:
        yield row("registration", State.UNKNOWN, DoctorCode.NOT_TOLD, "only the plugin knows its registrations")
        return
    for why in (
        reason_of(plugin.kubelet_error, plugin.kubelet_error_code),
        reason_of(plugin.checkpoint_error, plugin.checkpoint_error_code),
    ):
        if why is not None:
            yield of_reason("kubelet", State.FAIL, why)
    for resource in plugin.resources:
        why = reason_of(resource.registration_error, resource.registration_error_code)
        yield of_reason(resource.name, State.FAIL, why) if why else well(resource.name, resource.registration)


CHECKS: tuple[Callable[[Facts], Iterator[Row]], ...] = (
    _processes,
    _driver,
    _mps,
    _limits,
    _directories,
    _kernel,
    _cdi,
    _kubelet,
)
