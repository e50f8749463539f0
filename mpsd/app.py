"""The mpsd process: puts the parts together, serves the local API, ends in order. No decisions of its own."""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Literal, Protocol

from cdi.atomic import make_directory
from mpsd import simulated
from mpsd.common import notify, processes, threads
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.log import complain, configure, get_logger
from mpsd.common.processlock import ProcessLock
from mpsd.common.reason import Reason
from mpsd.common.stopsignal import StopSignal
from mpsd.config.load import load_config
from mpsd.config.model import NodeConfig
from mpsd.config.watch import ConfigWatcher
from mpsd.daemon import process
from mpsd.daemon.host import LocalHost, Place
from mpsd.daemon.logs.parse import Severity
from mpsd.daemon.logs.tail import LogTails
from mpsd.daemon.state import StateFile
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.recorder import Recorder
from mpsd.gpu.backend import GpuBackend, GpuError
from mpsd.gpu.news import meaning
from mpsd.gpu.prober import Prober
from mpsd.gpu.xid import Xid
from mpsd.host import checks, reexec, survival
from mpsd.host.place import HostPlace
from mpsd.limits.api import LimitsApi
from mpsd.localapi.reasons import ConfigCode, WarningCode
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import CleanedUp, Places
from mpsd.localapi.wire import MAX_BLOCK_S
from mpsd.supervision.health import health
from mpsd.supervision.methods import methods
from mpsd.supervision.supervisor import Supervisor
from mpsd.supervision.terminate import Terminator

log = get_logger("mpsd")
_SAY = {Severity.INFO: log.info, Severity.WARNING: log.warning, Severity.ERROR: log.error}

LOCK_WAIT_S = 10.0
"""For an instance that is on its way out, as in a rolling upgrade."""
PROBE_S, PROBE_BYTES = 10.0, 4096
CLEANUP_S = MAX_BLOCK_S - 2.0


class _Place(Place, Protocol):
    def clear(self) -> tuple[str, ...]:
        """Leaves the host as found; what of it is left."""
        ...


def run(config_path: str, *, log_format: Literal["text", "json"] = "text") -> int:
    """Runs until SIGTERM or SIGINT; a second signal ends it at once.

    Returns:
        Exit code: 0 stopped, 1 another instance or no state directory, 2 bad config.
    """
    configure(log_format)
    threads.catch_all()
    systemd = notify.take()
    with StopSignal() as stop:
        try:
            config = load_config(config_path)
            lock = ProcessLock("mpsd", _lock_files(config), wait_s=LOCK_WAIT_S, stop=stop)
            with lock, ExitStack() as parts:
                if not stop.is_set():
                    _start(config, config_path, parts, systemd)
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
    """Their directories are made."""
    for path in config.mpsd_locks:
        make_directory(os.path.dirname(path), 0o755)
    return config.mpsd_locks


def _start(config: NodeConfig, config_path: str, parts: ExitStack, systemd: notify.Target | None = None) -> None:
    """Starts everything; `parts` takes what has to be closed, last started first."""
    of_file = config
    config, backend = _backend(config)
    try:
        path, copy = config.mpsd_state_files
        state = StateFile(path, processes.boot_id(), copy)
    except OSError as error:
        raise GpufracError(f"cannot prepare {error.filename}: {error.strerror}") from error

    supervisor: Supervisor
    prober: Prober
    logs = LogTails(
        lambda name, event: supervisor.log_event(name, event),  # noqa: PLW0108 - the supervisor comes after
        lambda name, severity, text: _SAY[severity](text, daemon=name),
        max_bytes=config.mps.log_max_bytes,
    )
    recorder = Recorder(config.state_root, "mpsd", on_counted=lambda: supervisor.look_again())  # noqa: PLW0108
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
        teller=recorder,
    )
    variables = systemd.variables if systemd is not None else {}
    prober = Prober(
        backend,
        supervisor.inventory_changed,
        on_error=partial(_begin_anew_if_due, variables),
        on_xid=partial(_tell_xid, recorder),
    )
    served = methods(
        supervisor,
        Terminator(supervisor),
        LimitsApi(supervisor),
        lambda: _clean_up(supervisor, place, config),
        [prober.pulse],
    )
    server = LocalServer(config.mpsd_socket, served)
    watcher = ConfigWatcher(
        config_path,
        lambda new: supervisor.config_changed(simulated.with_emulator(new)),
        lambda error: supervisor.config_refused(Reason(ConfigCode.REFUSED, error)),
        current=of_file,
    )
    server.start()  # first: where the socket can't be had, nothing was touched
    parts.callback(server.close)
    recorder.tell(EventKind.STARTED, pid=os.getpid())
    recorder.start()
    parts.callback(_stop_telling, recorder)
    # The supervisor ends before the prober, which closes the driver, and before the server: the stop can be seen.
    prober.start()
    parts.callback(prober.close)
    logs.start()
    parts.callback(logs.close)
    supervisor.start()
    parts.callback(supervisor.close)
    watcher.start()
    parts.callback(watcher.close)
    notifier = notify.Notifier(systemd, lambda: health(supervisor, [prober.pulse]).word)
    notifier.start()
    parts.callback(notifier.close)


def _tell_xid(recorder: Recorder, uuid: str, row: Xid) -> None:
    recorder.tell(EventKind.XID, Subject(gpus=(uuid,)), meaning(row), detail=row.text)


def _stop_telling(recorder: Recorder) -> None:
    recorder.tell(EventKind.STOPPED, pid=os.getpid())
    recorder.close()


def _place(config: NodeConfig) -> tuple[_Place, tuple[Reason, ...]]:
    """Where daemons are started, and what of this host falls short of what they need. A simulated node asks nothing of
    its host."""
    if config.backend == "simulated":
        return simulated.place(config), ()
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
    warnings = tuple(Reason(WarningCode.HOST_FALLS_SHORT, lack) for lack in lacks if lack)
    for warning in warnings:
        log.warning("this host falls short", reason=warning.message)
    return HostPlace(found, shared_memory=config.mps.shared_memory), warnings


def _begin_anew_if_due(variables: Mapping[str, str], error: GpufracError) -> None:
    """A driver that was upgraded under us needs its new library, which only a new program loads. Daemons live on.

    Args:
        variables: what systemd gave us, for the new program.
    """
    code = error.code if isinstance(error, GpuError) else None
    now_s = time.time()
    if code is not None and reexec.reexec_due(code, reexec.last_reexec(os.environ), now_s):
        log.warning("the driver was replaced: mpsd begins anew to load its library", error=str(error))
        reexec.reexec(now_s, variables)


def _backend(config: NodeConfig) -> tuple[NodeConfig, GpuBackend]:
    """How GPUs are reached, and the config with the control binary that goes with it."""
    if config.backend == "simulated":
        return simulated.with_emulator(config), simulated.backend(config)
    from mpsd.gpu.nvml import NvmlBackend

    return config, NvmlBackend()


def _clean_up(supervisor: Supervisor, place: _Place, config: NodeConfig) -> CleanedUp:
    """Ends every daemon, then removes what they needed of the host."""
    left = supervisor.cleanup(CLEANUP_S)
    still = place.clear()
    return CleanedUp(
        left=(*left, *(f"cgroup {directory} holds processes" for directory in still)),
        places=Places.of(config),
    )
