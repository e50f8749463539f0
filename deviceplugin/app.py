"""The plugin process: wires broker, sessions, keeper, watchers and the local API; signals and exit code.

Order matters: nothing that is not needed to register is imported or started before the sessions run. A kubelet
re-admits pods within a second of its start.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal, Protocol

import msgspec

from cdi.registry import scan
from cdi.writer import SpecDirectory
from deviceplugin import gpudevices, lastknown, render
from deviceplugin.broker import Broker
from deviceplugin.keeper import Keeper
from deviceplugin.kubelet.podresources import PodResourcesClient
from deviceplugin.kubelet.session import Session
from deviceplugin.kubelet.watch import DirectoryWatch, Identity, socket_identity
from deviceplugin.ledger import Ledger
from deviceplugin.status import PluginStatus, plugin_status
from mpsd.config.load import load_config
from mpsd.config.model import NodeConfig, socket_name
from mpsd.errors import ConfigError, GpufracError
from mpsd.localapi.client import MpsdClient
from mpsd.log import configure, get_logger
from mpsd.processlock import ProcessLock
from mpsd.snapshot import Snapshot

log = get_logger("plugin")

LOCK_WAIT_S = 20.0
WATCH_TIMEOUT_S = 20.0
RECONNECT_S = 0.5
RESCAN_S = 30.0
ENDING_S = 2.0
"""How long a dropped resource still serves, so that the kubelet gets its empty list."""


def run(config_path: str, *, log_format: Literal["text", "json"] = "text") -> int:
    """Runs until SIGTERM or SIGINT. Exit codes: 0 stopped, 1 another instance or no ledger, 2 bad config."""
    configure(log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = load_config(config_path)
        with ProcessLock(config.mps.run_root, "plugin", wait_s=LOCK_WAIT_S, stop=stop):
            process = PluginProcess(config, config_path)
            try:
                process.start()
                stop.wait()
            finally:
                process.close()
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for the person at the terminal, problem by problem
        return 2
    except (GpufracError, OSError) as error:
        print(error if isinstance(error, GpufracError) else f"cannot start the plugin: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


class Part(Protocol):
    """Something of the process that runs until closed."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class PluginProcess:
    """All parts of one plugin process."""

    def __init__(self, config: NodeConfig, config_path: str) -> None:
        self._config_path = config_path
        self._started_unix_s = time.time()
        self._plugins_directory = os.path.join(config.kubelet_root, "device-plugins")
        self._last_known_path = os.path.join(config.state_root, "plugin", "node.json")
        self._ledger = Ledger(os.path.join(config.state_root, "plugin", "allocations"))
        self._broker = Broker(config, self._ledger)
        self._kubelet = PodResourcesClient(os.path.join(config.kubelet_root, "pod-resources", "kubelet.sock"))
        self._mpsd = MpsdClient(config.mpsd_socket)
        self._keeper = Keeper(
            self._broker,
            SpecDirectory(config.cdi.directory, render.VENDOR, render.CLASS),
            self._mpsd,
            self._kubelet,
            kubelet_root=config.kubelet_root,
            pod_processes=partial(_pod_processes, config.backend == "simulated"),
            rescan=self._rescan,
        )
        self._sessions: dict[str, Session] = {}
        self._sessions_lock = threading.Lock()
        self._ending: dict[str, float] = {}
        self._kubelet_socket: Identity | None = None
        self._config_error = ""
        self._restart_needed = ""
        self._stop = threading.Event()
        self._known = lastknown.load(self._last_known_path)
        self._choice = gpudevices.Choice(self._known.gpu_kind)
        self._rescan_at_s = 0.0
        self._parts: list[Part] = []
        self._watcher = threading.Thread(target=self._watch_mpsd, name="mpsd-watch", daemon=True)

    def start(self) -> None:
        """Sessions first, everything else after."""
        config = self._broker.config
        for problem in self._broker.problems:
            log.error("a record of the ledger is not usable", problem=problem)
        self._broker.restore_gpus(self._known.gpus)
        self._choose_devices()
        self._broker.publish()
        self._kubelet_socket = socket_identity(os.path.join(self._plugins_directory, "kubelet.sock"))
        self._sync_sessions()
        self._watcher.start()
        self._keeper.start()
        # Imported late: neither is needed to register.
        from mpsd.config.watch import ConfigWatcher
        from mpsd.localapi.server import LocalServer

        server = LocalServer(config.plugin_socket, {"status": self._status, "allocations": self._allocations})
        watch = DirectoryWatch(self._plugins_directory, self._hint)
        reload = ConfigWatcher(self._config_path, self._on_config, self._on_config_error, current=config)
        parts: list[Part] = [server, watch, reload]
        if config.metrics_address:
            from deviceplugin.metrics import MetricsServer

            parts.append(MetricsServer(config.metrics_address, self._snapshot_status))
        for part in parts:
            part.start()
            self._parts.append(part)

    def close(self) -> None:
        """Stops everything side by side; allocations and CDI files stay."""
        self._stop.set()
        with self._sessions_lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.begin_close()
        for part in reversed(self._parts):
            part.close()
        self._keeper.close()
        for session in sessions:
            session.close()
        self._broker.close()
        self._kubelet.close()
        self._ledger.close()

    # --- kubelet -------------------------------------------------------------------------------------------------

    def _sync_sessions(self) -> None:
        """One session per resource that needs one; those of dropped resources end with their last allocation."""
        wanted = self._broker.resource_names()
        with self._sessions_lock:
            if self._stop.is_set():
                return
            for name in wanted:
                if name not in self._sessions:
                    session = Session(
                        name, self._plugins_directory, socket_name(name), self._broker, self._keeper.recheck
                    )
                    self._sessions[name] = session
                    session.start()
            now_s = time.monotonic()
            self._ending = {n: self._ending.get(n, now_s) for n in self._sessions.keys() - set(wanted)}
            for name, since_s in list(self._ending.items()):
                if now_s - since_s >= ENDING_S:
                    log.info("resource ends", resource=name)
                    self._sessions.pop(name).close()

    def _hint(self) -> None:
        """Something may have changed in the device plugin directory."""
        now = socket_identity(os.path.join(self._plugins_directory, "kubelet.sock"))
        if now is not None and now != self._kubelet_socket:
            if self._kubelet_socket is not None:
                log.info("the kubelet restarted")
                self._broker.kubelet_restarted()
            self._kubelet_socket = now
            self._keeper.look()
        with self._sessions_lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.hint()

    # --- mpsd ----------------------------------------------------------------------------------------------------

    def _watch_mpsd(self) -> None:
        instance, generation, answering = "", -1, True
        while not self._stop.is_set():
            try:
                snapshot = self._mpsd.watch(instance, generation, WATCH_TIMEOUT_S)
            except GpufracError as error:
                if answering:
                    log.warning("mpsd does not answer; no container starts until it does", error=str(error))
                    answering = False
                    self._broker.observe_snapshot(None)
                instance, generation = "", -1
                self._stop.wait(RECONNECT_S)
                continue
            if not answering:
                log.info("mpsd answers")
            answering = True
            if (snapshot.instance, snapshot.generation) == (instance, generation):
                continue
            returned = snapshot.instance != instance
            instance, generation = snapshot.instance, snapshot.generation
            self._broker.observe_snapshot(snapshot)
            if returned:
                self._keeper.mpsd_returned()
            self._remember(snapshot)

    def _remember(self, snapshot: Snapshot) -> None:
        if not snapshot.gpus:
            return
        gpus = lastknown.without_moments(snapshot.gpus)
        if [gpu.info.uuid for gpu in gpus] != [gpu.info.uuid for gpu in self._known.gpus]:
            self._rescan_at_s = 0.0
            self._rescan()
        known = lastknown.LastKnown(gpus=gpus, gpu_kind=self._choice.kind)
        if known != self._known:
            self._known = known
            lastknown.store(self._last_known_path, known)

    # --- GPU devices ---------------------------------------------------------------------------------------------

    def _rescan(self) -> None:
        """Looks at the CDI directories again, now and then."""
        if time.monotonic() >= self._rescan_at_s:
            self._choose_devices()
        self._sync_sessions()

    def _choose_devices(self) -> None:
        config = self._broker.config
        self._rescan_at_s = time.monotonic() + RESCAN_S
        uuids = [gpu.info.uuid for gpu in self._broker.gpus() if not gpu.not_shared]
        registry = scan(("/etc/cdi", config.cdi.directory))
        choice = gpudevices.choose(config.cdi.gpu_devices, registry, uuids, self._choice.kind)
        if choice.trouble and choice != self._choice:
            log.error("GPUs can't be given to containers", kind=choice.kind, reason=choice.reason)
        self._choice = choice
        self._broker.set_gpu_kind(choice.kind, choice.trouble)

    # --- config --------------------------------------------------------------------------------------------------

    def _on_config(self, config: NodeConfig) -> None:
        effective, ignored = merge_reload(self._broker.config, config)
        self._config_error, self._restart_needed = "", ", ".join(ignored)
        self._broker.apply_config(effective)
        self._broker.publish()
        self._choose_devices()
        self._sync_sessions()
        log.info("config reloaded", resources=len(config.resources), restart_needed=self._restart_needed)

    def _on_config_error(self, error: str) -> None:
        self._config_error = error
        log.error("the new config is not usable; the old one stays in force", error=error)

    # --- local API -----------------------------------------------------------------------------------------------

    def _snapshot_status(self) -> PluginStatus:
        with self._sessions_lock:
            sessions = dict(self._sessions)
        return plugin_status(
            self._broker.inspect(),
            self._keeper.report,
            sessions,
            pid=os.getpid(),
            started_unix_s=self._started_unix_s,
            config_error=self._config_error,
            config_restart_needed=self._restart_needed,
            gpu_devices_reason=self._choice.reason,
            problems=self._broker.problems,
        )

    def _status(self, params: Mapping[str, object]) -> PluginStatus:
        return self._snapshot_status()

    def _allocations(self, params: Mapping[str, object]) -> object:
        return self._snapshot_status().allocations


FIXED = ("kubelet_root", "state_root", "backend", "simulated", "metrics_address")
FIXED_MPS = ("run_root", "log_root")


def merge_reload(old: NodeConfig, new: NodeConfig) -> tuple[NodeConfig, list[str]]:
    """The config to put in force, and the settings in it that need a restart (pure)."""
    ignored = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    ignored += [f"mps.{name}" for name in FIXED_MPS if getattr(old.mps, name) != getattr(new.mps, name)]
    if old.cdi.directory != new.cdi.directory:
        ignored.append("cdi.directory")
    mps = msgspec.structs.replace(new.mps, **{name: getattr(old.mps, name) for name in FIXED_MPS})
    cdi = msgspec.structs.replace(new.cdi, directory=old.cdi.directory)
    kept = {name: getattr(old, name) for name in FIXED}
    return msgspec.structs.replace(new, mps=mps, cdi=cdi, **kept), ignored


def _pod_processes(simulated: bool) -> Mapping[str, list[tuple[str, str | None]]]:
    from mpsd.processes import processes_of_pods

    found = processes_of_pods(simulated=simulated)
    return {uid: [(process.container, process.marker) for process in processes] for uid, processes in found.items()}
