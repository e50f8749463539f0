"""What a container runtime is answered for annotated pods, with everything around the front end faked."""

from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.annotated import absence
from deviceplugin.annotated.absence import NOTICE_S, STOP_EVERY_S, TO_DO
from deviceplugin.annotated.inventory import reference
from deviceplugin.annotated.shares import FRESH_S
from deviceplugin.cli.node import missing_shares
from deviceplugin.grants.holders.pods import GONE_S
from deviceplugin.nri.model import Adjustment, Container, ContainerState, Mount, Pod, Runtime
from deviceplugin.plan import render
from deviceplugin.plan.allocation import Refusal
from deviceplugin.plan.groups import SET_ASIDE
from deviceplugin.plan.view import FOR_ANNOTATED, RESERVED
from mpsd.config.model import (
    AwayPolicy,
    Enforcement,
    ShortfallPolicy,
    TrustPolicy,
)
from mpsd.gpu.model import Mode
from mpsd.localapi.snapshot import GpuClient, LimitReading
from mpsd.shares.groups import set_name
from tests.builders import CANNOT, HOOKED_KIND, config, fixed, resource, told, uuid
from tests.unit.deviceplugin.annotated.frontendnode import (
    GIB,
    NEW,
    OLD,
    PREFIX,
    SCOPE,
    Node,
    annotated,
    container,
    env_of,
    held_share,
    keys,
    made_by,
    pod,
)
from tests.world import SHARE

# -- creating


def test_a_container_without_memory_keys_is_left_alone(node: Node) -> None:
    reservation = pod({f"{PREFIX}resource-reservation.gpu-compute.mode": "sm-sharing"})
    for one, other in ((pod({}), container()), (reservation, container("resource-reservation"))):
        assert node.create(one, other) == Adjustment()
    assert node.holds_nothing()
    assert node.said.events == []


def test_an_annotated_container_gets_its_cdi_devices_and_our_environment(node: Node) -> None:
    made = node.create(pod(keys(request="4Gi", limit="8Gi", mode="sm-sharing")), container())
    (allocation,) = node.broker.allocations()
    assert made.cdi_devices == (f"{HOOKED_KIND}={uuid(0)}", f"gpufrac.dev/allocation=s{allocation.key}")
    env = env_of(made)
    assert env["GPUFRAC_ALLOCATION"] == allocation.key
    assert env["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(8 * GIB)
    assert (env["NVIDIA_GPU_MEMORY_REQUEST"], env["NVIDIA_GPU_MEMORY_LIMIT"]) == ("4096", "8192")
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert set(made.removed_env) == set(env)
    assert made.mounts == ()
    assert allocation.container == reference(pod({}), container())
    assert (allocation.request_bytes, allocation.limit_bytes, allocation.mode) == (4 * GIB, 8 * GIB, Mode.SM_SHARING)
    assert allocation.key in node.specs.files


def test_a_runtime_that_takes_no_cdi_devices_gets_plain_edits(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated()), OLD)
    made = node.create(pod(keys(limit="8Gi", mode="sm-sharing")), container())
    assert made.cdi_devices == ()
    assert env_of(made)["NVIDIA_VISIBLE_DEVICES"] == uuid(0)
    (mount,) = made.mounts
    assert mount.destination == env_of(made)["CUDA_MPS_PIPE_DIRECTORY"]
    assert mount.options == ("rbind", "ro", "nosuid", "nodev")


def test_a_variable_that_stands_twice_is_refused_where_it_cant_be_overridden(tmp_path: Path) -> None:
    twice = container("main", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=a", "X=1", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=b")
    old = Node(tmp_path / "old", config(annotations=annotated()), OLD)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT twice" in old.refusal(
        lambda: old.create(pod(keys(limit="8Gi", mode="sm-sharing")), twice)
    )
    new = Node(tmp_path / "new", config(annotations=annotated()))
    assert new.create(pod(keys(limit="8Gi", mode="sm-sharing")), twice).cdi_devices


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (keys(request="4GiB"), ['"4GiB"', 'did you mean "4Gi"']),
        (keys(limit="1M"), ["at least 1Mi"]),
        (keys(request="8Gi", limit="4Gi"), ["must be at most the limit"]),
        (keys(limit="4Gi", mode="SM-Sharing"), ['did you mean "sm-sharing"']),
        (keys(limit="4Gi", mode=""), ["time-slicing or sm-sharing"]),
        (keys(limit="4Gi", portion="50%"), ["greater than 0 and at most 1"]),
        (keys(limit="4Gi", devices=""), ["it names no GPU", "gpus.devices is missing"]),
        (keys(limit="4Gi", devices="GPU-nope"), ["is not on this node", uuid(1)]),
        (keys(limit="4Gi", devices="GPU-nope,"), ["one of the names is empty"]),
        (keys(limit="4Gi", devices="none"), ["is no GPU"]),
        (keys(limit="4Gi", devices="9"), ["is not on this node"]),
        (keys(limit="90Gi"), ["its request of 90Gi is above the 79Gi usable on GPU 0"]),
        (keys(request="1Gi", limit="80Gi"), ["its limit of 80Gi is above the 79Gi usable"]),
    ],
)
def test_what_is_refused_says_why_and_leaves_nothing(node: Node, annotations: dict[str, str], words: list[str]) -> None:
    text = node.refusal(lambda: node.create(pod(annotations), container()))
    assert text.startswith("gpufrac: container 'main' of pod ns/p: ")
    for word in words:
        assert word in text
    assert node.holds_nothing()
    assert node.frontend.report.refusing[0].reason.message in text
    assert node.said.events == [("ns/p", "GpuShareRefused", f"main: {node.frontend.report.refusing[0].reason.message}")]


def test_on_an_older_driver_sm_sharing_is_served_and_time_slicing_and_burst_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated()), hard=False)
    assert "time-slicing (the default)" in node.refusal(lambda: node.create(pod(keys(limit="4Gi")), container()))
    burst = pod(keys(request="1Gi", limit="4Gi", mode="sm-sharing"))
    assert "needs hard enforcement" in node.refusal(lambda: node.create(burst, container()))
    made = node.create(pod(keys(limit="4Gi", mode="sm-sharing", portion="0.29")), container())
    assert env_of(made)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    assert env_of(made)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "28"
    assert node.broker.allocations()[0].enforcement is Enforcement.COOPERATIVE


