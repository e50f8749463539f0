"""What the annotations of a pod say of its containers."""

from collections.abc import Mapping

import pytest

from deviceplugin.sim.annotations import (
    DEVICES,
    LIMIT,
    MODE,
    REQUEST,
    Asked,
    asked_of,
    is_fractional,
    is_placed,
    notes,
    split_key,
)
from deviceplugin.sim.pods import ContainerSpec, PodSpec

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


MEMORY = {f"{P}main{REQUEST}": "1Gi"}
PLACED = {**MEMORY, f"{P}main{DEVICES}": "0"}


@pytest.mark.parametrize(
    ("annotations", "served", "reached", "expected"),
    [
        ({}, True, True, None),
        ({}, False, False, None),
        (PLACED, True, True, None),
        (PLACED, False, True, "this node's config has no `annotations`"),
        (PLACED, True, False, "this node has no NRI"),
        ({"gpu-fraction": "0.5"}, True, True, "annotation gpu-fraction is for a scheduler"),
        (
            {"gpu-memory": "1", "gpu-memory.limit": "2Gi"},
            False,
            True,
            "annotation gpu-memory, gpu-memory.limit is for a",
        ),
        (MEMORY, True, True, f"annotation {P}main{DEVICES} is missing"),
        ({**MEMORY, f"{P}main{DEVICES}": " "}, True, True, "--schedule"),
        ({f"{P}other{LIMIT}": "1Gi"}, True, True, "the pod has no container other"),
        ({f"{P}main.gpu-memory.limits": "1Gi"}, True, True, f"annotation {P}main.gpu-memory.limits has no effect"),
        ({f"{P}main{MODE}": "sm-sharing"}, True, True, "container main has neither"),
    ],
)
def test_notes(annotations: dict[str, str], served: bool, reached: bool, expected: str | None) -> None:
    found = notes(pod(annotations), served=served, reached=reached)
    if expected is None:
        assert found == []
    else:
        assert expected in "\n".join(found)


def test_what_a_scheduler_has_seen_needs_no_hint_at_one() -> None:
    assert notes(pod({"gpu-fraction": "0.5"}), scheduled=True) == []
    assert notes(pod(MEMORY), scheduled=True) == []
    assert notes(pod(MEMORY), served=False, scheduled=True) != []
