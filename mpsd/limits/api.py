"""Memory limits of cgroups over the local API: reads and sets what the plugin asks for, and decides nothing."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.gpu.backend import GpuBackend, GpuNotSupportedError, MemoryLimits, NoLimitError
from mpsd.limits.cgroups import objection
from mpsd.limits.model import same_limit
from mpsd.localapi.reasons import LimitReadingCode
from mpsd.localapi.snapshot import LimitQuery, LimitReading, Snapshot

log = get_logger("mpsd")

MAX_QUERIES = 512
MAX_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Job:
    """Calls to one GPU's driver, not begun after `deadline_s` (monotonic): then nobody waits any more, and a limit must
    not be set by surprise. `refuse` is told why they are not made."""

    run: Callable[[GpuBackend], None]
    refuse: Callable[[Reason], None]
    deadline_s: float


class GpuLimits:
    """Of one GPU. Every method is for the supervisor's thread; the driver is called in the GPU's lane, for one job at a
    time: while it hangs, those that wait for it go when their time is over."""

    def __init__(self, backend: GpuBackend, lane: Lane, post: Post) -> None:
        self._backend, self._lane, self._post = backend, lane, post
        self._waiting: tuple[Job, ...] = ()
        self._busy = False

    def ask(self, job: Job) -> None:
        """Runs a job in the GPU's lane after those that wait, unless its time is over by then."""
        now_s = time.monotonic()
        self._waiting = (*(waiting for waiting in self._waiting if waiting.deadline_s > now_s), job)
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._busy:
            job, *rest = self._waiting
            self._waiting, self._busy = tuple(rest), True
            self._lane.submit(partial(self._run, job))

    def _run(self, job: Job) -> None:
        try:
            if time.monotonic() < job.deadline_s:
                job.run(self._backend)
        except Exception as error:
            log.exception("a call for memory limits failed in an unforeseen way")
            job.refuse(Reason(LimitReadingCode.NOT_ASKED, str(error)))
        finally:
            self._post(self._on_done)

    def _on_done(self) -> None:
        self._busy = False
        self._next()


class Loop(Protocol):
    """What is needed of the supervisor."""

    @property
    def snapshot(self) -> Snapshot: ...
    def ask_limits(self, uuid: str, job: Job) -> None: ...
    def soft_limit_seen(self) -> None: ...


class LimitsApi:
    """For threads that may wait."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def read(self, queries: Sequence[LimitQuery], timeout_s: float) -> list[LimitReading]:
        """What is in force, in the order of the queries. All GPUs are asked side by side: one that can't tell in time
        spoils no other's answers.

        Raises:
            ConfigError: too many queries.
        """
        if len(queries) > MAX_QUERIES:
            raise ConfigError(f"cannot read more than {MAX_QUERIES} memory limits at a time")
        snapshot = self._loop.snapshot
        readings: dict[int, LimitReading] = {}
        by_gpu: dict[str, list[int]] = {}
        for index, query in enumerate(queries):
            if why := objection(snapshot.cgroup_root, query.cgroup):
                readings[index] = _untold(query, Reason(LimitReadingCode.BAD_CGROUP, why))
            else:
                by_gpu.setdefault(query.gpu, []).append(index)
        answers: queue.SimpleQueue[tuple[int, LimitReading]] = queue.SimpleQueue()
        deadline_s = time.monotonic() + timeout_s
        # The driver itself keeps no limit for what has none, and says so in words of its own.
        in_driver = snapshot.hard_limits.backend == "misc"

        def run(indices: list[int], backend: GpuBackend) -> None:
            for index in indices:
                if time.monotonic() < deadline_s:
                    answers.put((index, _read(backend, queries[index], in_driver=in_driver)))

        def refuse(indices: list[int], why: Reason) -> None:
            for index in indices:
                answers.put((index, _untold(queries[index], why)))

        for uuid, indices in by_gpu.items():
            self._loop.ask_limits(uuid, Job(partial(run, indices), partial(refuse, indices), deadline_s))
        while len(readings) < len(queries):
            try:
                index, reading = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            readings[index] = reading
        if any(reading.soft_bytes for reading in readings.values()):
            self._loop.soft_limit_seen()
        late = Reason(LimitReadingCode.NO_ANSWER, f"the driver has not answered in {timeout_s:g} s")
        return [readings.get(index) or _untold(query, late) for index, query in enumerate(queries)]

    def set(self, query: LimitQuery, soft_bytes: int, hard_bytes: int | None, timeout_s: float) -> LimitReading:
        """Sets both limits of a cgroup on a GPU and reads them back; soft 0 and hard None clear them.

        Raises:
            ConfigError: limits or cgroup are none that could be set.
            GpufracError: the driver refuses.
            TransientError: no answer in time, so that they may be in force or not; or they read back as others.
        """
        what = f"cannot set the memory limits of {query.cgroup} on GPU {query.gpu}"
        ceiling_bytes = MAX_LIMIT_BYTES if hard_bytes is None else hard_bytes
        if not 0 <= soft_bytes <= ceiling_bytes <= MAX_LIMIT_BYTES:
            raise ConfigError(f"{what}: soft must be from 0 to hard, both below {MAX_LIMIT_BYTES} bytes")
        snapshot = self._loop.snapshot
        if why := objection(snapshot.cgroup_root, query.cgroup):
            raise ConfigError(f"{what}: {why}")
        in_driver = snapshot.hard_limits.backend == "misc"
        answer: queue.SimpleQueue[LimitReading | GpufracError] = queue.SimpleQueue()

        def run(backend: GpuBackend) -> None:
            try:
                backend.set_memory_limits(query.gpu, query.cgroup, soft_bytes, hard_bytes)
                answer.put(_read(backend, query, in_driver=in_driver))
            except GpufracError as error:
                answer.put(error)

        def refuse(why: Reason) -> None:
            answer.put(TransientError(f"{what}: {why}"))

        self._loop.ask_limits(query.gpu, Job(run, refuse, time.monotonic() + timeout_s))
        try:
            found = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise TransientError(f"{what}: the driver has not answered in {timeout_s:g} s; look again later") from None
        if isinstance(found, GpufracError):
            raise found
        if found.error:
            raise TransientError(f"cannot read back the limits just set: {found.error}")
        if not (same_limit(soft_bytes, found.soft_bytes) and same_limit(hard_bytes, found.hard_bytes)):
            raise TransientError(f"{what}: they read back as soft {found.soft_bytes}, hard {found.hard_bytes} bytes")
        if found.soft_bytes:
            self._loop.soft_limit_seen()
        return found


def _read(backend: GpuBackend, query: LimitQuery, *, in_driver: bool) -> LimitReading:
    """No limit at all is a reading, too."""
    try:
        limits = backend.memory_limits(query.gpu, query.cgroup)
    except NoLimitError:
        limits = MemoryLimits(0, None)
    except GpuNotSupportedError as error:
        # Without dmem the driver answers this where no limit is near, too; what it offers was probed.
        if not in_driver or error.code != 3:
            return _refused(error)
        limits = MemoryLimits(0, None)
    except GpufracError as error:
        return _refused(error)
    return LimitReading(soft_bytes=limits.soft_bytes, hard_bytes=limits.hard_bytes, used_bytes=limits.used_bytes)


def _refused(error: GpufracError) -> LimitReading:
    return LimitReading(error=str(error), error_code=LimitReadingCode.REFUSED)


def _untold(query: LimitQuery, why: Reason) -> LimitReading:
    text = f"cannot read the memory limits of {query.cgroup} on GPU {query.gpu}: {why}"
    return LimitReading(error=text, error_code=why.code)
