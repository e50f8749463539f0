"""Our NRI plugin at the container runtime: connect, register, answer, and begin again whenever the link ends.

One thread connects and reads, and answers what is overdue; one worker calls the front end, one call at a time and in
the runtime's order, over all links. A runtime drops a plugin for good after one late answer and then makes containers
without it (containerd/nri#114, #316), so every request is answered in time whatever the front end does, and a new
socket is found within a second.
"""

import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import mux
from deviceplugin.nri.dialogue import NRI_VERSION, RUNTIME_SERVICE, Dialogue, perform
from deviceplugin.nri.link import CallError, Link, LinkError, PendingCall
from deviceplugin.nri.model import Handler, Runtime
from deviceplugin.nri.reasons import NriCode
from deviceplugin.nri.requests import Entry, RequestQueue
from deviceplugin.nri.ttrpc import Answer
from mpsd.common.errors import ConfigError, ProtocolError
from mpsd.common.log import get_logger
from mpsd.common.pacing import Backoff
from mpsd.common.reason import Reason
from mpsd.common.socketfile import SocketFile
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.common.threads import GuardedThread, Mishaps

ANSWER_S: Final = 1.2
"""60 % of the 2 s that a runtime waits by default."""
RETRY_FIRST_S: Final = 0.2
RETRY_LAST_S: Final = 5.0
STEADY_S: Final = 10.0
"""After a link that lasted so long, the next try begins with the shortest pause again."""
LOOK_S: Final = 0.5
"""How often the socket file is looked at."""
CONNECT_S: Final = 2.0
CONFIGURED_WITHIN_S: Final = 30.0
"""From our registration. A runtime takes plugins one after another, each for up to its registration timeout (5 s)."""
SYNCHRONIZED_WITHIN_S: Final = 60.0
"""From there. A runtime waits until no container is being started."""
CLOSE_S: Final = 2.0
STUCK_LOG_S: Final = 60.0
_NAME: Final = re.compile(r"[A-Za-z0-9_.+-]+")
_INDEX: Final = re.compile(r"[0-9]{2}")

STARTING: Final = Reason(NriCode.STARTING, "starting")

log = get_logger("nri")


