"""The stand-in for KAI: what its admission lets in, where a pod goes, what the binder writes."""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.annotated.contract import DEVICES, LIMIT, MODE, REQUEST
from deviceplugin.sim.objects.annotations import is_fractional
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec
from deviceplugin.sim.scheduling import admission, fractions
from deviceplugin.sim.scheduling.admission import DeniedError
from deviceplugin.sim.scheduling.fractions import Group, Node, Placement, Unschedulable

P = "nvidia.com/container."
KEY = f"{P}main"
PORTION = "kai.scheduler/container.main.gpu-memory.portion.limit"
GPUS = ("GPU-0", "GPU-1", "GPU-2")


def pod(annotations: Mapping[str, str], name: str = "p", containers: tuple[str, ...] = ("main",)) -> PodSpec:
    return PodSpec(name, tuple(map(ContainerSpec, containers)), annotations=annotations, scheduler="kai-scheduler")


def request(size: str, mode: str = "", count: str = "") -> PodSpec:
    keys = {f"{KEY}{REQUEST}": size, f"{KEY}{MODE}": mode, "gpu-fraction-num-devices": count}
    return pod({key: value for key, value in keys.items() if value})


def counter() -> Callable[[str], str]:
    numbers = itertools.count()
    return lambda gpu: f"group-{next(numbers)}"


class Cluster:
    """Places pods one after the other; all it knows is the pods."""

    def __init__(self, gpu_mib: int = 81920, gpus: tuple[str, ...] = GPUS, cdi: bool = False) -> None:
        self.gpu_mib, self.gpus, self.cdi = gpu_mib, gpus, cdi
        self.pods: list[PodSpec] = []
        self.new_group = counter()

    @property
    def node(self) -> Node:
        groups = fractions.groups_of(self.pods, Node("n", self.gpu_mib))
        kept = {group.gpu for group in groups}
        return Node("n", self.gpu_mib, tuple(gpu for gpu in self.gpus if gpu not in kept), groups)

    def schedule(self, asked: PodSpec) -> PodSpec | Unschedulable:
        node = self.node
        admitted = admission.admitted(asked)
        placement = fractions.place(admitted, node, self.new_group)
        if isinstance(placement, Unschedulable):
            return placement
        bound = fractions.bound(admitted, placement, node, cdi=self.cdi)
        if isinstance(bound, PodSpec):
            for group in placement.new:
                self.pods.append(fractions.reserving(fractions.reservation(group, "n"), group.gpu))
            self.pods.append(bound)
        return bound

    def bind(self, asked: PodSpec) -> dict[str, str]:
        bound = self.schedule(asked)
        assert isinstance(bound, PodSpec), bound
        return dict(bound.annotations)

    def delete(self, name: str) -> None:
        self.pods = [p for p in self.pods if p.name != name]
        gone = fractions.vacated(self.pods)
        self.pods = [p for p in self.pods if p not in gone]


# --- admission