@pytest.mark.parametrize("mode", ["time-slicing", "sm-sharing"])
@pytest.mark.parametrize("devices", ["0,1", f"{uuid(1)},{uuid(0)}", f"{HOOKED_KIND}={uuid(0)},nvidia.com/gpu=1", "all"])
def test_any_gpus_may_be_named_and_get_one_daemon(node: Node, mode: str, devices: str) -> None:
    made = node.create(pod(keys(request="4Gi", limit="8Gi", mode=mode, devices=devices)), container())
    (allocation,) = node.broker.allocations()
    assert (allocation.group, set(allocation.gpus)) == (set_name((uuid(0), uuid(1))), {uuid(0), uuid(1)})
    assert len(made.cdi_devices) == 3
    assert env_of(made)["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert env_of(made)["NVIDIA_GPU_MEMORY_REQUEST"] == "4096"
    node.create(pod(keys(request="1Gi", limit="70Gi", mode=mode), "q"), container())
    assert len(node.broker.allocations()) == 2, "one on a GPU of these uses the same daemon"


def test_a_declared_group_serves_both_modes(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(), groups=(("pair0", (1, 0)),)))
    node.create(pod(keys(request="4Gi", limit="8Gi", mode="sm-sharing", devices="0,1")), container())
    assert node.broker.allocations()[0].group == "pair0"
    alone = pod(keys(limit="4Gi", mode="sm-sharing"), "q")
    text = node.refusal(lambda: node.create(alone, container()))
    assert "GPU 0 is only a part of group pair0 (GPU 1, 0)" in text
    assert "not one group" not in text


def test_annotated_containers_and_shares_never_get_more_than_there_is(node: Node) -> None:
    node.create(pod(keys(request="70Gi", mode="sm-sharing")), container())
    node.grant()
    more = pod(keys(request="2Gi", mode="sm-sharing"), "q")
    text = node.refusal(lambda: node.create(more, container()))
    assert "it asks for 2Gi on GPU 0" in text
    assert "1Gi of 79Gi usable is free" in text
    sliced = pod(keys(request="1Gi"), "q")
    assert "one compute mode" in node.refusal(lambda: node.create(sliced, container()))


def generous(tmp_path: Path) -> Node:
    return Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated(shortfall=ShortfallPolicy.REDUCE)))


def test_two_halves_of_all_memory_fit_though_some_of_it_is_kept_back(tmp_path: Path) -> None:
    node = generous(tmp_path)
    node.create(pod(keys(request="40Gi")), container())
    made = node.create(pod(keys(request="40Gi"), "q"), container())
    first, second = node.broker.allocations()
    assert (first.request_bytes, second.request_bytes, second.limit_bytes) == (40 * GIB, 39 * GIB, 39 * GIB)
    assert env_of(made)["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(39 * GIB)
    (text,) = [message for _, reason, message in node.said.events if reason == "GpuShareReduced"]
    assert "it gets 39Gi of the 40Gi it asks for" in text
    assert node.picture().allocations[1].reduced in text
    node.create(pod(keys(request="40Gi"), "q"), container())
    assert node.broker.allocations() == [first, second]
    assert "1Mi" in node.refusal(lambda: node.create(pod(keys(request="1Mi"), "r"), container()))


def test_who_is_made_again_gets_all_it_asks_for_once_there_is_room(tmp_path: Path) -> None:
    node = generous(tmp_path)
    first = pod(keys(request="40Gi"))
    node.create(first, container())
    node.create(pod(keys(request="40Gi"), "q"), container())
    node.frontend.stop_pod(first)
    node.pass_time(GONE_S + 5)
    node.create(pod(keys(request="40Gi"), "q"), container())
    assert [a.request_bytes for a in node.broker.allocations()] == [40 * GIB]


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (keys(request="80Gi"), (79, 79)),
        (keys(request="10Gi", limit="80Gi"), (10, 79)),
        (keys(request="10Gi", limit="81Gi"), None),
        (keys(request="81Gi"), None),
    ],
)
def test_a_request_for_a_whole_gpu_is_one_for_what_there_is_and_more_is_refused(
    tmp_path: Path, asked: dict[str, str], got: tuple[int, int] | None
) -> None:
    node = generous(tmp_path)
    if got is None:
        assert "usable on GPU 0" in node.refusal(lambda: node.create(pod(asked), container()))
        return
    node.create(pod(asked), container())
    (allocation,) = node.broker.allocations()
    assert (allocation.request_bytes, allocation.limit_bytes) == (got[0] * GIB, got[1] * GIB)


def test_shares_of_resources_are_no_memory_that_is_kept_back(tmp_path: Path) -> None:
    node = generous(tmp_path)
    node.grant()
    text = node.refusal(lambda: node.create(pod(keys(request="73Gi", mode="sm-sharing")), container()))
    assert "71Gi of 79Gi usable is free" in text
    node.create(pod(keys(request="72Gi", mode="sm-sharing")), container())
    assert node.broker.allocations()[1].request_bytes == 71 * GIB


def test_gpus_set_aside_are_for_annotated_pods_only_and_the_others_for_resources(tmp_path: Path) -> None:
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated(gpus=(1,), share=False)))
    node.broker.publish()
    published = node.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    assert {d.id.partition("::")[0] for d in published.advertisement.devices} == {uuid(0)}
    assert str(dict(published.advertisement.group_reasons)[uuid(1)]).startswith(
        "its GPUs are set aside for annotated pods"
    )
    assert "`annotations.gpus`" in node.refusal(lambda: node.create(pod(keys(limit="1Gi")), container()))
    node.create(pod(keys(limit="1Gi", devices="1")), container())


