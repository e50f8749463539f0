"""How long a simulated node waits for containers before it says that they don't start."""

from pathlib import Path

import pytest

from deviceplugin.sim.node import node as node_module
from deviceplugin.sim.node.node import SimulatedNode
from mpsd.common.errors import NotReachableError
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuStatus, Snapshot
from tests.builders import info


class Kubelet:
    """Gives up on everybody so many times, then all has settled."""

    def __init__(self, times: int) -> None:
        self.times, self.asked = times, 0

    def wait_settled(self, pods: object, timeout_s: float, refused_s: float) -> bool:
        self.asked += 1
        return self.asked > self.times


class Mpsd:
    """Whose daemon is in these states one after the other, the last one for good."""

    states: list[DaemonState | None]

    def __init__(self, socket: str) -> None: ...

    def snapshot(self) -> Snapshot:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise NotReachableError("it is not there")
        gpu = GpuStatus(info=info(0), health="ok", daemon=DaemonStatus(state=state))  # type: ignore[arg-type]
        return Snapshot(instance="i", generation=1, gpus=(gpu,))


@pytest.mark.parametrize(
    ("states", "asked"),
    [
        ([DaemonState.STOPPING, DaemonState.STARTING, DaemonState.CONFIGURING, DaemonState.READY], 4),
        ([DaemonState.READY], 1),
        ([DaemonState.FAILED], 1),
        ([DaemonState.DRAINING], 1),
        ([None], 1),
    ],
)
def test_nobody_is_given_up_while_a_daemon_is_under_way(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, states: list[DaemonState | None], asked: int
) -> None:
    made = SimulatedNode(str(short_tmp))
    kubelet = Kubelet(times=99)
    monkeypatch.setattr(made, "_kubelet", kubelet)
    monkeypatch.setattr(Mpsd, "states", list(states), raising=False)
    monkeypatch.setattr(node_module, "MpsdClient", Mpsd)
    monkeypatch.setattr(node_module, "POLL_S", 0.0)
    made._wait_settled([], float("inf"))
    assert kubelet.asked == asked
