"""One cause is one line, however many it hits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from deviceplugin.annotated.absence import STARTED_ALONE
from deviceplugin.annotated.reasons import ServingCode
from deviceplugin.annotated.status import (
    IgnoredStatus,
    RefusedStatus,
    UnenforcedStatus,
)
from deviceplugin.cli.node import Node
from deviceplugin.cli.overview import overview
from deviceplugin.grants.nodeview import DAEMON_GRACE_S
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.kubernetes.model import KubernetesState
from deviceplugin.kubernetes.reasons import KubernetesCode
from deviceplugin.plan.allocation import ANNOTATED
from deviceplugin.plan.reasons import OfferCode, StartCode
from deviceplugin.status.attention import ABANDONED, attention
from deviceplugin.status.reasons import AttentionCode, ProcessCode
from mpsd.common.reason import Reason
from mpsd.localapi.reasons import ConfigCode, DaemonCode, WarningCode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient
from tests.builders import config, fixed, ready, reported, resource, snapshot, told, uuid
from tests.unit.deviceplugin.status.annotatedstatus import annotated_status
from tests.world import World


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    cfg = config(resource("a", fixed(8)), resource("p", fixed(8), groups=("pair0",)), groups=(("pair0", (0, 1)),))
    made = World(short_tmp, cfg, gpus=3)
    for n in range(5):
        made.run(made.grant("a", f"{uuid(2)}::{n}"), pod=f"p{n}")
    made.run(made.grant("p", "pair0::0"), pod="q")
    made.keeper.observe()
    yield made
    made.ledger.close()


def test_a_dead_daemon_is_told_once_for_all_its_allocations_and_gpus(world: World) -> None:
    world.daemon = DaemonStatus(state=DaemonState.BACKOFF, reason="it died")
    world.tell()
    world.keeper.attach()
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired(), world.daemon)
    lines = told(snapshot(*gpus), world.picture())
    assert "group pair0 (GPU 0, 1), GPU 2: its MPS daemon is backoff: it died" in lines
    (waiting,) = [line for line in lines if line.endswith("waiting for the MPS daemon of GPU 2")]
    assert waiting.startswith("ns/p0/c, ns/p1/c, ns/p2/c and 2 more: waiting: ")
    assert any(line.startswith("ns/q/c: waiting: ") and line.endswith("of group pair0 (GPU 0, 1)") for line in lines)
    assert len(lines) == 4, lines


def said(world: World, daemon: DaemonStatus) -> list[str]:
    """What both processes say once the daemons are so for a while."""
    world.daemon = daemon
    for _ in range(2):
        world.tell()
        world.keeper.attach()
        world.now_s += DAEMON_GRACE_S
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired(), daemon)
    return told(snapshot(*gpus), world.picture())


AWAY = Reason(ProcessCode.NOT_REACHABLE, "cannot reach `gpufrac mpsd`")
REPLACED = "it is replaced when its clients have ended: leak"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"state": DaemonState.DRAINING}, ["its MPS daemon is draining"]),
        (
            {"state": DaemonState.DRAINING, "reason": REPLACED, "reason_code": DaemonCode.REPLACED_WHEN_IDLE},
            ["its MPS daemon is replaced when its clients have ended: leak"],
        ),
        (
            {"wedged": True, "reason": "wedged, 3 attempts in a row failed: no answer"},
            ["its MPS daemon is wedged: 3 attempts in a row failed: no answer"],
        ),
        ({"state": DaemonState.ABSENT, "reason": "its GPU is lost"}, ["its MPS daemon is absent: its GPU is lost"]),
        ({"state": DaemonState.READY}, []),
    ],
)
def test_a_daemon_is_told_once_whoever_says_so(world: World, changes: dict[str, Any], lines: list[str]) -> None:
    found = said(world, structs.replace(ready(), **changes))
    owners = "group pair0 (GPU 0, 1), GPU 2"
    assert [line for line in found if "its MPS daemon" in line] == [f"{owners}: {line}" for line in lines]
    assert sum("wedged" in line for line in found) <= 1


def test_a_daemon_that_was_ended_for_good_is_no_trouble_of_mpsd(world: World) -> None:
    ended = DaemonStatus(state=DaemonState.ABSENT)
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired(), ended)
    assert told(snapshot(*gpus), None) == []
    (line,) = [line for line in said(world, ended) if "its MPS daemon" in line]
    assert line == "GPU 0, GPU 1, GPU 2: its MPS daemon does not run"


def test_a_drained_gpu_that_is_gone_is_listed_with_its_uuid(world: World) -> None:
    world.broker.drain(uuid(1), "fan")
    restarted = world.open_broker(world.broker.node.config)
    restarted.observe_snapshot(snapshot(*reported(world.broker.node.config, world.infos[:1], restarted.desired())))
    world.broker = restarted
    assert set(world.picture().gone_drained) == {uuid(1)}
    (line,) = [line for line in told(None, world.picture()) if "no longer on the node" in line]
    assert "fan" in line
    assert line.endswith(f"gpufrac undrain {uuid(1)}")


def test_warnings_of_mpsd_are_passed_on(world: World) -> None:
    warned = structs.replace(snapshot(), warnings=("daemons end with mpsd: use hostPID",))
    assert "daemons end with mpsd: use hostPID" in told(warned, None)


def test_a_cause_that_hits_one_names_it(world: World) -> None:
    world.broker.drain(uuid(2), "r")
    lines = told(None, world.picture(), [AWAY, None])
    assert lines[0] == "cannot reach `gpufrac mpsd`"
    assert [line for line in lines if line.startswith("GPU 2: drained by an operator at ")] == lines[2:], lines


def test_what_closes_the_whole_node_is_not_told_of_each_gpu_again(world: World) -> None:
    full = "cannot write records in /state: No space left on device: free some space there"
    picture = world.picture()
    gpus = tuple(structs.replace(gpu, reason=full) for gpu in picture.gpus)
    disk = structs.replace(picture, problems=(full,), gpus=gpus)
    assert [line for line in told(snapshot(), disk) if full in line] == [full]
    silent = tuple(structs.replace(gpu, reason="mpsd does not answer") for gpu in picture.gpus)
    away = structs.replace(picture, mpsd_error="mpsd does not answer", gpus=silent)
    assert not any(line.startswith("GPU") for line in told(None, away, [AWAY, None]))


def test_a_process_is_without_an_allocation_as_who_lists_the_processes_sees_it(world: World) -> None:
    held, *_ = world.picture().allocations
    plugin = structs.replace(world.picture(), allocations=(structs.replace(held, pod_uids=("uid-a",)),))
    gpu, *others = reported(world.broker.node.config, world.infos, world.broker.desired())
    clean = (GpuClient(pid=7, pod_uid="uid-a"), GpuClient(pid=8, pod_uid="uid-b"))
    seen = snapshot(structs.replace(gpu, clients=clean), *others)
    (line,) = [line for line in told(seen, plugin) if line.startswith(f"GPU {gpu.info.index}: processes")]
    assert line.endswith("processes without an allocation use it: pid 8")


def test_annotated_pods_are_told_by_what_is_wrong_with_them(world: World) -> None:
    who = {"namespace": "ns", "pod": "n", "container": "c"}
    found = annotated_status(
        refusing=tuple(
            RefusedStatus(**who | {"pod": f"n{n}"}, reason="no room", since_unix_s=0, count=n) for n in range(5)
        ),
        ignored=(IgnoredStatus(pod="ns/n", reason='annotation "x" is not read'),),
        unenforced=(UnenforcedStatus(**who, reason=STARTED_ALONE.message, plan="delete it"),),
    )
    picture = structs.replace(world.picture(), annotated=found)
    lines = told(None, picture)
    assert f"ns/n/c: {STARTED_ALONE}: delete it" in lines
    assert "ns/n0/c, ns/n1/c, ns/n2/c and 2 more is refused: no room" in lines
    assert 'pod ns/n: annotation "x" is not read' in lines
    assert not [line for line in told(None, structs.replace(picture, annotated=annotated_status())) if "ns/n" in line]
    gone = structs.replace(picture, annotated=annotated_status(runtime="", error="no such file"))
    assert "annotated pods are not served: no container runtime: no such file" in told(None, gone)


def test_each_line_has_the_code_of_its_cause(world: World) -> None:
    world.daemon = DaemonStatus(state=DaemonState.BACKOFF, reason="it died", reason_code=DaemonCode.EXITED)
    world.tell()
    world.keeper.attach()
    world.broker.drain(uuid(0), "fan")
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired(), world.daemon)
    refused = {"config_error": "mps: bad", "warnings": ("no host PIDs",), "warning_codes": (WarningCode.NO_HOST_PIDS,)}
    picture = structs.replace(
        world.picture(),
        annotated=annotated_status(uncompared="no CRI", uncompared_code=ServingCode.NOT_COMPARED),
        problems=("bad record",),
        problem_codes=(ProcessCode.RECORD_NOT_USABLE,),
        config_restart_needed="mps",
        gone_drained={uuid(5): "drained"},
        kubernetes=KubernetesState(error="403", error_code=KubernetesCode.REFUSES),
    )
    lines = attention(structs.replace(snapshot(*gpus), **refused), picture, [AWAY, None])
    assert {line.code for line in lines} == {
        ProcessCode.NOT_REACHABLE,
        ConfigCode.REFUSED,
        AttentionCode.CONFIG_NEEDS_RESTART,
        DaemonCode.EXITED,
        WarningCode.NO_HOST_PIDS,
        KubernetesCode.REFUSES,
        ServingCode.NOT_COMPARED,
        ProcessCode.RECORD_NOT_USABLE,
        KubeletCode.NOT_REGISTERED,
        OfferCode.DRAINED,
        AttentionCode.DRAINED_GPU_GONE,
        StartCode.WAITS_FOR_DAEMON,
    }


@pytest.mark.parametrize("plan", ["", "delete it"])
def test_no_line_ends_in_the_air(world: World, plan: str) -> None:
    one = UnenforcedStatus(namespace="ns", pod="n", container="c", reason=STARTED_ALONE.message, plan=plan)
    lines = told(None, structs.replace(world.picture(), annotated=annotated_status(unenforced=(one,))))
    (line,) = [line for line in lines if STARTED_ALONE.message in line]
    assert line.endswith(plan or STARTED_ALONE.message)


def test_annotated_pods_that_nobody_serves_any_more_are_told_of(world: World) -> None:
    picture = world.picture()
    mine = structs.replace(picture.allocations[0], resource=ANNOTATED)
    left = structs.replace(picture, allocations=(mine, *picture.allocations[1:]))
    assert f"{mine.namespace}/{mine.pod}/{mine.container}: {ABANDONED}" in told(None, left)
    assert not [line for line in told(None, picture) if ABANDONED.message in line], "shares are no annotated pods'"
    assert not [
        line for line in told(None, structs.replace(left, annotated=annotated_status())) if ABANDONED.message in line
    ]
    gone = structs.replace(left, allocations=(structs.replace(mine, state="leaving"),))
    assert not [line for line in told(None, gone) if ABANDONED.message in line]


def test_a_refused_config_is_told_once_with_what_is_in_force(world: World) -> None:
    refused = structs.replace(snapshot(), config_error="resources[0].memory: bad\nmps: bad")
    plugin = structs.replace(world.picture(), config_error=refused.config_error)
    (line,) = [line for line in told(refused, plugin) if "config" in line]
    assert line == (
        "mpsd, the plugin refused the new config file and would not start with it; the one before it stays in force: "
        "resources[0].memory: bad; mps: bad"
    )
    waits = structs.replace(snapshot(), config_restart_needed="mps")
    assert "config: restart mpsd to put in force: mps" in told(waits, None)


def test_no_restart_is_advised_with_a_file_that_would_be_refused() -> None:
    changed = structs.replace(snapshot(), config_error="mps: bad", config_restart_needed="stateRoot")
    (line,) = [line for line in told(changed, None) if "mps: bad" in line or "restart" in line]
    assert line.startswith("mpsd refused the new config file and would not start with it")


def test_gpus_that_the_config_leaves_out_need_nobody_and_are_not_usable(world: World) -> None:
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired())
    out = structs.replace(gpus[2], not_shared="it is excluded by the config", excluded=True, clients=())
    for name in [a.key for a in world.broker.allocations() if uuid(2) in a.gpus]:
        world.broker.release(name)
    world.broker.observe_snapshot(snapshot(*gpus[:2], out))
    picture = world.picture()
    assert not [line for line in told(snapshot(*gpus[:2], out), picture) if "excluded" in line]
    shown = dict(overview(Node(snapshot(*gpus[:2], out), None, picture, None)))
    assert shown["GPUs"] == "3, 3 ok, 1 excluded by the config"
    assert shown["allocations"].endswith("of 158Gi usable granted")


def test_metrics_that_are_not_served_are_told(world: World) -> None:
    picture = structs.replace(world.picture(), metrics=Reason(code="AddressInUse", message="metrics are not served"))
    assert "metrics are not served" in told(None, picture)
