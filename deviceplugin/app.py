"""The plugin process: signals, exit code, and the way to a registration as short as it can be.

What is not needed to register (keeper, local API, watchers, metrics) is in services.py and is not even imported before:
a kubelet re-admits pods within a second of its start, and they fail while the resource is not there.
"""

import os
import threading
from typing import Literal

from cdi.atomic import make_directory
from cdi.errors import CdiError
from cdi.scan import scan
from deviceplugin.grants import lastknown
from deviceplugin.grants.broker import Broker, Recheck
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.instance import lock_files
from deviceplugin.grants.ledger import Ledger
from deviceplugin.grants.statefiles import DRAINS, LEDGER, NODE, state_directory
from deviceplugin.kubelet.places import kubelet_places
from deviceplugin.kubelet.sessions import Sessions
from deviceplugin.reconcile.gpudevices import Choice, DeviceChooser
from deviceplugin.reconcile.toolkit import Toolkit
from mpsd.common import notify, threads
from mpsd.common.errors import ConfigError, GpufracError
from mpsd.common.log import complain, configure, get_logger
from mpsd.common.processes import boot_id
from mpsd.common.processlock import ProcessLock
from mpsd.common.stopsignal import Stop, StopSignal
from mpsd.config.load import load_config
from mpsd.config.model import NodeConfig
from mpsd.events.kinds import EventKind
from mpsd.events.recorder import Recorder
from mpsd.host import checks

log = get_logger("plugin")

LOCK_WAIT_S = 20.0
"""For an instance that is on its way out, as in a rolling upgrade."""
REGISTER_FIRST_S = 0.5
"""How long everything else waits for the first registration."""
RECHECK_S = 2.0


def run(config_path: str, *, log_format: Literal["text", "json"] = "text") -> int:
    """Runs until SIGTERM or SIGINT; a second signal ends it at once.

    Returns:
        Exit code: 0 stopped, 1 another instance or no ledger, 2 bad config.
    """
    configure(log_format)
    threads.catch_all()
    checks.raise_nofile()  # what it says is about MPS
    systemd = notify.take()
    with StopSignal() as stop:
        try:
            config = load_config(config_path)
            with ProcessLock("plugin", _lock_files(config), wait_s=LOCK_WAIT_S, stop=stop):
                serve(config, config_path, stop, systemd)
        except ConfigError as error:
            complain(str(error))
            return 2
        except (GpufracError, CdiError, OSError) as error:
            complain(str(error) if isinstance(error, GpufracError | CdiError) else f"cannot start the plugin: {error}")
            return 1
    return 0


def _lock_files(config: NodeConfig) -> tuple[str, ...]:
    """One in each directory that no other plugin may use, whatever its config is. Those that are ours are made."""
    state = state_directory(config.state_root)
    for directory, mode in ((config.mps.run_root, 0o755), (state, 0o700), (config.cdi.directory, 0o755)):
        make_directory(directory, mode)
    return lock_files(
        config.mps.run_root,
        config.state_root,
        config.cdi.directory,
        config.kubelet_device_plugins,
    )


def serve(config: NodeConfig, config_path: str, stop: Stop, systemd: notify.Target | None = None) -> None:
    """Registers, then starts everything else, and waits for `stop`.

    Args:
        systemd: whom to tell how we are.
    """
    late = LateRecheck()
    state = state_directory(config.state_root)
    known_path = os.path.join(state, NODE)
    known = lastknown.load(known_path, boot_id())
    ledger = Ledger(os.path.join(state, LEDGER))
    drains = Drains(os.path.join(state, DRAINS))
    broker = Broker(config, ledger, drains)
    for problem in broker.problems:
        log.error("a record is not usable", problem=problem)
    broker.restore(known.gpus, known.hard_limits)
    devices = DeviceChooser(broker, scan, Choice(known.gpu_kind, hooked=known.hooked), Toolkit().hooks)
    devices.choose()
    broker.publish()
    recorder = Recorder(config.state_root, "plugin", say=log)
    recorder.tell(EventKind.STARTED, pid=os.getpid())
    sessions = Sessions(kubelet_places(config), broker, late, recorder)
    services = notifier = None
    try:
        sessions.sync()
        sessions.wait_registered(REGISTER_FIRST_S)
        from deviceplugin.services import Services

        services = Services(config_path, broker, sessions, devices, known_path, known, recorder)
        services.start()
        late.set(services.recheck)
        started = services
        notifier = notify.Notifier(systemd, lambda: started.health().word)
        notifier.start()
        stop.wait()
    finally:
        if notifier is not None:
            notifier.close()
        if services is not None:
            services.close()
        sessions.close()
        broker.close()
        ledger.close()
        recorder.tell(EventKind.STOPPED, pid=os.getpid())
        recorder.close()


class LateRecheck:
    """The look at the kubelet before a refusal, for calls that come before the keeper is there: they wait for it."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._recheck: Recheck | None = None

    def set(self, recheck: Recheck) -> None:
        """From now on calls are answered by this one."""
        self._recheck = recheck
        self._ready.set()

    def __call__(self, *, release: bool = True) -> None:
        if self._ready.wait(RECHECK_S) and self._recheck is not None:
            self._recheck(release=release)