class NriState(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands with the runtime.

    `connected` once it configured us, `synchronized` once it told us its pods: from then on it asks us. `error` says
    why not. `since_unix_s`: of `connected`, either way. `answer_s`: the time the front end has for a request. `late`:
    requests answered without it; `slowest_s`: the longest wait for an answer, by kind of request; `stuck_s`: how long
    its present call is over its time.
    """

    connected: bool = False
    synchronized: bool = False
    runtime: Runtime | None = None
    error: Reason | None = None
    since_unix_s: float = 0.0
    registrations: int = 0
    answer_s: float = ANSWER_S
    late: int = 0
    slowest_s: Mapping[str, float] = {}
    stuck_s: float = 0.0


class NriSession:
    """Keeps one plugin registered until closed.

    Args:
        name: what the runtime calls us: letters, digits and `_.+-`.
        index: two digits; plugins are called in their order.
        handler: the front end.
        answer_s: how long it may take over one request.
    """

    def __init__(
        self,
        socket_path: str,
        name: str,
        index: str,
        handler: Handler,
        *,
        answer_s: float = ANSWER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(socket_path, name, index)
        self._path, self._name, self._index = socket_path, name, index
        self._socket = SocketFile(socket_path)
        self._handler, self._answer_s, self._monotonic = handler, answer_s, monotonic
        self._stop = threading.Event()
        self._changed = threading.Condition()  # guards queue, dialogue, link and state
        self._queue = RequestQueue()
        self._links = 0
        self._link: Link | None = None
        self._state = NriState(error=STARTING, since_unix_s=time.time(), answer_s=answer_s)
        self._stuck_logged_s = float("-inf")
        self._thread = GuardedThread(self._run, "nri")
        self._worker = GuardedThread(self._work, "nri-worker")

    @property
    def state(self) -> NriState:
        """For status."""
        with self._changed:
            return msgspec.structs.replace(
                self._state,
                late=self._queue.late,
                slowest_s=self._queue.slowest_s,
                stuck_s=self._queue.stuck_s(self._monotonic()),
            )

    def start(self) -> None:
        self._worker.start()
        self._thread.start()

    def close(self) -> None:
        """Leaves the runtime; the front end hears of it. A call of the front end that hangs is left behind."""
        self._stop.set()
        with self._changed:
            link = self._link
            self._changed.notify_all()
        if link is not None:
            link.end("closed by us")
        for thread, patience_s in ((self._thread, None), (self._worker, CLOSE_S)):
            if thread.ident is not None:
                thread.join(patience_s)
            with self._changed:
                self._changed.notify_all()
        self._socket.close()

    # The thread that connects and reads.

    def _run(self) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_LAST_S, random.random)
        mishaps = Mishaps("nri", "the NRI session failed and begins again", log)
        while not self._stop.is_set():
            socket_number = self._socket.look()
            begun_s = self._monotonic()
            try:
                self._one_link(socket_number)
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
                self._note_disconnected(Reason(NriCode.ENDED, f"{type(error).__name__}: {error}"))
            if self._monotonic() - begun_s >= STEADY_S:
                backoff.reset()
            # Also after a success: a runtime that takes us and drops us again must not be asked in a tight loop.
            if self._pause(backoff.pause_s(), socket_number):
                backoff.reset()

    def _pause(self, duration_s: float, tried: int | None) -> bool:
        """Waits. True, and early, when there is news: another socket than the one tried last."""
        until_s = self._monotonic() + duration_s
        while not self._stop.is_set():
            if self._socket.look() not in (None, tried):
                return True
            left_s = until_s - self._monotonic()
            if left_s <= 0:
                break
            self._stop.wait(min(left_s, LOOK_S))
        return False

    def _one_link(self, socket_number: int | None) -> None:
        """From connecting to the end of the link."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            self._note_disconnected(Reason(NriCode.NOT_REACHABLE, _unreachable(self._path, error)))
            return
        link = Link(connection, serves=mux.PLUGIN_SERVICE, calls=mux.RUNTIME_SERVICE)
        with self._changed:
            self._links += 1
            self._link = link
            dialogue = Dialogue(self._links, self._queue, self._handler, self._answer_s)
        reason = "closed by us"
        try:
            if not self._stop.is_set():  # close() may have come before there was a link to end
                self._serve(link, dialogue, socket_number)
        except (LinkError, ProtocolError) as error:
            reason = str(error)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._link = None
                self._queue.drop(self._links, reason, self._answer_s)
                self._note_disconnected(Reason(NriCode.ENDED, reason))
                self._changed.notify_all()
            link.release()

    def _serve(self, link: Link, dialogue: Dialogue, socket_number: int | None) -> None:
        """Returns when asked to stop, else raises LinkError or ProtocolError."""
        request = pb.RegisterPluginRequest(plugin_name=self._name, plugin_idx=self._index, NRI_version=NRI_VERSION)
        registration: PendingCall | None = link.begin(
            RUNTIME_SERVICE, "RegisterPlugin", request.SerializeToString(), CONFIGURED_WITHIN_S
        )
        begun_s = self._monotonic()
        look_s = begun_s + LOOK_S
        while not self._stop.is_set():
            with self._changed:
                due_s = self._queue.due_s()
            now_s = self._monotonic()
            for asked in link.pump(min(due_s, look_s) - now_s):
                with self._changed:
                    answer = dialogue.receive(asked, self._monotonic())
                    self._note_connected(dialogue)  # before the front end hears of it
                    self._changed.notify_all()
                if answer is not None:
                    link.answer(answer)
            self._answer_overdue(link, dialogue)
            if registration is not None and registration.done:
                _registered(registration)
                registration = None
            now_s = self._monotonic()
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._look(dialogue, socket_number, now_s - begun_s)

    def _answer_overdue(self, link: Link, dialogue: Dialogue) -> None:
        with self._changed:
            now_s = self._monotonic()
            answers = dialogue.overdue(now_s)
            stuck_s = self._queue.stuck_s(now_s)
        for answer in answers:
            link.answer(answer)
        if stuck_s and now_s - self._stuck_logged_s >= STUCK_LOG_S:
            self._stuck_logged_s = now_s
            log.warning(
                "the NRI front end is over its time; containers are refused meanwhile", answer_s=dialogue.budget_s
            )

    def _look(self, dialogue: Dialogue, socket_number: int | None, age_s: float) -> None:
        """What neither side says. Raises ProtocolError."""
        now = self._socket.look()
        if now is not None and socket_number is not None and now != socket_number:
            raise ProtocolError("there is a new socket: another container runtime serves NRI now")
        if dialogue.runtime is None and age_s >= CONFIGURED_WITHIN_S:
            raise ProtocolError(
                f"the container runtime did not configure us within {CONFIGURED_WITHIN_S:g} s: it takes no "
                "plugin while it stops a container; restart it if it makes no containers either"
            )
        if not dialogue.synchronized and age_s >= CONFIGURED_WITHIN_S + SYNCHRONIZED_WITHIN_S:
            raise ProtocolError(f"the container runtime did not tell its pods within {SYNCHRONIZED_WITHIN_S:g} s")

    def _note_connected(self, dialogue: Dialogue) -> None:
        runtime = dialogue.runtime
        with self._changed:
            before = self._state
            if runtime is None or (before.runtime is runtime and before.synchronized == dialogue.synchronized):
                return
            self._state = msgspec.structs.replace(
                before,
                connected=True,
                synchronized=dialogue.synchronized,
                runtime=runtime,
                error=None,
                since_unix_s=before.since_unix_s if before.connected else time.time(),
                registrations=before.registrations + (not before.connected),
                answer_s=dialogue.budget_s,
            )
        if not before.connected:
            log.info(
                "connected to the container runtime",
                runtime=runtime.name,
                version=runtime.version,
                request_timeout_s=runtime.request_timeout_s,
            )

    def _note_disconnected(self, error: Reason) -> None:
        with self._changed:
            before = self._state
            self._state = msgspec.structs.replace(
                before,
                connected=False,
                synchronized=False,
                runtime=None,
                error=error,
                since_unix_s=time.time() if before.connected else before.since_unix_s,
            )
        if not self._stop.is_set() and (before.connected or before.error != error):
            log.warning("no container runtime over NRI", socket=self._path, code=error.code, error=error.message)

    # The worker.

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            answer: Answer | None = None
            try:
                answer = perform(entry, self._handler)
            finally:  # else the queue would wait for it for ever
                with self._changed:
                    wanted = self._queue.finish(self._monotonic())
                    link = self._link if entry.link == self._links else None
            if wanted and link is not None:
                _send(link, answer)

    def _next(self) -> Entry | None:
        """Waits for the next thing to tell; None when all is told and no more will come."""
        with self._changed:
            while True:
                entry = self._queue.begin(self._monotonic())
                if entry is not None:
                    return entry
                if self._stop.is_set() and not self._thread.is_alive():
                    return None
                self._changed.wait()


def _send(link: Link, answer: Answer) -> None:
    try:
        link.answer(answer)
    except LinkError as error:
        log.debug("an answer came too late for its link", error=error)


def _registered(registration: PendingCall) -> None:
    """Raises ProtocolError when the runtime refused us, LinkError when it left."""
    try:
        registration.result(0.0)
    except CallError as error:
        raise ProtocolError(f"the container runtime refused our registration: {error}") from error


def _check(path: str, name: str, index: str) -> None:
    """Raises ConfigError. The rules for names are those of containerd/nri pkg/api/plugin.go."""
    size_bytes = len(os.fsencode(path))
    if not path or size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"cannot connect to {path!r}: a socket path holds 1 to {MAX_SOCKET_PATH_BYTES} bytes")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"cannot register as {name!r}: a plugin's name holds letters, digits and _.+- only")
    if not _INDEX.fullmatch(index):
        raise ConfigError(f"cannot register with index {index!r}: it has two digits, such as 90")


def _unreachable(path: str, error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return f"{path} is not there: the container runtime does not run, or its configuration turns NRI off"
        case ConnectionRefusedError():
            return f"{path} refuses connections: the container runtime does not run"
        case PermissionError():
            return f"may not connect to {path}: run as root"
        case _:
            return f"cannot connect to {path}: {error.strerror or error}"