@pytest.mark.parametrize("held", ["reserved", "set aside", "shared"])
def test_why_resources_take_nothing_on_a_gpu_of_annotated_pods_is_shown(tmp_path: Path, held: str) -> None:
    changes = annotated(gpus=(1,), share=held != "set aside")
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=changes))
    if held == "reserved":
        reserve(node, 1)
        node.observe()
    node.broker.publish()
    picture = node.picture()
    said = {"reserved": RESERVED.message, "set aside": FOR_ANNOTATED.message, "shared": ""}[held]
    assert [(gpu.kept, gpu.reason) for gpu in picture.gpus] == [("", ""), (said, "")]
    (row,) = picture.resources
    index = {gpu.uuid: gpu.index for gpu in picture.gpus}
    assert missing_shares(row, index) == (f"GPU 1: {RESERVED}" if held == "reserved" else "")
    assert not any("annotated" in line for line in told(None, picture)), "it is as it should be"


def test_a_node_without_resources_has_nothing_to_say_of_them(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(share=False)))
    assert [gpu.kept for gpu in node.picture().gpus] == ["", ""]


def test_what_is_set_aside_is_named(tmp_path: Path) -> None:
    cfg = config(resource("a", fixed(8)), resource("b", fixed(90)), annotations=annotated(gpus=(0, 1), share=False))
    view = Node(tmp_path / "all", cfg).broker.inspect().view
    assert {resource.objection for resource in view.resources.values()} == {SET_ASIDE}
    some = structs.replace(cfg, annotations=annotated(gpus=(0,), share=False))
    view = Node(tmp_path / "some", some).broker.inspect().view
    assert view.resources["gpufrac.dev/a"].objection is None
    assert "usable" in str(view.resources["gpufrac.dev/b"].objection), "what is wrong with the GPUs it could have"


@pytest.mark.parametrize("devices", ["0", "1"])
def test_a_part_of_a_group_that_is_not_shared_is_refused(tmp_path: Path, devices: str) -> None:
    node = Node(tmp_path, config(annotations=annotated(), groups=(("pair0", (1, 0)),)))
    asks = pod(keys(limit="4Gi", mode="sm-sharing", devices=devices))
    text = node.refusal(lambda: node.create(asks, container()))
    assert f"GPU {devices} is only a part of group pair0 (GPU 1, 0)" in text
    assert "`members: shared`" in text


@pytest.mark.parametrize("groups", [(("a0", (0,)), ("b0", (1,))), (("b0", (1,)),), ()])
def test_whole_groups_are_joined(tmp_path: Path, groups: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    node = Node(tmp_path, config(annotations=annotated(), groups=groups))
    node.create(pod(keys(limit="4Gi", mode="sm-sharing", devices="0,1")), container())
    assert node.broker.allocations()[0].group == set_name((uuid(0), uuid(1)))


def test_a_level_below_the_least_is_told_in_english(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(enforcement=Enforcement.HARD)), hard=False)
    for mode, given in (("sm-sharing", "cooperative ones"), ("time-slicing", "none")):
        asks = pod(keys(limit="4Gi", mode=mode))
        text = node.refusal(partial(node.create, asks, container()))
        assert f"demands hard limits, and it gives {given}: " in text


def test_a_container_that_may_not_start_yet_is_refused_and_keeps_its_place(node: Node) -> None:
    node.attaches = False
    text = node.refusal(lambda: node.create(pod(keys(limit="4Gi", mode="sm-sharing")), container()))
    assert "granted, but may not start yet: its GPU is not in sm-sharing yet" in text
    (waiting,) = node.broker.allocations()
    node.attaches = True
    node.create(pod(keys(limit="4Gi", mode="sm-sharing")), container())
    assert node.broker.allocations() == [waiting]


def test_a_container_made_again_keeps_what_it_has_and_a_new_sandbox_may_ask_for_less(node: Node) -> None:
    node.create(pod(keys(limit="60Gi")), container())
    (first,) = node.broker.allocations()
    node.create(pod(keys(limit="60Gi")), container())
    assert node.broker.allocations() == [first]
    node.create(pod(keys(limit="20Gi"), sandbox="second"), container())
    (second,) = node.broker.allocations()
    assert (second.limit_bytes, second.key != first.key) == (20 * GIB, True)
    assert set(node.specs.files) == {second.key}
    text = node.refusal(lambda: node.create(pod(keys(limit="80Gi")), container()))
    assert "79Gi usable" in text
    assert node.broker.allocations() == [second], "what is refused takes nothing away"


def test_a_reload_keeps_a_pod_that_runs(node: Node) -> None:
    node.create(pod(keys(limit="60Gi")), container())
    node.broker.apply_config(config(annotations=annotated(gpus=(1,))))
    node.create(pod(keys(limit="60Gi")), container())
    assert "does not name it" in node.refusal(lambda: node.create(pod(keys(limit="1Gi"), "q"), container()))


# -- trust


def test_only_gpus_that_kai_reserved_are_believed(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    ask = pod(keys(limit="4Gi"))
    assert "no reservation pod in namespace kai-resource-reservation" in node.refusal(
        lambda: node.create(ask, container())
    )
    forged = ("ns", "gpu-reservation-0123456789abcdef", "c")
    node.kubelet.containers[forged] = {"nvidia.com/gpu": (uuid(0),)}
    assert "no reservation pod" in node.refusal(lambda: node.create(ask, container()))
    del node.kubelet.containers[forged]
    real = ("kai-resource-reservation", "gpu-reservation-0123456789abcdef", "resource-reservation")
    node.kubelet.containers[real] = {"nvidia.com/gpu": (uuid(0),)}
    node.now_s += FRESH_S
    node.create(ask, container())  # the reservation is younger than the last look
    assert "no reservation pod" in node.refusal(
        lambda: node.create(pod(keys(limit="1Gi", devices="1"), "q"), container())
    )


def test_a_gpu_that_is_reserved_takes_nothing_new_of_resources_though_it_is_shared(tmp_path: Path) -> None:
    """Or a share could bind it to the other mode before the pod it is reserved for is made."""
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    share = node.grant()
    node.run(share)
    real = ("kai-resource-reservation", "gpu-reservation-0123456789abcdef", "resource-reservation")
    node.kubelet.containers[real] = {"nvidia.com/gpu": (uuid(0),)}
    node.keeper.observe()
    node.broker.publish()
    published = node.broker.wait_list("gpufrac.dev/a", -1, 0, lambda: False)
    assert published is not None
    assert {d.id for d in published.advertisement.devices if d.healthy and d.id.startswith(uuid(0))} == {SHARE}
    refused = node.broker.allocate("gpufrac.dev/a", [f"{uuid(0)}::1"])
    assert isinstance(refused, Refusal)
    assert "reservation pod holds it for annotated pods" in refused.message
    node.create(pod(keys(limit="4Gi", mode="sm-sharing")), container())


def test_a_gpu_that_another_pod_holds_whole_is_refused_whatever_the_reservation(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated()))
    node.kubelet.containers["ns", "whole", "c"] = {"nvidia.com/gpu": (uuid(0),)}
    node.keeper.observe()
    assert "pod ns/whole holds it" in node.refusal(lambda: node.create(pod(keys(limit="4Gi")), container()))