def test_the_limits_of_a_whole_pod_become_keys_of_its_container() -> None:
    found = admission.admitted(pod({"gpu-memory": "4096", "gpu-memory.limit": "8Gi"})).annotations
    assert (found[f"{KEY}{REQUEST}"], found[f"{KEY}{LIMIT}"]) == ("4096Mi", "8Gi")
    found = admission.admitted(pod({"gpu-fraction": "0.5", "gpu-fraction.limit": "0.75"})).annotations
    assert found[PORTION] == "0.75"
    assert f"{KEY}{REQUEST}" not in found, "the size of a GPU is not known yet"


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        (
            {"gpu-memory": "4096", f"{KEY}{REQUEST}": "4Gi"},
            f"gpu-memory annotation conflicts with {KEY}{REQUEST} annotation",
        ),
        ({"gpu-fraction.limit": "0.5"}, "can only be used together with"),
        ({"gpu-fraction": "0.5", "gpu-fraction.limit": "0.123456"}, "at most 5 digits after the decimal point"),
        ({"gpu-fraction": "0.5", "gpu-fraction.limit": "1"}, "must be a positive number smaller than 1.0. Got 1"),
        ({"gpu-fraction": "0.5", "gpu-fraction.limit": "0.5"}, "must be greater than gpu-fraction annotation value"),
        ({"gpu-memory.limit": "1Gi"}, "can only be used together with"),
        ({"gpu-memory": "100", "gpu-memory.limit": "200"}, "must be a positive Kubernetes memory quantity with a unit"),
        (
            {"gpu-memory": "100", "gpu-memory.limit": "99Mi"},
            "must not be smaller than gpu-memory annotation value (100 MiB)",
        ),
        ({PORTION: "0.5"}, "can only be used together with"),
        (
            {"gpu-fraction": "0.1", PORTION.replace("main", "b"): "0.5"},
            "does not match the gpu-fraction target container",
        ),
        ({"gpu-fraction": "0.1", "gpu-fraction-num-devices": "0"}, "must be a positive integer greater than 0"),
        ({"gpu-fraction": "0.1", "gpu-fraction-num-devices": "1.5"}, "must be a positive integer greater than 0"),
        ({f"{KEY}{REQUEST}": "4GiB"}, "must be a valid Kubernetes memory quantity greater than 0"),
        ({f"{KEY}{REQUEST}": "0"}, "must be a valid Kubernetes memory quantity greater than 0"),
        ({"gpu-fraction": "1"}, "gpu-fraction annotation value must be a positive number smaller than 1.0"),
        ({"gpu-fraction": "NaN"}, "gpu-fraction annotation value must be a positive number smaller than 1.0"),
        ({"gpu-fraction": "-0.5"}, "gpu-fraction annotation value must be a positive number smaller than 1.0"),
        ({"gpu-memory": "4Gi"}, "gpu-memory annotation value must be a positive integer greater than 0"),
        ({"gpu-memory": "0"}, "gpu-memory annotation value must be a positive integer greater than 0"),
        ({"gpu-memory": "9" * 400}, "gpu-memory annotation value must be a positive integer greater than 0"),
        ({"gpu-fraction-num-devices": "2"}, "cannot request multiple fractional devices without specifying"),
        ({f"{P}no{REQUEST}": "1Gi"}, "container no not found in pod spec"),
        ({"gpu-fraction": "0.1", "gpu-fraction-container-name": "no"}, "container no not found in pod spec"),
        ({f"{KEY}{REQUEST}": "2Gi", f"{KEY}{LIMIT}": "1Gi"}, "request is greater than limit"),
        ({f"{KEY}{REQUEST}": "2Gi", f"{P}b{MODE}": "sm-sharing"}, "doesn't support multiple containers"),
        (
            {f"{KEY}{REQUEST}": "2Gi", "gpu-fraction-container-name": "b"},
            "annotation value b does not match container name main",
        ),
        ({f"{KEY}{LIMIT}": "2Gi", "gpu-fraction": "0.5"}, f"cannot combine {P} limit annotation with gpu-fraction"),
        ({"gpu-memory": "1024", f"{KEY}{LIMIT}": "2Gi"}, f"cannot combine {P} limit annotation with gpu-memory"),
        ({"gpu-fraction": "0.5", "gpu-memory": "1024"}, "cannot request both gpu-fraction and GPU memory request"),
        ({f"{KEY}{REQUEST}": "1Gi", f"{KEY}{MODE}": "mps"}, "invalid NvFractions compute mode: mps"),
        ({f"{KEY}.gpu-memory.limits": "1Gi"}, f"invalid NvFractions annotation key: {KEY}.gpu-memory.limits"),
        ({f"{KEY}{REQUEST}": "1Gi", f"{KEY}{DEVICES}": "0"}, f"{DEVICES} annotations may only be modified by system:"),
    ],
)
def test_what_admission_denies(annotations: dict[str, str], text: str) -> None:
    with pytest.raises(DeniedError) as caught:
        admission.admitted(pod(annotations, containers=("main", "b")))
    assert text in str(caught.value)


def test_whole_gpus_are_not_mixed_with_fractions() -> None:
    asked = PodSpec("p", (ContainerSpec("main", {"nvidia.com/gpu": 1}),), annotations={"gpu-fraction": "0.5"})
    with pytest.raises(DeniedError, match="cannot have both GPU fraction request and whole GPU"):
        admission.admitted(asked)


@pytest.mark.parametrize("value", ["0.5", ".5", "5e-1", "+0.5", "0.50000"])
def test_spellings_of_a_fraction(value: str) -> None:
    assert Cluster(2000).bind(pod({"gpu-fraction": value}))[f"{KEY}{REQUEST}"] == "1000Mi"


# --- binding


