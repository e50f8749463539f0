"""What a tenant can do with its own pods, and what it must not get by that: more memory, others' places, silence."""

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from cdi.errors import SpecFileError
from deviceplugin.annotated.shares import FRESH_S
from deviceplugin.grants.holders.pods import GONE_S
from deviceplugin.nri.model import ContainerState, Pod, Refused, Runtime
from deviceplugin.plan.ids import device_id
from deviceplugin.reconcile.hardlimits import MarkedCgroup
from deviceplugin.status.model import PluginStatus
from mpsd.common.processes import PodProcess
from mpsd.config.model import Enforcement, TrustPolicy
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import GpuClient
from tests.builders import config, fixed, ready, resource, uuid
from tests.unit.deviceplugin.annotated.frontendnode import (
    GIB,
    Node,
    annotated,
    container,
    env_of,
    held_share,
    keys,
    made_by,
    pod,
)

RUNNING = ContainerState.RUNNING


def two_sizes() -> Pod:
    return pod(keys("big", limit="70Gi") | keys("small", limit="1Gi"))


def made_twice(node: Node) -> dict[str, str]:
    """Keys of the allocations of one pod, by container."""
    for name in ("big", "small"):
        node.create(two_sizes(), container(name))
    return {a.container.container: a.key for a in node.broker.allocations() if a.container}


def test_a_container_that_calls_itself_the_larger_one_of_its_pod_keeps_its_limit(node: Node) -> None:
    """Its first process may change its environment at any time, by exec."""
    key_of = made_twice(node)
    directories = {}
    for name, key in key_of.items():
        path = f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx.slice/cri-containerd-{name}.scope"
        directories[name] = node.cgroup(path, uuid(0))
        limit_bytes = (70 if name == "big" else 1) * GIB
        told = {"ALLOCATION": key, "MEMORY_LIMIT_BYTES": limit_bytes, "COMPUTE_MODE": "time-slicing"}
        env = [f"GPUFRAC_{variable}={value}" for variable, value in told.items()]
        node.frontend.start_container(two_sizes(), container(name, *env))
    node.marked = [MarkedCgroup(key_of["big"], "uid-p", directory) for directory in directories.values()]
    node.keeper.check_limits()
    assert node.mpsd.limits_of[uuid(0), directories["small"]].hard_bytes == GIB
    shown = {a.key: a for a in node.picture().allocations}
    assert "never raised" in shown[key_of["big"]].reason


def test_what_a_process_of_a_gone_pod_says_it_has_gives_nothing_of_the_pod_away(node: Node) -> None:
    ask = two_sizes()
    node.frontend.run_pod(ask)
    small = made_twice(node)["small"]
    node.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=9, allocation_key=small, pod_uid="uid-p"),)
    node.frontend.stop_pod(ask)
    node.pass_time(GONE_S + 5)
    assert sum(a.request_bytes for a in node.broker.allocations()) == 71 * GIB


@pytest.mark.parametrize("trust", [TrustPolicy.NAMESPACES, TrustPolicy.KAI_RESERVATION])
def test_who_is_not_believed_takes_no_place_though_it_started_while_we_were_away(
    tmp_path: Path, trust: TrustPolicy
) -> None:
    namespaces = ("team-a",) if trust is TrustPolicy.NAMESPACES else ()
    node = Node(tmp_path, config(annotations=annotated(trust=trust, namespaces=namespaces)))
    evil = pod(keys(limit="70Gi", devices=uuid(0)), "evil", namespace="evil")
    node.frontend.synchronize([evil], [container(id="e", pod_id=evil.id, state=RUNNING)])
    assert node.holds_nothing()
    (told,) = node.frontend.report.unenforced
    assert "what it takes is not counted" in told.reason.message
    if trust is TrustPolicy.NAMESPACES:
        node.create(pod(keys(limit="70Gi"), namespace="team-a"), container())