def reserve(node: Node, gpu: int) -> None:
    real = ("kai-resource-reservation", f"gpu-reservation-000000000000000{gpu}", "resource-reservation")
    node.kubelet.containers[real] = {"nvidia.com/gpu": (uuid(gpu),)}
    node.keeper.observe()


def test_who_was_believed_once_is_not_believed_of_other_gpus(tmp_path: Path) -> None:
    """Its annotations were edited, and its sandbox made anew."""
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    reserve(node, 0)
    node.create(pod(keys(limit="4Gi")), container())
    node.kubelet.containers.clear()
    node.keeper.observe()
    node.create(pod(keys(limit="4Gi")), container())  # its reservation comes and goes, it stays
    edited = pod(keys(limit="4Gi", devices="1"), sandbox="second")
    assert "no reservation pod" in node.refusal(lambda: node.create(edited, container()))
    assert node.broker.allocations()[0].gpus == (uuid(0),)


def test_who_started_while_we_were_away_is_not_believed_for_that(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    ask, _ = away(node)
    assert not node.broker.allocations(), "or it would keep others from the GPUs it claims"
    assert "no reservation pod" in node.frontend.report.unenforced[0].reason.message
    assert "no reservation pod" in node.refusal(lambda: node.create(ask, container()))


def test_a_tenant_that_is_refused_again_and_again_voids_nobodys_grace(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.KAI_RESERVATION)))
    reserve(node, 0)
    gone = pod(keys(limit="4Gi"))
    node.create(gone, container())
    node.frontend.stop_pod(gone)
    node.refusal(lambda: node.create(pod(keys(limit="4Gi", devices="1"), "q"), container()))
    assert len(node.broker.allocations()) == 1


def test_only_namespaces_that_are_named_are_believed(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(trust=TrustPolicy.NAMESPACES, namespaces=("team-a",))))
    assert '"ns" are not believed' in node.refusal(lambda: node.create(pod(keys(limit="4Gi")), container()))
    node.create(pod(keys(limit="4Gi"), namespace="team-a"), container())


# -- starting


def test_a_start_puts_the_limit_on_the_cgroup_and_reads_it_back(node: Node) -> None:
    directory = node.cgroup(SCOPE, uuid(0))
    ask = pod(keys(request="4Gi", limit="8Gi"))
    node.frontend.start_container(ask, made_by(node.create(ask, container())))
    assert node.mpsd.set_calls == [(uuid(0), directory, 4 * GIB, 8 * GIB)]


@pytest.mark.parametrize("trouble", ["down", "refuses", "other"])
def test_a_limit_that_cant_be_put_in_force_keeps_the_program_from_starting(node: Node, trouble: str) -> None:
    node.cgroup(SCOPE, uuid(0))
    ask = pod(keys(limit="8Gi"))
    made = made_by(node.create(ask, container()))
    if trouble == "down":
        node.mpsd.down = True
    elif trouble == "refuses":
        node.mpsd.refuses = "Insufficient Permissions"
    else:
        node.mpsd.set_limits = lambda *_: LimitReading(hard_bytes=9 * GIB)  # type: ignore[method-assign]
    text = node.refusal(lambda: node.frontend.start_container(ask, made))
    assert "its memory limit of 8Gi can't be put in force" in text


def test_a_container_made_while_we_were_away_is_not_started(node: Node) -> None:
    ask = pod(keys(limit="8Gi"))
    text = node.refusal(lambda: node.frontend.start_container(ask, container()))
    assert "created while gpufrac was not there" in text
    node.frontend.start_container(pod({}), container())


def test_a_cgroup_that_is_not_understood_keeps_the_program_from_starting(node: Node) -> None:
    ask = pod(keys(limit="8Gi"))
    made = node.create(ask, container())
    for path in ("", "a:b", "/../../etc", "no-slice:x:y"):
        one = made_by(made, cgroups_path=path)
        assert "names no cgroup" in node.refusal(lambda one=one: node.frontend.start_container(ask, one))  # type: ignore[misc]
    assert node.mpsd.set_calls == []


@pytest.mark.parametrize("env", [(), ("GPUFRAC_ALLOCATION=0123456789abcdef0123",)])
def test_a_container_that_lacks_what_we_gave_it_is_not_started(node: Node, env: tuple[str, ...]) -> None:
    ask = pod(keys(limit="8Gi"))
    node.create(ask, container())
    text = node.refusal(lambda: node.frontend.start_container(ask, container("main", *env)))
    assert "created without what gpufrac gave it" in text


def test_where_a_start_cant_be_refused_a_hard_limit_needs_the_toolkits_hook(tmp_path: Path) -> None:
    crio = Runtime(name="cri-o", version="1.34.0")
    node = Node(tmp_path, config(annotations=annotated()), crio)
    assert node.create(pod(keys(limit="8Gi")), container()).cdi_devices[0].startswith(HOOKED_KIND)
    node.broker.set_gpu_kind("nvidia.com/gpu", {}, frozenset())
    text = node.refusal(lambda: node.create(pod(keys(limit="8Gi"), "q"), container()))
    assert "has no hook `apply-cuda-memory-limits`" in text


