"""What the annotations of a pod say of its containers."""

from collections.abc import Mapping

import pytest

from deviceplugin.annotated.contract import DEVICES, LIMIT, MODE, REQUEST
from deviceplugin.sim.objects.annotations import (
    Asked,
    asked_of,
    is_fractional,
    is_placed,
    notes,
    split_key,
    target,
    wanting,
)
from deviceplugin.sim.objects.pods import ContainerSpec, PodSpec, Role

P = "nvidia.com/container."


def pod(annotations: Mapping[str, str]) -> PodSpec:
    return PodSpec("p", (ContainerSpec("main"),), annotations=annotations)


def test_the_keys_of_a_container() -> None:
    keys = {f"{P}a.gpu-memory.request": "1Gi", f"{P}a.gpus.devices": "0", f"{P}a.b.gpu-memory.limit": "2Gi"}
    assert asked_of(keys, "a") == Asked(request="1Gi", devices="0")
    assert asked_of(keys, "a.b") == Asked(limit="2Gi")
    assert asked_of(keys, "b") == Asked()
    assert asked_of({"my/a.gpu-memory.limit": "1"}, "a", "my/").fractional


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (f"{P}a{REQUEST}", ("a", REQUEST)),
        (f"{P}a.b{MODE}", ("a.b", MODE)),
        (f"{P}{DEVICES}", None),
        (f"{P}a.gpu-memory", None),
        (f"x{P}a{MODE}", None),
    ],
)
def test_keys_are_taken_apart(key: str, expected: tuple[str, str] | None) -> None:
    assert split_key(key) == expected


def test_a_mode_alone_is_no_fraction() -> None:
    assert not is_fractional(pod({f"{P}main{MODE}": "sm-sharing"}))
    assert is_fractional(pod({f"{P}main{LIMIT}": "1Gi"}))
    assert is_fractional(pod({"gpu-fraction": "0.5"}))
    assert not is_fractional(pod({"gpu-fraction-num-devices": "2"}))
    assert is_placed(pod({f"{P}main{DEVICES}": "0"}))


def test_the_container_of_a_whole_pods_keys_is_the_first_that_is_no_init_container_or_the_one_named() -> None:
    containers = (ContainerSpec("i", role=Role.INIT), ContainerSpec("a"), ContainerSpec("b"))
    assert target(PodSpec("p", containers)) == "a"
    assert target(PodSpec("p", containers, annotations={"gpu-fraction-container-name": "i"})) == "i"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, set()),
        ({f"{P}b{MODE}": "sm-sharing"}, set()),
        ({f"{P}b{LIMIT}": "1Gi"}, {"b"}),
        ({f"{P}a{REQUEST}": "1Gi", f"{P}b{LIMIT}": "1Gi"}, {"a", "b"}),
        ({f"{P}b{LIMIT}s": "1Gi"}, {"b"}),
        ({"nvidia.com/b.gpu-memory.limit": "1Gi"}, {"b"}),
        ({f"{P}other{LIMIT}": "1Gi"}, {"a"}),
        ({"nvidia.com/gpu-memory.limit": "1Gi"}, {"a"}),
        ({"gpu-fraction": "0.5"}, {"a"}),
        ({"gpu-memory": "1024", "gpu-fraction-container-name": "b"}, {"b"}),
    ],
)
def test_who_is_to_be_limited(annotations: dict[str, str], expected: set[str]) -> None:
    assert wanting(PodSpec("p", (ContainerSpec("a"), ContainerSpec("b")), annotations=annotations)) == expected


MEMORY = {f"{P}main{REQUEST}": "1Gi"}
PLACED = {**MEMORY, f"{P}main{DEVICES}": "0"}


@pytest.mark.parametrize(
    ("annotations", "served", "reached", "expected"),
    [
        ({}, True, True, "the plugin has no part in it"),
        ({}, False, False, "the plugin has no part in it"),
        (PLACED, True, True, None),
        (PLACED, False, True, "this node's config has no `annotations`"),
        (PLACED, True, False, "this node has no NRI"),
        ({"gpu-fraction": "0.5"}, True, True, "gpu-fraction: for a scheduler"),
        (
            {"gpu-memory": "1", "gpu-memory.limit": "2Gi"},
            False,
            True,
            "gpu-memory, gpu-memory.limit: for a",
        ),
        (MEMORY, True, True, f"annotation {P}main{DEVICES} is missing"),
        ({**MEMORY, f"{P}main{DEVICES}": " "}, True, True, "--schedule"),
        ({f"{P}other{LIMIT}": "1Gi"}, True, True, "the pod has no container other"),
        ({f"{P}main{MODE}": "sm-sharing"}, True, True, "the plugin has no part in it"),
    ],
)
def test_notes(annotations: dict[str, str], served: bool, reached: bool, expected: str | None) -> None:
    found = notes(pod(annotations), served=served, reached=reached)
    if expected is None:
        assert found == []
    else:
        assert expected in "\n".join(found)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("nvidia.com/containers.main.gpu-memory.limit", f"is not read: keys begin with {P}"),
        ("nvidia.com/main.gpu-memory.limit", f"is not read: keys begin with {P}"),
        ("nvidia.com/gpu-memory.container.main.limit", "its prefix is an old one"),
        ("nvidia.com/Container.main.gpu-memory.limit", "is not read: upper and lower case count"),
        ("kai.scheduler/container.main.gpu-memory.limit", f"is not read: keys begin with {P}"),
        ("nvidia.com/container-main.gpu-memory.limit", f"is not read: keys begin with {P}"),
        (f"{P}main.gpu-memory.limits", "is not read: no such key"),
        (f"{P}main.gpus.devices", "has no effect without a memory key"),
        (f"{P}other.gpus.devices", "has no effect: the pod has no container other"),
    ],
)
def test_a_key_that_is_odd_is_told_once_in_the_plugins_words(key: str, text: str) -> None:
    (found,) = notes(pod({key: "0"}))
    assert found.startswith(f'annotation "{key}"')
    assert text in found


def test_a_portion_without_sm_sharing_is_told() -> None:
    (found,) = notes(pod({**PLACED, f"{P}main.gpu-compute.portion": "0.5"}))
    assert "has no effect with time-slicing" in found


def test_a_pod_that_asks_a_scheduler_or_a_device_plugin_is_none_the_plugin_has_no_part_in() -> None:
    assert notes(pod({"gpu-fraction": "0.5"}), scheduled=True) == []
    assert notes(PodSpec("p", (ContainerSpec("main", {"x/y": 1}),))) == []


def test_what_a_scheduler_has_seen_needs_no_hint_at_one() -> None:
    assert notes(pod(MEMORY), scheduled=True) == []
    assert notes(pod(MEMORY), served=False, scheduled=True) != []