@pytest.mark.parametrize(
    ("limit", "devices", "mode"),
    [("7.9Ei", "0", "time-slicing"), ("4Gi", "0,1", "sm-sharing"), ("4Gi", "0", "sm-sharing")],
    ids=["more-than-there-is", "over-gpus-of-no-group", "in-the-other-mode"],
)
def test_what_can_hold_under_no_circumstances_is_told_and_not_counted(
    node: Node, limit: str, devices: str, mode: str
) -> None:
    node.create(pod(keys(limit="4Gi"), "honest"), container(pod_id="sandbox-honest"))
    claims = [pod(keys(limit=limit, devices=devices, mode=mode), f"e{i}") for i in range(3)]
    node.frontend.synchronize(
        [pod(keys(limit="4Gi"), "honest"), *claims],
        [container(id=claim.name, pod_id=claim.id, state=RUNNING) for claim in claims],
    )
    assert len(node.broker.allocations()) == 1
    assert {told.container.pod for told in node.frontend.report.unenforced} == {"e0", "e1", "e2"}
    status = msgspec.json.encode(node.picture())
    assert len(msgspec.json.decode(status, type=PluginStatus).allocations) == 1, "sums of 2^64 can't be written"


def test_a_gpu_that_was_given_whole_since_our_last_look_takes_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated()))
    node.kubelet.containers["ns", "whole", "c"] = {"nvidia.com/gpu": (uuid(0),)}
    node.now_s += FRESH_S
    assert "holds it" in node.refusal(lambda: node.create(pod(keys(limit="40Gi")), container()))