def test_where_neither_we_nor_the_hook_can_set_a_limit_none_is_granted(tmp_path: Path) -> None:
    """CRI-O that takes no CDI devices from plugins: what MPS gives is left."""
    node = Node(tmp_path, config(annotations=annotated()), Runtime(name="cri-o", version="1.33.0"))
    text = node.refusal(lambda: node.create(pod(keys(limit="8Gi")), container()))
    assert "takes no CDI devices from NRI plugins: upgrade it" in text
    assert "or set gpu-compute.mode to sm-sharing" in text
    assert node.holds_nothing(), "it would wait for ever"
    node.create(pod(keys(limit="8Gi", mode="sm-sharing")), container())
    assert [a.enforcement for a in node.broker.allocations()] == [Enforcement.COOPERATIVE]


def test_a_plan_that_outlived_its_hard_limit_starts_as_what_is_left_of_it(node: Node) -> None:
    ask = pod(keys(limit="8Gi", mode="sm-sharing"))
    node.create(ask, container())
    node.hard_limits = CANNOT
    node.tell()
    node.frontend.start_container(ask, made_by(node.create(ask, container())))
    assert node.mpsd.set_calls == []


def test_a_runtime_with_less_patience_is_answered_sooner(tmp_path: Path) -> None:
    hasty = Runtime(name="containerd", version="2.1.9", request_timeout_s=0.5)
    node = Node(tmp_path, config(annotations=annotated()), hasty)
    waits: list[float] = []
    node.wait_attached = lambda key, timeout_s: waits.append(timeout_s)  # type: ignore[method-assign]
    node.refusal(lambda: node.create(pod(keys(limit="8Gi")), container()))
    assert waits[0] < 0.5 / 2


def test_a_container_is_refused_until_it_starts(node: Node) -> None:
    node.cgroup(SCOPE, uuid(0))
    ask = pod(keys(limit="8Gi"))
    node.mpsd.refuses = "Insufficient Permissions"
    for n in range(1, 4):
        made = made_by(node.create(ask, container()))
        node.refusal(lambda made=made: node.frontend.start_container(ask, made))  # type: ignore[misc]
        assert [one.count for one in node.frontend.report.refusing] == [n]
    assert node.frontend.report.granted == 0
    node.mpsd.refuses = ""
    node.frontend.start_container(ask, made_by(node.create(ask, container())))
    assert (node.frontend.report.refusing, node.frontend.report.granted) == ((), 1)


def test_schedulers_hear_of_the_runtime_at_once(node: Node) -> None:
    before = node.said.changes
    node.frontend.disconnected("it went away")
    node.frontend.connected(NEW)
    node.frontend.synchronize((), ())
    assert node.said.changes == before + 2


def test_two_records_of_one_container_are_one_after_a_crash_between_them(node: Node) -> None:
    node.create(pod(keys(limit="60Gi")), container())
    (first,) = node.broker.allocations()
    node.create(pod(keys(limit="20Gi"), sandbox="second"), container())
    (second,) = node.broker.allocations()
    node.ledger.put(first)
    node.restart()
    assert node.broker.allocations() == [second]
    assert len(node.ledger.load()[0]) == 1


# -- shares of the device plugin


OLD_CRIO = Runtime(name="cri-o", version="1.32.1")


def test_where_a_pod_beats_its_cdi_device_a_share_is_delivered_over_nri(tmp_path: Path) -> None:
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()), OLD_CRIO, hard=False)
    share = held_share(node)
    own = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=70G", "GPUFRAC_ALLOCATION=0123456789abcdef0123", "HOME=/root")
    asked = container("main", *own, annotations={render.KIND: share.key})
    assert node.frontend.concerns(pod({}), asked)
    made = node.create(pod({}), asked)
    assert env_of(made)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    assert env_of(made)["GPUFRAC_ALLOCATION"] == share.key
    assert set(made.removed_env) == set(env_of(made))
    assert (made.cdi_devices, made.mounts) == ((), ())
    stranger = container("main", f"GPUFRAC_ALLOCATION={share.key}")
    assert node.create(pod({}, "other"), stranger) == Adjustment(), "any pod can set our marker"
    unknown = container("main", annotations={render.KIND: share.key})
    assert "can't be told yet" in node.refusal(lambda: node.create(pod({}, "other"), unknown))
    plain = container("main", "HOME=/root")
    assert not node.frontend.concerns(pod({}), plain)


def test_a_share_younger_than_the_last_look_is_looked_for_anew(tmp_path: Path) -> None:
    """However young that look is: it can't know whose the share is."""
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()), OLD_CRIO, hard=False)
    node.keeper.observe()
    share = node.grant()
    node.run(share, "p", "main")
    made = node.create(pod({}), container("main", annotations={render.KIND: share.key}))
    assert env_of(made)["GPUFRAC_ALLOCATION"] == share.key


def test_a_share_that_was_refused_and_started_is_refused_no_longer(tmp_path: Path) -> None:
    """At its first creation the kubelet may not show yet whose the share is."""
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()), OLD_CRIO, hard=False)
    share = held_share(node)
    asked = container("main", annotations={render.KIND: share.key})
    assert "can't be told yet" in node.refusal(lambda: node.create(pod({}, "other"), asked))
    assert [one.count for one in node.frontend.report.refusing] == [1]
    node.frontend.start_container(pod({}, "other"), asked)
    assert (node.frontend.report.refusing, node.frontend.report.granted) == ((), 0)


