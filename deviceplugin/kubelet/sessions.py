"""All sessions of the plugin: one per resource that needs one."""

import threading
import time

from deviceplugin.grants.broker import Broker, Recheck
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.refusals import Refusals
from deviceplugin.kubelet.session import Session
from mpsd.common.log import get_logger
from mpsd.config.model import socket_name
from mpsd.events.teller import SILENT, Teller

log = get_logger("plugin")

ENDING_S = 2.0
"""How long a dropped resource still serves, so that the kubelet gets its empty list."""


class Sessions:
    """Starts and ends sessions as the broker's resources come and go. Thread-safe."""

    def __init__(self, places: KubeletPlaces, broker: Broker, recheck: Recheck, teller: Teller = SILENT) -> None:
        self._places, self._broker, self._recheck = places, broker, recheck
        self._teller = teller
        self.refusals = Refusals(teller)
        self._lock = threading.Lock()
        self._registered = threading.Condition()
        self._sessions: dict[str, Session] = {}
        self._ending: dict[str, float] = {}
        self._closed = False

    def sync(self) -> None:
        """One session per resource; those of dropped resources end a moment after their last allocation."""
        wanted = self._broker.resource_names()
        now_s = time.monotonic()
        with self._lock:
            if self._closed:
                return
            for name in wanted:
                if name not in self._sessions:
                    session = Session(
                        name,
                        self._places,
                        socket_name(name),
                        self._broker,
                        self._recheck,
                        self.refusals,
                        self._note_registered,
                    )
                    session.start()  # may raise: what is kept was started
                    self._sessions[name] = session
            self._ending = {name: self._ending.get(name, now_s) for name in self._sessions.keys() - set(wanted)}
            ended = [name for name, since_s in self._ending.items() if now_s - since_s >= ENDING_S]
            sessions = [self._sessions.pop(name) for name in ended]
        for session in sessions:
            log.info("resource ends", resource=session.resource)
            session.close()

    def wait_registered(self, timeout_s: float) -> bool:
        """Waits until every session has registered once; false after the time."""

        def done() -> bool:
            return all(session.registrations for session in self.by_resource().values())

        with self._registered:
            return self._registered.wait_for(done, timeout_s)

    def hint(self) -> None:
        """Something may have changed in the device plugin directory: all look now."""
        for session in self.by_resource().values():
            session.hint()

    def by_resource(self) -> dict[str, Session]:
        """The sessions that run now."""
        with self._lock:
            return dict(self._sessions)

    def close(self) -> None:
        """Ends all, side by side."""
        with self._lock:
            self._closed = True
        sessions = list(self.by_resource().values())
        for session in sessions:
            session.begin_close()
        for session in sessions:
            session.close()

    def _note_registered(self) -> None:
        with self._registered:
            self._registered.notify_all()