@pytest.mark.parametrize(
    ("gpu_mib", "annotations", "written"),
    [
        (2000, {"gpu-fraction": "0.5"}, {REQUEST: "1000Mi"}),
        (2000, {"gpu-fraction": "0.5", "gpu-fraction.limit": "0.8"}, {REQUEST: "1000Mi", LIMIT: "1600Mi"}),
        (24576, {"gpu-fraction": "0.5"}, {REQUEST: "12288Mi"}),
        (1000, {"gpu-fraction": "0.666"}, {REQUEST: "670Mi"}),
        (1000, {"gpu-fraction": "0.125"}, {REQUEST: "120Mi"}),
        (1000, {"gpu-fraction": "0.125", "gpu-fraction.limit": "0.12545"}, {REQUEST: "120Mi", LIMIT: "125Mi"}),
        (8000, {"gpu-memory": "4096"}, {REQUEST: "4096Mi"}),
        (8000, {f"{KEY}{REQUEST}": "4Gi", f"{KEY}{LIMIT}": "9Gi"}, {REQUEST: "4Gi", LIMIT: "9Gi"}),
        (8000, {f"{KEY}{LIMIT}": "4Gi"}, {LIMIT: "4Gi"}),
    ],
)
def test_what_the_binder_writes(gpu_mib: int, annotations: dict[str, str], written: dict[str, str]) -> None:
    found = Cluster(gpu_mib).bind(pod(annotations))
    assert {s: found[f"{KEY}{s}"] for s in (REQUEST, LIMIT) if f"{KEY}{s}" in found} == written
    assert (found[f"{KEY}{DEVICES}"], found["received-resource-type"]) == ("GPU-0", "Fraction")


def test_devices_by_cdi_name_and_labels_of_one_and_of_several() -> None:
    cluster = Cluster(cdi=True)
    one = cluster.schedule(pod({"gpu-fraction": "0.1"}, "a"))
    two = cluster.schedule(pod({"gpu-fraction": "0.1", "gpu-fraction-num-devices": "2"}, "b"))
    assert isinstance(one, PodSpec)
    assert isinstance(two, PodSpec)
    kind = "k8s.device-plugin.nvidia.com/gpu"
    assert one.annotations[f"{KEY}{DEVICES}"] == f"{kind}=GPU-0"
    assert two.annotations[f"{KEY}{DEVICES}"] == f"{kind}=GPU-0,{kind}=GPU-1"
    assert one.labels == {"runai-gpu-group": "group-0"}
    assert two.labels == {"runai-gpu-group/group-0": "group-0", "runai-gpu-group/group-1": "group-1"}


def test_a_portion_that_rounds_to_nothing_is_not_bound() -> None:
    cluster = Cluster()
    found = cluster.schedule(pod({"gpu-fraction": "0.004"}))
    assert isinstance(found, Unschedulable)
    assert (found.reason, found.message) == ("BindingError", "calculated gpu memory request is zero")
    assert cluster.pods == []


def test_a_reservation_pod() -> None:
    made = fractions.reservation(Group("g", "GPU-0", "sm-sharing"), "n")
    digest = hashlib.sha256(b"n/g").hexdigest()[:16]
    assert made.full_name == f"kai-resource-reservation/gpu-reservation-{digest}"
    assert made.labels == {"runai-gpu-group": "g", "app": "kai-resource-reservation"}
    assert made.containers[0].resources == {"nvidia.com/gpu": 1}
    assert made.annotations[f"{P}resource-reservation{MODE}"] == "sm-sharing"
    assert "run.ai/reserve_for_gpu_index" not in made.annotations, "it does not know its GPU before it runs"
    assert not is_fractional(made)
    assert fractions.is_reservation(made)


# --- placement


def test_the_fullest_gpu_of_the_same_mode_comes_first() -> None:
    cluster = Cluster(10_000)
    devices = [cluster.bind(replace(asked, name=f"p{i}"))[f"{KEY}{DEVICES}"] for i, asked in enumerate((
        request("3000Mi"), request("8000Mi"), request("2000Mi"), request("1000Mi", "sm-sharing"), request("5000Mi"),
        request("9000Mi", "sm-sharing"),
    ))]  # fmt: skip
    assert devices == ["GPU-0", "GPU-1", "GPU-1", "GPU-2", "GPU-0", "GPU-2"]
    found = cluster.schedule(request("2001Mi"))
    assert isinstance(found, Unschedulable)
    assert found.message == "no nodes with enough resources were found: 1 node(s) didn't have enough resources: GPUs."
    assert found.detail == (
        "requested: 2001 MiB, time-slicing. GPU GPU-0 has 2000 of 10000 MiB free; GPU GPU-1 has 0 of 10000 MiB free; "
        "GPU GPU-2 is shared by sm-sharing; no GPU is idle."
    )


def test_several_devices_are_several_gpus() -> None:
    cluster = Cluster(10_000)
    assert cluster.bind(request("6000Mi"))[f"{KEY}{DEVICES}"] == "GPU-0"
    two = request("6000Mi", count="2")
    assert cluster.bind(replace(two, name="b"))[f"{KEY}{DEVICES}"] == "GPU-1,GPU-2"
    found = cluster.schedule(replace(two, name="c"))
    assert isinstance(found, Unschedulable)
    assert "requested: 2 GPUs with 6000 MiB" in found.detail