@pytest.mark.parametrize(
    ("handler", "users", "words"),
    [("kata", False, "runs in a sandbox"), ("", True, "hostUsers"), ("nvidia", False, "")],
)
def test_who_is_kept_from_the_host_is_refused_where_a_limit_is_demanded(
    tmp_path: Path, handler: str, users: bool, words: str
) -> None:
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()), hard=False)
    share = held_share(node)
    apart = structs.replace(pod({}), runtime_handler=handler)
    asked = container("main", annotations={render.KIND: share.key}, user_namespace=users)
    assert node.frontend.concerns(apart, asked) is bool(words)
    other = structs.replace(pod(keys(limit="8Gi", mode="sm-sharing"), "q"), runtime_handler=handler)
    if words:
        assert words in node.refusal(lambda: node.create(apart, asked))
        assert words in node.refusal(lambda: node.create(other, container(user_namespace=users)))
    else:
        assert node.create(apart, asked) == Adjustment()
        node.create(other, container(user_namespace=users))


def test_who_is_kept_from_the_host_gets_what_is_left_where_that_is_accepted(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated(enforcement=Enforcement.NONE)))
    apart = structs.replace(pod(keys(limit="8Gi", mode="sm-sharing")), runtime_handler="kata")
    made = node.create(apart, container())
    assert env_of(made)["GPUFRAC_ENFORCEMENT"] == "none"
    assert [a.enforcement for a in node.broker.allocations()] == [Enforcement.NONE]


def test_a_hard_limit_holds_in_a_user_namespace(node: Node) -> None:
    made = node.create(pod(keys(limit="8Gi")), container(user_namespace=True))
    assert env_of(made)["GPUFRAC_ENFORCEMENT"] == "hard"


def test_where_a_cdi_device_wins_a_share_needs_nothing_over_nri(node: Node) -> None:
    share = held_share(node)
    asked = container("main", annotations={render.KIND: share.key})
    assert not node.frontend.concerns(pod({}), asked)
    assert node.create(pod({}), asked) == Adjustment()


def test_annotations_lower_the_limit_of_a_share_for_as_long_as_it_lives(node: Node) -> None:
    share = held_share(node)
    ask = pod(keys(limit="4Gi", devices=""))
    made = node.create(ask, container("main", f"GPUFRAC_ALLOCATION={share.key}"))
    assert env_of(made)["GPUFRAC_MEMORY_LIMIT_BYTES"] == str(4 * GIB)
    assert env_of(made)["NVIDIA_GPU_MEMORY_LIMIT"] == "4096"
    (lowered,) = node.broker.allocations()
    assert (lowered.key, lowered.limit_bytes, lowered.request_bytes) == (share.key, 4 * GIB, 8 * GIB)
    assert "GPUFRAC_MEMORY_LIMIT_BYTES=" + str(4 * GIB) in node.specs.files[share.key].devices[0].container_edits.env
    directory = node.cgroup(SCOPE, uuid(0))
    node.frontend.start_container(ask, made_by(made))
    assert node.mpsd.set_calls == [(uuid(0), directory, 4 * GIB, 4 * GIB)]
    node.restart()
    assert node.broker.allocations()[0].limit_bytes == 4 * GIB
    again = node.broker.allocate(share.resource, [SHARE], node.keeper.recheck)
    assert again == lowered, "another container of the pod on the same share"


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        (keys(limit="9Gi", devices=""), "may only lower"),
        (keys(request="4Gi", limit="8193Mi", devices=""), "may only lower"),
        (keys(limit="4Gi", devices="1"), "they name other GPUs"),
        (keys(limit="4Gi", mode="time-slicing", devices=""), "the share is sm-sharing"),
    ],
)
def test_annotations_do_nothing_else_to_a_share(node: Node, annotations: dict[str, str], words: str) -> None:
    share = held_share(node)
    made = container("main", f"GPUFRAC_ALLOCATION={share.key}")
    assert words in node.refusal(lambda: node.create(pod(annotations), made))
    assert node.broker.allocations() == [share]


def test_who_claims_another_pods_share_gets_no_hand_on_it(node: Node) -> None:
    share = held_share(node)
    claim = container("main", f"GPUFRAC_ALLOCATION={share.key}")
    made = node.create(pod(keys(limit="1Gi", mode="sm-sharing"), "thief"), claim)
    assert env_of(made)["GPUFRAC_ALLOCATION"] != share.key
    assert node.broker.allocations()[0] == share


# -- ends


def test_memory_comes_back_when_the_sandbox_is_stopped_and_no_process_lives(node: Node) -> None:
    ask = pod(keys(limit="79Gi"))
    node.frontend.run_pod(ask)
    node.create(ask, container())
    node.frontend.remove_container(ask, container())
    (allocation,) = node.broker.allocations()
    node.pass_time(GONE_S + 5)
    assert node.broker.allocations() == [allocation], "between two containers of a pod its place is kept"
    node.frontend.stop_pod(ask)
    node.mpsd.on_gpu[uuid(0)] = (GpuClient(pid=9, allocation_key=allocation.key, pod_uid="uid-p"),)
    node.pass_time(GONE_S + 5)
    assert node.broker.allocations() == [allocation]
    assert "pid 9 still uses the GPU" in node.picture().allocations[0].reason
    node.mpsd.on_gpu.clear()
    node.create(pod(keys(limit="79Gi"), "q"), container())  # who is waiting needs no patience
    assert [a.container.pod for a in node.broker.allocations() if a.container] == ["q"]


def test_a_pod_whose_sandbox_is_made_anew_keeps_its_place(node: Node) -> None:
    ask = pod(keys(limit="79Gi"))
    node.create(ask, container())
    second = pod(keys(limit="79Gi"), sandbox="second")
    node.frontend.run_pod(second)
    node.frontend.stop_pod(ask)
    node.pass_time(GONE_S + 5)
    assert len(node.broker.allocations()) == 1
    node.frontend.stop_pod(second)
    node.pass_time(GONE_S + 5)
    assert node.holds_nothing()


def test_nothing_is_concluded_while_the_runtime_is_not_heard(node: Node) -> None:
    ask = pod(keys(limit="79Gi"))
    (node.root / "pods" / "uid-p").mkdir()
    node.create(ask, container())
    node.frontend.stop_pod(ask)
    node.frontend.disconnected("it went away")
    node.pass_time(GONE_S + 5)
    assert len(node.broker.allocations()) == 1, "its sandbox may have been made anew meanwhile"
    node.frontend.connected(NEW)
    node.frontend.synchronize([ask], [])
    node.pass_time(GONE_S + 5)
    assert len(node.broker.allocations()) == 1
    node.frontend.synchronize([pod(keys(limit="79Gi"), pid=0)], [])
    node.pass_time(GONE_S + 5)
    assert node.holds_nothing(), "a runtime shows stopped sandboxes, too, without a process"


