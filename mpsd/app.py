"""The mpsd process: puts the parts together, serves the local API, ends in order. No decisions of its own."""

import os
import resource
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from cdi.atomic import make_directory
from mpsd.common import processes, threads
from mpsd.common.errors import ConfigError, GpufracError, ProtocolError
from mpsd.common.log import complain, configure, get_logger
from mpsd.common.processlock import ProcessLock
from mpsd.common.stopsignal import StopSignal
from mpsd.config.load import load_config
from mpsd.config.model import NodeConfig
from mpsd.config.watch import ConfigWatcher
from mpsd.daemon import process
from mpsd.daemon.host import LocalHost
from mpsd.daemon.logs.parse import Severity
from mpsd.daemon.logs.tail import LogTails
from mpsd.daemon.state import StateFile
from mpsd.gpu.backend import GpuBackend, GpuError
from mpsd.gpu.prober import Prober
from mpsd.host import checks, reexec, survival
from mpsd.host.place import HostPlace
from mpsd.limits.api import LimitsApi
from mpsd.localapi.server import LocalServer, Method
from mpsd.localapi.snapshot import CleanedUp, Desired, GpuClients, LimitQuery, LimitReading, Places, Snapshot
from mpsd.localapi.wire import MAX_BLOCK_S
from mpsd.supervision.supervisor import Supervisor
from mpsd.supervision.terminate import Terminator

if TYPE_CHECKING:
    from mpsd.sim.place import SimulatedPlace

log = get_logger("mpsd")
T = TypeVar("T")
_SAY = {Severity.INFO: log.info, Severity.WARNING: log.warning, Severity.ERROR: log.error}

LOCK_WAIT_S = 10.0
"""For an instance that is on its way out, as in a rolling upgrade."""
CLIENTS_S = LIMITS_S = 4.5
"""For a caller that names no time: below the usual timeout of a call, so that it gets the reasons."""
PROBE_S, PROBE_BYTES = 10.0, 4096
CLEANUP_S = MAX_BLOCK_S - 2.0
MAX_UUIDS = 256
MAX_KEYS = 256
MAX_REASON = 200
TERMINATE_S = MAX_BLOCK_S - 8.0


def run(config_path: str, *, log_format: Literal["text", "json"] = "text") -> int:
    """Runs until SIGTERM or SIGINT; a second signal ends it at once.

    Returns:
        Exit code: 0 stopped, 1 another instance or no state directory, 2 bad config.
    """
    configure(log_format)
    threads.catch_all()
    with StopSignal() as stop:
        try:
            config = load_config(config_path)
            lock = ProcessLock("mpsd", _lock_files(config), wait_s=LOCK_WAIT_S, stop=stop)
            with lock, ExitStack() as parts:
                if not stop.is_set():
                    _start(config, config_path, parts)
                    log.info("mpsd runs", pid=os.getpid(), socket=config.mpsd_socket, backend=config.backend)
                    stop.wait()
                    log.info("mpsd stops")
        except ConfigError as error:
            complain(str(error))
            return 2
        except (GpufracError, OSError) as error:
            complain(str(error) if isinstance(error, GpufracError) else f"cannot start mpsd: {error}")
            return 1
    return 0


def _lock_files(config: NodeConfig) -> tuple[str, ...]:
    """One in each directory that no other mpsd may use, whatever its config is. The directories are made."""
    roots = (config.mps.run_root, config.state_root, config.mps.log_root)
    for directory in roots:
        make_directory(directory, 0o755)
    return tuple(os.path.join(directory, "mpsd.lock") for directory in roots)