def test_a_reservation_that_ended_since_our_last_look_counts_no_more(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    node.kubelet.containers["kai-resource-reservation", "gpu-reservation-x", "c"] = {"nvidia.com/gpu": (uuid(0),)}
    node.keeper.observe()
    node.kubelet.containers.clear()
    node.now_s += FRESH_S
    assert "no reservation pod" in node.refusal(lambda: node.create(pod(keys(limit="40Gi")), container()))


def test_who_waits_in_vain_on_a_gpu_keeps_others_waiting_once(node: Node) -> None:
    """The runtime makes one container at a time, and who is refused is tried again and again, each of them."""
    node.attaches = False
    waited: list[float] = []

    def wait(key: str, timeout_s: float) -> None:
        waited.append(timeout_s)

    node.wait_attached = wait  # type: ignore[method-assign]
    for name, gpu in (("p", "0"), ("p", "0"), ("q", "0"), ("r", "0"), ("s", "1")):
        with pytest.raises(Refused):
            node.create(pod(keys(limit="4Gi", devices=gpu), name), container(pod_id=f"sandbox-{name}"))
    first, *again, elsewhere = waited
    assert first == elsewhere > 10 * max(again)


def test_a_lower_limit_that_nothing_would_hold_is_refused(tmp_path: Path) -> None:
    free = resource("a", fixed(8), mode=Mode.TIME_SLICING, enforcement=Enforcement.NONE)
    node = Node(tmp_path, config(free, annotations=annotated()), hard=False)
    share = held_share(node)
    made = container("main", f"GPUFRAC_ALLOCATION={share.key}")
    assert "nothing holds this one to any" in node.refusal(
        lambda: node.create(pod(keys(limit="4Gi", devices="")), made)
    )


def test_a_lower_limit_on_a_group_is_refused_where_its_daemon_has_one_for_all(tmp_path: Path) -> None:
    on_pair = resource("a", fixed(40), groups=("pair",))
    node = Node(tmp_path, config(on_pair, groups=(("pair", (0, 1)),), annotations=annotated(gpus=(7,))), hard=False)
    node.daemon = structs.replace(ready(40), protocol=2)
    node.tell()
    share = node.grant("a", device_id("pair", 0))
    node.run(share, "p", "main")
    node.keeper.observe()
    made = container("main", f"GPUFRAC_ALLOCATION={share.key}")
    text = node.refusal(lambda: node.create(pod(keys(limit="4Gi", devices="")), made))
    assert "MPS protocol 2 has one limit for all containers on a group" in text


def test_a_plain_init_container_may_lower_its_share(node: Node) -> None:
    """PodResources does not show it: the checkpoint does, with the pod's UID."""
    share = node.grant()
    node.write_checkpoint([{**node.checkpoint(share, "uid-p"), "ContainerName": "init"}])
    (node.root / "pods" / "uid-p").mkdir()
    node.kubelet.containers["ns", "p", "main"] = {}
    node.keeper.observe()
    claim = container("init", f"GPUFRAC_ALLOCATION={share.key}")
    made = node.create(pod(keys("init", limit="4Gi", devices="")), claim)
    assert env_of(made)["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(4 * GIB)
    other = node.create(pod(keys("init", limit="4Gi", devices="1"), "q"), claim)
    assert env_of(other)["GPUFRAC_ALLOCATION"] != share.key


def test_a_pod_that_comes_back_while_its_file_cant_be_removed_keeps_its_place(node: Node) -> None:
    one, two = pod(keys(limit="8Gi"), sandbox="1"), pod(keys(limit="8Gi"), sandbox="2")
    node.frontend.run_pod(one)
    node.create(one, container())
    node.frontend.stop_pod(one)
    remove = node.specs.remove

    def fails(identifier: str) -> None:
        raise SpecFileError("remove", identifier, "Read-only file system")

    node.specs.remove = fails  # type: ignore[method-assign,assignment]
    node.pass_time(GONE_S + 5)
    node.frontend.run_pod(two)
    node.specs.remove = remove  # type: ignore[method-assign]
    node.pass_time(600)
    node.create(two, container())
    assert len(node.broker.allocations()) == 1


def test_a_pod_between_two_runs_of_its_container_keeps_its_place_where_sandboxes_have_no_process(
    tmp_path: Path,
) -> None:
    """CRI-O, by default: its pods have PID 0."""
    node = Node(tmp_path, config(annotations=annotated()), Runtime(name="cri-o", version="1.31.0"), hard=False)
    one = pod(keys(limit="60Gi", mode="sm-sharing"), pid=0)
    (node.root / "pods" / "uid-p").mkdir()
    node.frontend.run_pod(one)
    node.create(one, container())
    node.restart()
    node.begin_frontend()
    node.frontend.synchronize([one], [])
    node.pass_time(GONE_S + 5)
    assert not node.holds_nothing()


def test_a_container_whose_neighbour_had_the_gpu_is_not_accused(node: Node) -> None:
    """The annotated init container ended before anybody looked; the pod's other containers have no GPU."""
    ask = pod(keys("init", limit="8Gi"))
    node.frontend.run_pod(ask)
    node.create(ask, container("init"))
    (node.root / "pods" / "uid-p" / "containers" / "init").mkdir(parents=True)
    node.kubelet.containers["ns", "p", "main"] = {}
    node.processes = {"uid-p": [PodProcess(11, "cri-containerd-1.scope", None, "nginx")]}
    for _ in range(12):
        node.pass_time(5)
        node.keeper.check_markers()
    assert node.keeper.report.unenforced == {}


def test_values_that_a_pod_gives_itself_start_nothing(tmp_path: Path) -> None:
    """Made while we were away, and not started yet, with all we would give it but the mount."""
    node = Node(tmp_path, config(annotations=annotated()), hard=False)
    ask = pod(keys(limit="4Gi", mode="sm-sharing"))
    env = ("ALLOCATION=0123456789abcdef0123", f"MEMORY_LIMIT_BYTES={4 * GIB}", "COMPUTE_MODE=sm-sharing")
    made = container("main", *(f"GPUFRAC_{entry}" for entry in env), state=ContainerState.CREATED)
    node.frontend.synchronize([ask], [made])
    assert len(node.frontend.report.unenforced) == 1
    assert "created while gpufrac was not there" in node.refusal(lambda: node.frontend.start_container(ask, made))
    again = node.create(ask, container(id="second"))
    node.frontend.start_container(ask, made_by(again, id="second"))


def test_what_is_kept_of_a_state_is_what_is_looked_at_and_nothing_long(node: Node) -> None:
    long = "x" * 100_000
    many = pod({**keys(limit="4Gi"), "some/note": long, "my-gpu-key": long})
    found = container("main", f"GPUFRAC_ALLOCATION={long}", f"PATH={long}", "NVIDIA_VISIBLE_DEVICES=void")
    pods, containers = node.frontend.brief([many], [found])
    assert set(pods[0].annotations) == {*keys(limit="4Gi"), "my-gpu-key"}
    assert [entry.partition("=")[0] for entry in containers[0].env] == ["GPUFRAC_ALLOCATION", "NVIDIA_VISIBLE_DEVICES"]
    assert len(msgspec.json.encode((pods[0].annotations, containers[0].env))) < 40_000
    assert (pods[0].uid, containers[0].id) == (many.uid, found.id)