def test_a_pod_without_a_directory_is_gone_though_the_runtime_is_not_heard(node: Node) -> None:
    (node.root / "pods" / "uid-p").mkdir()
    node.create(pod(keys(limit="79Gi")), container())
    node.frontend.disconnected("it went away")
    node.pass_time(GONE_S + 5)
    assert len(node.broker.allocations()) == 1
    (node.root / "pods" / "uid-p").rmdir()
    node.pass_time(GONE_S + 10)
    assert node.holds_nothing()


def test_a_restart_of_the_plugin_loses_nothing_and_books_nothing_twice(node: Node) -> None:
    ask = pod(keys(limit="50Gi"))
    made = node.create(ask, container())
    before = node.broker.allocations()
    node.restart()
    node.begin_frontend()
    running = container("main", *(f"{k}={v}" for k, v in made.env), state=ContainerState.RUNNING)
    node.frontend.synchronize([ask], [running])
    assert node.broker.allocations() == before
    assert node.frontend.report.unenforced == ()


# -- what started without us


def away(node: Node, *env: str, **changes: object) -> tuple[Pod, Container]:
    ask = pod(keys(limit="50Gi"))
    found = container("main", *env, state=ContainerState.RUNNING, pid=5, **changes)
    node.frontend.synchronize([ask], [found])
    return ask, found


def test_what_started_without_us_is_told_and_counted(node: Node) -> None:
    away(node)
    (one,) = node.frontend.report.unenforced
    assert one.reason.message == "it was started while gpufrac was not there, and runs without its limit"
    (allocation,) = node.broker.allocations()
    assert (allocation.enforcement, allocation.adopted) == (Enforcement.NONE, True)
    text = node.refusal(lambda: node.create(pod(keys(limit="40Gi"), "q"), container()))
    assert "29Gi of 79Gi usable is free" in text, "what it takes is not given to others"
    assert node.said.events[0][1] == "GpuLimitNotEnforced"
    away(node)
    assert len(node.frontend.report.unenforced) == 1
    assert [reason for _, reason, _ in node.said.events].count("GpuLimitNotEnforced") == 1, "told once"


def test_it_is_enforced_once_its_container_is_made_again(node: Node) -> None:
    ask, found = away(node)
    node.frontend.remove_container(ask, found)
    assert node.frontend.report.unenforced == ()
    node.create(ask, container())
    (allocation,) = node.broker.allocations()
    assert (allocation.enforcement, allocation.adopted) == (Enforcement.HARD, False)


def test_a_container_of_ours_without_a_record_is_taken_in_again(node: Node) -> None:
    key = "0123456789abcdef0123"
    limit = str(50 * GIB + 17)  # another version may have spelled it otherwise
    away(node, f"GPUFRAC_ALLOCATION={key}", f"GPUFRAC_MEMORY_LIMIT_BYTES={limit}", "GPUFRAC_COMPUTE_MODE=time-slicing")
    (allocation,) = node.broker.allocations()
    assert (allocation.key, allocation.enforcement) == (key, Enforcement.HARD)
    assert node.frontend.report.unenforced == ()


def test_a_marker_hides_nothing_that_runs_without_its_limit(tmp_path: Path) -> None:
    """Any pod can set it, and limit and mode beside."""
    node = Node(tmp_path, config(resource("a", fixed(8)), annotations=annotated()), hard=False)
    share = held_share(node)
    other = pod(keys(limit="4Gi", mode="sm-sharing"), "other")
    given = env_of(node.create(other, container()))
    other_container = container(
        "main",
        *(f"{k}={v}" for k, v in given.items()),
        id="other",
        pod_id="sandbox-other",
        state=ContainerState.RUNNING,
    )
    told = [f"GPUFRAC_MEMORY_LIMIT_BYTES={5 << 30}", "GPUFRAC_COMPUTE_MODE=sm-sharing"]
    keys_of_others = [share.key, given["GPUFRAC_ALLOCATION"], "0123456789abcdef0123"]
    for n, key in enumerate(keys_of_others):
        liar = pod(keys(limit="5Gi", mode="sm-sharing", devices="1"), f"liar{n}")
        lying = container(
            "main", f"GPUFRAC_ALLOCATION={key}", *told, id=f"l{n}", pod_id=liar.id, state=ContainerState.RUNNING
        )
        node.frontend.synchronize([other, liar], [other_container, lying])
        assert [one.container.pod for one in node.frontend.report.unenforced] == [f"liar{n}"], key
        (record,) = [a for a in node.broker.allocations() if a.container and a.container.pod == liar.name]
        assert (record.enforcement, record.key != key) == (Enforcement.NONE, True)
        node.frontend.synchronize([other, liar], [other_container, lying])
        assert len(node.frontend.report.unenforced) == 1


def test_a_container_of_ours_is_known_by_what_it_mounts(tmp_path: Path) -> None:
    node = Node(tmp_path, config(annotations=annotated()), hard=False)
    key = "0123456789abcdef0123"
    ask = pod(keys(limit="5Gi", mode="sm-sharing"))
    env = [f"GPUFRAC_ALLOCATION={key}", f"GPUFRAC_MEMORY_LIMIT_BYTES={5 << 30}", "GPUFRAC_COMPUTE_MODE=sm-sharing"]
    mount = Mount("/tmp/nvidia-mps", f"/run/gpufrac/mps/{uuid(0)}")
    node.frontend.synchronize([ask], [container("main", *env, mounts=(mount,), state=ContainerState.RUNNING)])
    assert node.frontend.report.unenforced == ()
    assert node.broker.allocations()[0].key == key