def _start(config: NodeConfig, config_path: str, parts: ExitStack) -> None:
    """Starts everything; `parts` takes what has to be closed, last started first."""
    config, backend = _backend(config)
    try:
        copy = os.path.join(config.mps.run_root, "mpsd.json")
        state = StateFile(os.path.join(config.state_root, "mpsd.json"), processes.boot_id(), copy)
    except OSError as error:
        raise GpufracError(f"cannot prepare {error.filename}: {error.strerror}") from error

    supervisor: Supervisor
    prober: Prober
    logs = LogTails(
        lambda name, event: supervisor.log_event(name, event),  # noqa: PLW0108 - the supervisor comes after
        lambda name, severity, text: _SAY[severity](text, daemon=name),
        max_bytes=config.mps.log_max_bytes,
    )
    place, warnings = _place(config)
    host = LocalHost(config.mps, state, place=place, simulated=config.backend == "simulated")
    supervisor = Supervisor(
        config,
        backend,
        host,
        state,
        logs=logs,
        kick=lambda: prober.kick(),  # noqa: PLW0108 - the prober comes after
        warnings=warnings,
    )
    prober = Prober(backend, supervisor.inventory_changed, on_error=_begin_anew_if_due)
    served = methods(supervisor, Terminator(supervisor), LimitsApi(supervisor))
    served["cleanup"] = lambda _: _clean_up(supervisor, place, config)
    server = LocalServer(config.mpsd_socket, served)
    watcher = ConfigWatcher(
        config_path,
        lambda new: supervisor.config_changed(_with_emulator(new)),
        supervisor.config_refused,
        current=config,
    )
    server.start()  # first: where the socket can't be had, nothing was touched
    parts.callback(server.close)
    # The supervisor ends before the prober, which closes the driver, and before the server: the stop can be seen.
    prober.start()
    parts.callback(prober.close)
    logs.start()
    parts.callback(logs.close)
    supervisor.start()
    parts.callback(supervisor.close)
    watcher.start()
    parts.callback(watcher.close)


def _place(config: NodeConfig) -> tuple["HostPlace | SimulatedPlace", tuple[str, ...]]:
    """Where daemons are started, and what of this host falls short of what they need. A simulated node asks nothing of
    its host."""
    if config.backend == "simulated":
        from mpsd.sim.place import SimulatedPlace

        return SimulatedPlace(shared_memory=config.mps.shared_memory), ()
    found = survival.probe(
        lambda arguments: process.run(arguments, {}, b"", PROBE_S, PROBE_BYTES),
        (config.mps.run_root, config.mps.log_root),
    )
    lacks = (
        checks.root_objection(os.geteuid()),
        found.reason,
        checks.raise_nofile(),
        checks.pid_namespace_objection()
        or checks.environment_objection("mpsd", "whose a process on a GPU is can't be told"),
        checks.closed_objection(config.mps.run_root, found.host_root),
    )
    warnings = tuple(filter(None, lacks))
    for warning in warnings:
        log.warning("this host falls short", reason=warning)
    return HostPlace(found, shared_memory=config.mps.shared_memory), warnings


def _begin_anew_if_due(error: GpufracError) -> None:
    """A driver that was upgraded under us needs its new library, which only a new program loads. Daemons live on."""
    code = error.code if isinstance(error, GpuError) else None
    now_s = time.time()
    if code is not None and reexec.reexec_due(code, reexec.last_reexec(os.environ), now_s):
        log.warning("the driver was replaced: mpsd begins anew to load its library", error=str(error))
        reexec.reexec(now_s)


def _backend(config: NodeConfig) -> tuple[NodeConfig, GpuBackend]:
    """The door to the GPUs, and the config with the control binary that goes with it."""
    if config.backend == "simulated":
        from mpsd.sim.driver import SimulatedDriver
        from mpsd.sim.gpus import SimulatedBackend
        from mpsd.sim.mps.install import install_emulator

        directory = config.simulation_directory
        SimulatedDriver.create(directory, config.simulated)
        if not config.mps.binary.startswith("/"):
            install_emulator(os.path.join(directory, "bin"), directory)
        return _with_emulator(config), SimulatedBackend(directory)
    from mpsd.gpu.nvml import NvmlBackend

    return config, NvmlBackend()


def _with_emulator(config: NodeConfig) -> NodeConfig:
    """On a simulated node the control binary is the emulator, unless the config names one by its path."""
    if config.backend != "simulated" or config.mps.binary.startswith("/"):
        return config
    binary = os.path.join(config.simulation_directory, "bin", "nvidia-cuda-mps-control")
    return msgspec.structs.replace(config, mps=msgspec.structs.replace(config.mps, binary=binary, driver_root="/"))


class _Watch(msgspec.Struct, frozen=True):
    instance: str = ""
    generation: int = 0
    timeout_s: float = 0.0


class _Apply(msgspec.Struct, frozen=True):
    desired: Desired


class _Clients(msgspec.Struct, frozen=True):
    uuids: tuple[str, ...]
    timeout_s: float = CLIENTS_S


class _Limits(msgspec.Struct, frozen=True):
    queries: tuple[LimitQuery, ...]
    timeout_s: float = LIMITS_S


