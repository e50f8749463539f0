"""mpsd's health: does the supervisor go round, and is there a GPU that a container could have a share of."""

import os
from collections.abc import Iterable, Sequence
from typing import Final

from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason
from mpsd.localapi.health import Health, loop_stuck, stuck
from mpsd.localapi.reasons import HealthCode
from mpsd.localapi.snapshot import DaemonState, GpuStatus, Snapshot
from mpsd.supervision.supervisor import Supervisor

TURN_S: Final = 2.0
"""A turn takes milliseconds, as the supervisor waits for nobody. Shorter than who asks for the health waits."""


def health(supervisor: Supervisor, pulses: Sequence[Pulse] = ()) -> Health:
    """As it is now: the supervisor is made to turn. Blocks for TURN_S at most.

    Args:
        pulses: of other loops of the process.
    """
    hung = () if supervisor.turns(TURN_S) else (loop_stuck("supervisor", TURN_S),)
    waiting = not_ready(supervisor.snapshot, by_mps=supervisor.serves_by_mps)
    return Health(pid=os.getpid(), not_live=(*hung, *stuck(pulses)), not_ready=waiting)


def not_ready(snapshot: Snapshot, *, by_mps: bool) -> tuple[Reason, ...]:
    """Why no GPU of the node can be shared now; empty while one can, or while the config wants none (pure).

    Args:
        by_mps: whether something that is offered needs an MPS daemon.
    """
    if not snapshot.gpus:
        return (snapshot.why or Reason(HealthCode.STARTING, "mpsd has just started and does not know its GPUs yet"),)
    shared = [gpu for gpu in snapshot.gpus if not gpu.not_shared]
    found = [why for gpu in shared if (why := _trouble(gpu, by_mps=by_mps)) is not None]
    return () if len(found) < len(shared) else tuple(_once(found))


def _trouble(gpu: GpuStatus, *, by_mps: bool) -> Reason | None:
    name, daemon = f"GPU {gpu.info.index}", gpu.daemon
    if gpu.health != "ok":
        why = gpu.why or Reason(HealthCode.GPU_NOT_SERVED, "no reason is known")
        return why.reworded(f"{name} is {gpu.health}: {why}")
    if not by_mps or (daemon is not None and daemon.state is DaemonState.READY and not daemon.wedged):
        return None
    state = "missing" if daemon is None else "wedged" if daemon.wedged else str(daemon.state)
    text = f"the MPS daemon of {name} is {state}"
    if daemon is not None and daemon.why is not None:
        return daemon.why.reworded(f"{text}: {daemon.why}")
    return Reason(HealthCode.GPU_NOT_SERVED, text)


def _once(reasons: Iterable[Reason]) -> Iterable[Reason]:
    return {reason.message: reason for reason in reasons}.values()