def test_a_container_with_other_values_than_its_annotations_is_reporter(node: Node) -> None:
    key = "0123456789abcdef0123"
    away(
        node, f"GPUFRAC_ALLOCATION={key}", f"GPUFRAC_MEMORY_LIMIT_BYTES={9 << 40}", "GPUFRAC_COMPUTE_MODE=time-slicing"
    )
    assert len(node.frontend.report.unenforced) == 1


def test_annotations_that_cant_be_used_are_told_too(node: Node) -> None:
    ask = pod(keys(limit="lots"))
    node.frontend.synchronize([ask], [container(state=ContainerState.RUNNING)])
    assert "its annotations can't be used" in node.frontend.report.unenforced[0].reason.message


def stopping(tmp_path: Path) -> Node:
    return Node(tmp_path, config(annotations=annotated(when_away=AwayPolicy.STOP)))


def test_by_default_nobody_is_stopped(node: Node) -> None:
    away(node)
    for _ in range(5):
        node.now_s += NOTICE_S
        node.frontend.tend()
    assert node.said.stopped == []
    assert "annotations.whenAway: stop" in node.frontend.report.unenforced[0].plan


@pytest.mark.parametrize("policy", AwayPolicy)
def test_what_to_do_is_said_at_once_where_it_is_known(tmp_path: Path, policy: AwayPolicy) -> None:
    node = Node(tmp_path, config(annotations=annotated(when_away=policy)))
    away(node)
    (one,) = node.frontend.report.unenforced
    assert (one.plan == TO_DO) is (policy is AwayPolicy.REPORT)
    assert "delete the pod" in TO_DO


@pytest.mark.parametrize(
    ("policy", "words"),
    [("Never", "restartPolicy Never"), ("OnFailure", "restartPolicy OnFailure"), (None, "without the Kubernetes API")],
)
def test_nobody_is_stopped_that_would_not_start_again(tmp_path: Path, policy: str | None, words: str) -> None:
    node = stopping(tmp_path)
    if policy:
        node.said.restart_policies["uid-p"] = policy
    away(node)
    for _ in range(5):
        node.now_s += NOTICE_S
        node.frontend.tend()
    assert node.said.stopped == []
    assert words in node.frontend.report.unenforced[0].plan


def test_one_at_a_time_is_stopped_after_notice(tmp_path: Path) -> None:
    node = stopping(tmp_path)
    node.said.restart_policies |= {"uid-p": "Always", "uid-q": "Always"}
    pods = [pod(keys(limit="5Gi")), pod(keys(limit="5Gi"), "q")]
    found = [
        container(state=ContainerState.RUNNING),
        container(id="id-q", pod_id="sandbox-q", state=ContainerState.RUNNING),
    ]
    node.frontend.synchronize(pods, found)
    node.frontend.tend()
    assert "will be stopped" in node.frontend.report.unenforced[0].plan
    assert any("will be stopped" in message for _, _, message in node.said.events)
    node.now_s += NOTICE_S / 2
    node.frontend.tend()
    assert node.said.stopped == []
    node.now_s += NOTICE_S
    node.frontend.tend()
    assert node.said.stopped == ["id-main"]
    node.frontend.tend()
    assert node.said.stopped == ["id-main"]
    assert [one.container_id for one in node.frontend.report.unenforced] == ["id-q"]
    node.now_s += STOP_EVERY_S
    node.frontend.tend()
    assert node.said.stopped == ["id-main", "id-q"]


def test_notice_is_given_before_a_stop_however_late_it_is_known_that_there_will_be_one(tmp_path: Path) -> None:
    node = stopping(tmp_path)
    away(node)
    for _ in range(3):
        node.now_s += NOTICE_S
        node.frontend.tend()
    node.said.restart_policies["uid-p"] = "Always"
    node.frontend.tend()
    assert node.said.stopped == []
    assert "will be stopped" in node.said.events[-1][2]
    away(node)  # the runtime was restarted: nothing of that begins anew
    node.now_s += NOTICE_S
    node.frontend.tend()
    assert node.said.stopped == ["id-main"]


def test_one_that_cant_be_stopped_is_tried_again_and_reporter(tmp_path: Path) -> None:
    node = stopping(tmp_path)
    node.said.restart_policies["uid-p"] = "Always"
    node.said.stop_error = "no such socket"
    away(node)
    for _ in range(4):
        node.frontend.tend()
        node.now_s += NOTICE_S
    assert node.said.stopped == ["id-main"] * 3
    assert "it can't be stopped: no such socket" in node.frontend.report.unenforced[0].plan


def test_one_that_ended_and_was_made_again_or_whose_pod_is_gone_is_told_no_more(node: Node) -> None:
    def told() -> int:
        return len(node.frontend.report.unenforced)

    ask, _ = away(node)
    node.create(ask, container(id="another"))
    assert told() == 0
    node.frontend.synchronize([ask], [container(state=ContainerState.RUNNING)])
    assert told() == 1
    node.frontend.stop_pod(ask)
    assert told() == 0


def test_an_upgrade_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = stopping(tmp_path)
    node.said.restart_policies["uid-p"] = "Always"
    ask = pod(keys(limit="50Gi"))
    made = node.create(ask, container())
    env = [f"{k}={v}" for k, v in made.env if not k.startswith("CUDA_MPS")]  # of a version that set less
    node.frontend.synchronize([ask], [container("main", *env, state=ContainerState.RUNNING)])
    monkeypatch.setattr(absence, "NOTICE_S", 0)
    node.frontend.tend()
    assert (node.said.stopped, node.frontend.report.unenforced) == ([], ())


# -- keys


def test_keys_without_effect_are_told_once_with_what_to_write(node: Node) -> None:
    odd = pod({f"{PREFIX}main.gpu-memory.limits": "4Gi"})
    node.frontend.run_pod(odd)
    node.frontend.run_pod(odd)
    (text,) = [message for _, reason, message in node.said.events if reason == "GpuAnnotationIgnored"]
    assert f"did you mean {PREFIX}main.gpu-memory.limit?" in text
    assert [pod for pod, _ in node.frontend.report.findings] == ["ns/p"]
    node.frontend.stop_pod(odd)
    assert node.frontend.report.findings == ()