class _SetLimits(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    cgroup: str
    soft_bytes: int
    hard_bytes: int | None
    timeout_s: float = LIMITS_S


Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""One line for people."""


class _Replace(msgspec.Struct, frozen=True):
    daemon: str
    now: bool = False
    reason: Reason = "an operator asked for it"


class _Terminate(msgspec.Struct, frozen=True):
    keys: tuple[str, ...] = ()
    pod_uids: tuple[str, ...] = ()
    kill: bool = False
    force: bool = False


def methods(supervisor: Supervisor, terminator: Terminator, limits_api: LimitsApi) -> dict[str, Method]:
    """The methods of the local API. Params of the wrong shape raise ProtocolError."""

    def watch(params: dict[str, Any]) -> Snapshot:
        asked = _params(params, _Watch)
        return supervisor.watch(asked.instance, asked.generation, max(0.0, min(asked.timeout_s, MAX_BLOCK_S)))

    def apply(params: dict[str, Any]) -> None:
        supervisor.apply(_params(params, _Apply).desired)

    def desired(params: dict[str, Any]) -> Desired:
        return supervisor.desired()

    def clients(params: dict[str, Any]) -> dict[str, GpuClients]:
        asked = _params(params, _Clients)
        if len(asked.uuids) > MAX_UUIDS:
            raise ProtocolError(f"cannot list the clients of more than {MAX_UUIDS} GPUs at a time")
        return supervisor.clients(asked.uuids, max(0.0, min(asked.timeout_s, MAX_BLOCK_S)))

    def limits(params: dict[str, Any]) -> list[LimitReading]:
        asked = _params(params, _Limits)
        return limits_api.read(asked.queries, max(0.0, min(asked.timeout_s, MAX_BLOCK_S)))

    def set_limits(params: dict[str, Any]) -> LimitReading:
        asked = _params(params, _SetLimits)
        query = LimitQuery(asked.gpu, asked.cgroup)
        return limits_api.set(query, asked.soft_bytes, asked.hard_bytes, max(0.0, min(asked.timeout_s, MAX_BLOCK_S)))

    def replace(params: dict[str, Any]) -> None:
        asked = _params(params, _Replace)
        supervisor.replace(asked.daemon, asked.reason, now=asked.now)

    def terminate(params: dict[str, Any]) -> dict[str, Any]:
        asked = _params(params, _Terminate)
        count = len(asked.keys) + len(asked.pod_uids)
        if not 1 <= count <= MAX_KEYS:
            raise ProtocolError(f"cannot end the clients of {count} allocations and pods: 1 to {MAX_KEYS} at a time")
        done, errors = terminator.terminate(
            asked.keys, asked.pod_uids, kill=asked.kill, force=asked.force, timeout_s=TERMINATE_S
        )
        return {"clients": done, "errors": errors}

    return {
        "snapshot": lambda _: supervisor.snapshot,
        "watch": watch,
        "apply": apply,
        "desired": desired,
        "clients": clients,
        "limits": limits,
        "set_limits": set_limits,
        "replace": replace,
        "confirm_indices": lambda _: supervisor.confirm_indices(),
        "terminate": terminate,
        "status": lambda _: _status(supervisor),
    }


def _clean_up(supervisor: Supervisor, place: "HostPlace | SimulatedPlace", config: NodeConfig) -> CleanedUp:
    """Ends every daemon, then removes what they needed of the host."""
    left = supervisor.cleanup(CLEANUP_S)
    still = place.clear()
    return CleanedUp(
        left=(*left, *(f"cgroup {directory} holds processes" for directory in still)),
        places=Places(
            cdi_directory=config.cdi.directory,
            state_root=config.state_root,
            run_root=config.mps.run_root,
            log_root=config.mps.log_root,
            device_plugins=config.kubelet_device_plugins,
            pods=os.path.join(config.kubelet_root, "pods"),
        ),
    )


def _params(params: dict[str, Any], shape: type[T]) -> T:
    try:
        return msgspec.convert(params, shape)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"cannot read the parameters: {error}") from error


def _status(supervisor: Supervisor) -> dict[str, Any]:
    """Facts about the process, for people."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    snapshot = supervisor.snapshot
    return {
        "pid": os.getpid(),
        "instance": snapshot.instance,
        "up_s": round(time.time() - snapshot.started_unix_s, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "max_rss_kib": usage.ru_maxrss,
        "threads": threading.active_count(),
        "thread_failures": threads.failures(),
    }
