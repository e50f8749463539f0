"""Keeps who uses one GPU: counted when the driver shows something new, and looked up when somebody asks."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.host import DaemonHost
from mpsd.daemon.plan import DaemonSpec
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import GpuProcess
from mpsd.localapi.reasons import ClientsCode
from mpsd.localapi.snapshot import GpuClient, GpuClients
from mpsd.supervision.clients import Census, Counted, take_census, with_usage

log = get_logger("mpsd")

RETRY_S = 5.0
"""When to count again after a count that failed."""

Reply = queue.SimpleQueue[GpuClients]


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody waits for who uses a GPU, not longer than until `deadline_s` (monotonic)."""

    reply: Reply
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon to ask about the GPU, as it is now. `answers`: whether it is fit to be asked."""

    spec: DaemonSpec
    identity: DaemonIdentity | None
    answers: bool


class Usage:
    """Of one GPU. Every method is for the supervisor's thread; driver and daemon are asked in the lane.

    Args:
        daemon: the daemon that is on the GPU now, None before any is planned.
        simulated: whether pods are.
        on_counted: told after each count, with the daemon's servers where it was asked; `fresh`: the driver was asked
            for it, and when (monotonic); None where the count failed.
    """

    def __init__(
        self,
        uuid: str,
        lane: Lane,
        backend: GpuBackend,
        host: DaemonHost,
        post: Post,
        daemon: Callable[[], Daemon | None],
        on_counted: Callable[["Count"], None],
        *,
        simulated: bool = False,
    ) -> None:
        self._uuid, self._lane, self._backend, self._host = uuid, lane, backend, host
        self._post, self._daemon, self._on_counted, self._simulated = post, daemon, on_counted, simulated
        self._counted: tuple[GpuProcess, ...] | None = None
        """The processes the driver showed at the last count; None before the first."""
        self._counting = False
        self._told = False
        """Whether the last count succeeded."""
        self._retry_s: float | None = None
        self._due = False
        """Whether the driver is to be asked once more when the count under way is over."""
        self._asked: tuple[Question, ...] = ()
        """What the look-up under way is to answer; empty while there is none."""
        self._waiting: tuple[Question, ...] = ()
        """Asked after that look-up began: what it finds may be older than these, so the next one answers them."""
        self.clients: tuple[GpuClient, ...] = ()

    @property
    def known(self) -> bool:
        """Whether it was counted, with an answer, and no count is under way."""
        return self._told and not self._counting

    @property
    def retry_s(self) -> float | None:
        """When a failed count is due again (monotonic), None when none is."""
        return self._retry_s

    def observe(self, processes: tuple[GpuProcess, ...]) -> None:
        """What the driver shows at a probe. Where only memory changed nobody need be asked."""
        failed = self._retry_s is not None and time.monotonic() >= self._retry_s
        if processes == self._counted and not failed:
            return
        if not failed and self._counted is not None and {p.pid for p in processes} == {p.pid for p in self._counted}:
            self._counted, self.clients = processes, with_usage(self.clients, processes)
        else:
            self.count(processes)

    def ask(self, question: Question) -> None:
        """Looks it up now. One look-up at a time: while the driver hangs none piles up in its lane."""
        self._waiting = (*self._waiting, question)
        self._look()

    def _look(self) -> None:
        now_s = time.monotonic()
        self._waiting = tuple(question for question in self._waiting if question.deadline_s > now_s)
        if self._waiting and not self._asked:
            self._asked, self._waiting = self._waiting, ()
            self._start(None, self._asked)

    def count(self, processes: tuple[GpuProcess, ...] | None) -> None:
        """Counts. None: the driver is asked for its processes now, or once more after the count under way: while it
        hangs, nothing piles up in its lane."""
        if not self._counting:
            self._start(processes, ())
        elif processes is None:
            self._due = True

    def _start(self, processes: tuple[GpuProcess, ...] | None, asked: tuple[Question, ...]) -> None:
        daemon = self._daemon()
        if daemon is None:  # not planned yet: the next pass of the loop counts
            return
        self._counting, self._retry_s = True, None
        if processes is not None:
            self._counted = processes
        elif self._counted is None:
            self._counted = ()
        mps_pids = frozenset(client.pid for client in self.clients if client.mps)
        census = Census(
            self._uuid, daemon.spec, daemon.identity, processes, daemon.answers, mps_pids, simulated=self._simulated
        )
        self._lane.submit(partial(self._run, census, asked, time.monotonic()))

    def _run(self, census: Census, asked: tuple[Question, ...], begun_s: float) -> None:
        result: Counted | None = None
        try:
            result = take_census(census, self._backend, self._host)
        except Exception as error:
            if not isinstance(error, GpufracError):
                log.exception("counting clients failed in an unforeseen way", gpu=self._uuid)
            answer = untold(self._uuid, Reason(ClientsCode.FAILED, str(error)))
        else:
            unknown = result.unknown
            answer = GpuClients(clients=result.clients) if unknown is None else untold(self._uuid, unknown)
        self._post(partial(self._on_result, census, asked, result, begun_s))
        for question in asked:
            question.reply.put(answer)

    def _on_result(self, census: Census, asked: tuple[Question, ...], result: Counted | None, begun_s: float) -> None:
        self._counting, self._told = False, result is not None
        self._retry_s = None if self._told else time.monotonic() + RETRY_S
        if asked:
            self._asked = ()
            self._look()
        if self._due and not self._counting:
            self._due = False
            self._start(None, ())
        if result is not None:
            self.clients = result.clients
        fresh_s = begun_s if census.processes is None else None
        complete = result is not None and result.unknown is None
        self._on_counted(Count(complete, fresh_s, result.servers if result is not None else None))


@dataclass(frozen=True, slots=True)
class Count:
    """What came of a count: whether it named everybody, when the driver was asked for it (monotonic; None: it was not,
    a probe's list was taken), and the servers of the daemon where that was asked."""

    complete: bool
    fresh_s: float | None
    servers: tuple[ProcessIdentity, ...] | None


def untold(uuid: str, reason: Reason) -> GpuClients:
    """The answer of somebody who does not know."""
    return GpuClients(error=f"cannot list the clients of GPU {uuid}: {reason}", error_code=str(reason.code))