def test_several_devices_lie_over_those_that_others_use_the_fullest_first() -> None:
    cluster = Cluster()
    devices = f"{KEY}{DEVICES}"
    assert cluster.bind(request("60000Mi", "sm-sharing"))[devices] == "GPU-0"
    assert cluster.bind(request("20000Mi", "sm-sharing", "2"))[devices] == "GPU-0,GPU-1"
    assert cluster.bind(request("30000Mi", "sm-sharing", "2"))[devices] == "GPU-1,GPU-2", "GPU-0 is full"
    assert cluster.bind(request("1000Mi", "sm-sharing", "3"))[devices] == "GPU-0,GPU-1,GPU-2"
    assert isinstance(cluster.schedule(request("1000Mi", "time-slicing", "2")), Unschedulable)


def test_more_than_a_gpu_has() -> None:
    found = Cluster(24_576).schedule(request("24501Mi"))
    assert isinstance(found, Unschedulable)
    assert found.message.endswith("1 node(s) didn't have enough resources: GPU memory.")
    assert "capacity of 24500 Mib. 24501 Mib of gpu memory has been requested" in found.detail
    assert isinstance(Cluster(24_576).schedule(request("24500Mi")), PodSpec)


def test_two_halves_share_a_gpu_whatever_its_size_rounds_to() -> None:
    cluster = Cluster(81_559, ("GPU-0",))
    cluster.bind(pod({"gpu-fraction": "0.5"}, "a"))
    assert cluster.bind(pod({"gpu-fraction": "0.5"}, "b"))[f"{KEY}{REQUEST}"] == "40779Mi"
    assert isinstance(cluster.schedule(pod({"gpu-fraction": "0.01"}, "c")), Unschedulable)


def test_limits_are_never_booked() -> None:
    cluster = Cluster(10_000, ("GPU-0",))
    for name in "abc":
        cluster.bind(replace(pod({f"{KEY}{REQUEST}": "3Gi", f"{KEY}{LIMIT}": "90Gi"}), name=name))


def test_a_gpu_is_free_for_any_mode_once_its_last_pod_is_gone() -> None:
    cluster = Cluster(10_000, ("GPU-0",))
    cluster.bind(request("1Gi"))
    assert isinstance(cluster.schedule(replace(request("1Gi", "sm-sharing"), name="b")), Unschedulable)
    cluster.delete("p")
    assert cluster.pods == []
    cluster.bind(replace(request("1Gi", "sm-sharing"), name="b"))
    assert cluster.node.groups[0].mode == "sm-sharing"


def test_a_group_without_a_mode_is_time_slicing() -> None:
    keeper = replace(fractions.reservation(Group("g", "GPU-0", ""), "n"), annotations={})
    assert fractions.groups_of([keeper], Node("n", 1000))[0].mode == "time-slicing"


asks = st.builds(
    lambda size, mode, count: (size, mode, count),
    st.one_of(
        st.integers(1, 12_000).map(lambda mib: ("memory", str(mib))),
        st.integers(1, 99).map(lambda percent: ("fraction", f"{percent / 100:.2f}")),
    ),
    st.sampled_from(["", "time-slicing", "sm-sharing"]),
    st.integers(1, 3),
)


@given(st.integers(200, 12_000), st.lists(st.one_of(asks, st.integers(0, 20)), max_size=25))
def test_the_two_rules_hold_always(gpu_mib: int, steps: list[Any]) -> None:
    cluster = Cluster(gpu_mib)
    for number, step in enumerate(steps):
        if isinstance(step, int):
            cluster.delete(f"p{step}")
        else:
            (kind, size), mode, count = step
            annotations = {f"gpu-{kind}": size, "gpu-fraction-num-devices": str(count)}
            if mode:
                annotations[f"{KEY}{MODE}"] = mode
            cluster.schedule(pod(annotations, f"p{number}"))
        users: dict[str, list[PodSpec]] = {}
        for one in cluster.pods:
            if not fractions.is_reservation(one):
                for gpu in one.annotations[f"{KEY}{DEVICES}"].split(","):
                    users.setdefault(gpu, []).append(one)
        groups = {group.gpu: group for group in cluster.node.groups}
        assert set(groups) == set(users), "a GPU is kept as long as somebody is on it"
        assert len(groups) == len(cluster.node.groups)
        for gpu, group in groups.items():
            assert group.booked_mib <= cluster.node.size_mib
            assert {one.annotations.get(f"{KEY}{MODE}", "time-slicing") for one in users[gpu]} == {group.mode}
            assert group.pods == len(users[gpu])


def test_placement_is_a_value() -> None:
    placed = fractions.place(request("1Gi"), Node("n", 8000, ("GPU-7",)), lambda gpu: f"of {gpu}")
    assert placed == Placement(
        (Group("of GPU-7", "GPU-7", "time-slicing"),), (Group("of GPU-7", "GPU-7", "time-slicing"),)
    )
