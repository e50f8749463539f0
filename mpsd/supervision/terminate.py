"""Ends the GPU use of allocations in the order that keeps their neighbours alive.

A client that is killed with GPU work in flight can take the other clients of its server down, or wedge whoever comes
next (MPS troubleshooting guide r615; fix planned for r625). So its contexts are destroyed through the daemon first, and
its process is killed only after the daemon said that this is done.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpsd.common import processes
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason, code_of, message_of
from mpsd.daemon import process
from mpsd.daemon.controller import NotAClientError
from mpsd.gpu.model import Mode
from mpsd.localapi.reasons import TerminationCode
from mpsd.localapi.snapshot import GpuClient, Outcome, Termination
from mpsd.supervision.supervisor import Supervisor

log = get_logger("mpsd")

KILL_S = 5.0


NO_CLIENT = Reason(TerminationCode.NOT_AN_MPS_CLIENT, "it is no MPS client: only killing its process ends it")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request; `deadline_s` is monotonic."""

    keys: frozenset[str]
    pod_uids: frozenset[str]
    kill: bool
    force: bool
    deadline_s: float
    simulated: bool

    def means(self, key: str | None, pod_uid: str | None) -> bool:
        """Whether it is about a client of this allocation, in this pod."""
        return key in self.keys or pod_uid in self.pod_uids

    def still_means(self, pid: int) -> bool:
        """The same of a process as it is now: its PID may have been used again."""
        return self.means(processes.marker(pid), processes.pod_uid_of(pid, simulated=self.simulated))


class Terminator:
    """For callers of the local API; waits for the daemon."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def terminate(
        self, keys: Collection[str], pod_uids: Collection[str] = (), *, kill: bool, force: bool, timeout_s: float
    ) -> tuple[Sequence[Termination], Sequence[Reason]]:
        """Ends every client of these allocations.

        Args:
            pod_uids: clients in these pods are ended, too, whatever allocation their environment names.
            kill: end the processes, too.
            force: even where the daemon does not confirm that their contexts are gone.

        Returns:
            What became of each client, and why clients of some GPUs can't be told.
        """
        deadline_s = time.monotonic() + timeout_s
        simulated = self._supervisor.config.backend == "simulated"
        asked = _Asked(frozenset(keys), frozenset(pod_uids), kill, force, deadline_s, simulated)
        found = self._supervisor.clients(self._supervisor.gpus_of(keys, pod_uids), timeout_s / 2)
        # Who joined since the daemon last answered is not known for its client, and as a rule is one all the same.
        plain_gpus = {gpu.info.uuid for gpu in self._supervisor.snapshot.gpus if gpu.mode is Mode.TIME_SLICING}
        errors = [answer.why for answer in found.values() if answer.why is not None]
        done: dict[int, Termination] = {}
        for uuid, answer in found.items():
            for client in answer.clients:
                if asked.means(client.allocation_key, client.pod_uid) and client.pid not in done:
                    plain = not client.mps and uuid in plain_gpus
                    done[client.pid] = self._end(uuid, client, asked, plain=plain)
        for one in done.values():
            log.info("client " + one.outcome, pid=one.pid, key=one.allocation_key, gpu=one.gpu, error=one.error)
        return tuple(done.values()), tuple(errors)

    def _end(self, uuid: str, client: GpuClient, asked: _Asked, *, plain: bool) -> Termination:
        identity = process.identify(client.pid)
        ours = asked.still_means(client.pid)  # of this identity: whoever is ending has no environment any more
        outcome = Outcome.LEFT
        error: Reason | None = None
        if not plain:
            try:
                self._supervisor.terminate_client(uuid, client.pid, max(0.0, asked.deadline_s - time.monotonic()))
                outcome = Outcome.TERMINATED
            except NotAClientError:
                plain = True
            except GpufracError as refused:
                error = Reason(TerminationCode.NOT_CONFIRMED, str(refused))
        if not asked.kill:
            error = NO_CLIENT if plain else error
        elif error and not asked.force:
            error = Reason(error.code, f"{error}: it was not killed, as that could take its neighbours down")
        elif identity is None or not process.is_alive(identity):
            outcome, error = Outcome.KILLED, None  # gone by itself once its contexts were
        elif not ours:
            error = error or Reason(TerminationCode.NOT_THE_ALLOCATIONS, "its process is not the allocation's any more")
        elif process.kill_and_wait(lambda: [identity], KILL_S):
            error = error or Reason(TerminationCode.CANNOT_BE_KILLED, "its process can't be killed")
        else:
            outcome, error = Outcome.KILLED, None
        return Termination(
            pid=client.pid,
            gpu=uuid,
            allocation_key=client.allocation_key or "",
            command=client.command,
            outcome=outcome,
            error=message_of(error),
            error_code=code_of(error),
        )
