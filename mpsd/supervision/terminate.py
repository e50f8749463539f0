"""Ends the GPU use of allocations in the order that keeps their neighbours alive.

A client that is killed with GPU work in flight can take the other clients of its server down, or wedge whoever comes
next (MPS troubleshooting guide r615; fix planned for r625). So its contexts are destroyed through the daemon first, and
its process is killed only after the daemon said that this is done.
"""

import time
from collections.abc import Collection, Sequence

from mpsd import processes
from mpsd.daemon import process
from mpsd.errors import GpufracError
from mpsd.log import get_logger
from mpsd.snapshot import GpuClient, Outcome, Termination
from mpsd.supervision.supervisor import Supervisor

log = get_logger("mpsd")

KILL_S = 5.0


class Terminator:
    """For callers of the local API; waits for the daemon."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def terminate(
        self, keys: Collection[str], *, kill: bool, force: bool, timeout_s: float
    ) -> tuple[Sequence[Termination], Sequence[str]]:
        """Ends every client of these allocations.

        Args:
            kill: end the processes, too.
            force: even where the daemon does not confirm that their contexts are gone.

        Returns:
            What became of each client, and why clients of some GPUs can't be told.
        """
        deadline_s = time.monotonic() + timeout_s
        found = self._supervisor.clients(self._supervisor.gpus_of(keys), timeout_s / 2)
        errors = [answer.error for answer in found.values() if answer.error]
        done: dict[int, Termination] = {}
        for uuid, answer in found.items():
            for client in answer.clients:
                if client.allocation_key in keys and client.pid not in done:
                    done[client.pid] = self._end(uuid, client, kill, force, deadline_s)
        for one in done.values():
            log.info("client " + one.outcome, pid=one.pid, key=one.allocation_key, gpu=one.gpu, error=one.error)
        return tuple(done.values()), tuple(errors)

    def _end(self, uuid: str, client: GpuClient, kill: bool, force: bool, deadline_s: float) -> Termination:
        identity = process.identify(client.pid)
        key = client.allocation_key or ""
        outcome, error = Outcome.LEFT, ""
        if client.mps:
            try:
                self._supervisor.terminate_client(uuid, client.pid, max(0.0, deadline_s - time.monotonic()))
                outcome = Outcome.TERMINATED
            except GpufracError as refused:
                error = str(refused)
        if not kill:
            error = error or ("" if client.mps else "it is no MPS client: only killing its process ends it")
        elif error and not force:
            error += ": it was not killed, as that could take its neighbours down"
        elif identity is None or not process.is_alive(identity):
            outcome, error = Outcome.KILLED, ""  # gone by itself once its contexts were
        elif processes.marker(client.pid) != key:
            error = error or "its process is not the allocation's any more"
        elif process.kill_and_wait(lambda: [identity], KILL_S):
            error = error or "its process can't be killed"
        else:
            outcome, error = Outcome.KILLED, ""
        return Termination(
            pid=client.pid, gpu=uuid, allocation_key=key, command=client.command, outcome=outcome, error=error
        )
