"""The front end of annotated pods with its place at the container runtime: what the plugin process starts and shows."""

import threading

from deviceplugin.annotated.frontend import AnnotatedFrontend
from deviceplugin.annotated.status import AnnotatedStatus, annotated_status
from deviceplugin.kubernetes.model import NodeReadiness
from deviceplugin.nri import session
from deviceplugin.nri.model import Runtime
from mpsd.common.log import get_logger
from mpsd.common.reason import message_of
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.config.model import AnnotationsConfig, NriConfig

log = get_logger("plugin")

TEND_S = 5.0
"""How often containers that run unenforced are looked after."""
CLOSE_S = 2.0
"""How long a container that is just being stopped is waited for."""


class AnnotatedPods:
    """Runs until closed."""

    def __init__(self, config: AnnotationsConfig, nri: NriConfig, frontend: AnnotatedFrontend) -> None:
        self.config, self.frontend = config, frontend
        self._session = session.NriSession(nri.socket, nri.name, nri.index, frontend, answer_s=session.ANSWER_S)
        self._stop = threading.Event()
        self._tender = GuardedThread(self._tend, "annotated")

    def start(self) -> None:
        self._session.start()
        self._tender.start()

    def close(self) -> None:
        self._stop.set()
        self._session.close()
        if self._tender.ident is not None:
            self._tender.join(CLOSE_S)

    @property
    def session_error(self) -> str:
        """Why we are at no container runtime, empty when we are."""
        state = self._session.state
        return "" if state.connected else message_of(state.error) or "not yet"

    @property
    def runtime(self) -> Runtime | None:
        """The container runtime that we are at."""
        return self._session.state.runtime

    def status(self, readiness: NodeReadiness) -> AnnotatedStatus:
        """All that is known."""
        return annotated_status(self.config, self._session.state, self.frontend.report, readiness)

    def _tend(self) -> None:
        mishaps = Mishaps("annotated", "looking after unenforced containers failed and goes on", log)
        while not self._stop.wait(TEND_S):
            try:
                self.frontend.tend()
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
