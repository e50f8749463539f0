"""The supervisor's thread and its inbox: whoever holds state changes it in a turn of this loop, and nowhere else."""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from mpsd.common.errors import GpufracError, TransientError
from mpsd.common.log import get_logger
from mpsd.common.threads import GuardedThread, Mishaps

log = get_logger("mpsd")

Message = Callable[[], None]
T = TypeVar("T")


class Loop:
    """Runs messages in the order they come, and a turn after each, or when the pause is over.

    Args:
        turn: compares desired with observed.
        pause_s: how long to wait for a message.
        finished: asked before each message; the thread ends where it says so.
    """

    def __init__(self, turn: Message, pause_s: Callable[[], float], finished: Callable[[], bool]) -> None:
        self._turn, self._pause_s, self._finished = turn, pause_s, finished
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = GuardedThread(self._run, "supervisor")
        self._awaited: list[threading.Event] = []
        """Of the thread: set when the next turn has come to its end."""

    def start(self) -> None:
        self._thread.start()

    def end(self, last: Message, timeout_s: float) -> None:
        """Posts the message after which it comes to its end, and waits for that."""
        if self._thread.is_alive():
            self.post(last)
            self._thread.join(timeout_s)

    def post(self, message: Message) -> None:
        """For any thread."""
        self._inbox.put(message)

    def ask(self, question: Callable[[], T], timeout_s: float = 5.0) -> T:
        """Has a question answered in a turn, for another thread that waits. Raises what it raised."""
        answer: queue.SimpleQueue[T | GpufracError] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(question())
            except GpufracError as error:
                answer.put(error)

        self.post(run)
        try:
            found = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TransientError(f"cannot get an answer of the supervisor within {timeout_s:g} s") from None
        if isinstance(found, GpufracError):
            raise found
        return found

    def turns(self, timeout_s: float) -> bool:
        """Makes it turn, and tells whether that turn has come to its end in time: one that raises has not. For another
        thread, which waits."""
        turned = threading.Event()
        self.post(partial(self._awaited.append, turned))
        return turned.wait(timeout_s)

    def _run(self) -> None:
        mishaps = Mishaps("supervisor", "the supervisor failed on a message and goes on", log)
        while not self._finished():
            message = self._next()
            try:
                if message is not None:
                    message()
                self._turn()
                mishaps.none()
                while self._awaited:
                    self._awaited.pop().set()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)

    def _next(self) -> Message | None:
        try:
            return self._inbox.get(timeout=self._pause_s())
        except queue.Empty:
            return None
