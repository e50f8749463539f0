"""Which GPUs one daemon owns: as the config says, and as live allocations need it."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.config.model import NodeConfig
from mpsd.gpu.model import GpuInfo
from mpsd.shares.groups import Group, declared_name, group_of, groups, label, set_name


def infos(count: int) -> list[GpuInfo]:
    return [GpuInfo(uuid=f"G{n}", index=n, name="", memory_total_bytes=1) for n in range(count)]


def config(**declared: tuple[int | str, ...]) -> NodeConfig:
    return NodeConfig(resources=(), groups=tuple(declared.items()))


def shown(found: tuple[Group, ...]) -> dict[str, tuple[str, ...]]:
    return {group.name: group.gpus for group in found if not group.objection}


def test_a_gpu_in_no_group_is_its_own() -> None:
    assert shown(groups(config(), infos(2), {})) == {"G0": ("G0",), "G1": ("G1",)}
    assert shown(groups(config(pair=(1, "G2")), infos(3), {})) == {"pair": ("G1", "G2"), "G0": ("G0",)}


def test_the_order_of_a_group_is_the_configs() -> None:
    assert shown(groups(config(pair=(1, 0)), infos(2), {})) == {"pair": ("G1", "G0")}


def test_one_gpu_named_twice_counts_once() -> None:
    assert shown(groups(config(pair=(0, "G0")), infos(1), {})) == {"pair": ("G0",)}


def test_a_group_with_a_missing_gpu_is_not_served_and_its_others_are_nobodys() -> None:
    (group,) = groups(config(pair=(0, 5)), infos(1), {})
    assert (group.name, group.gpus, group.objection) == ("pair", ("G0",), "its GPU 5 is not on this node")


@pytest.mark.parametrize(
    ("declared", "held", "served", "objected"),
    [
        # granted alone, now in a group: the group waits
        ({"pair": (0, 1)}, {"G0": ("G0",)}, {"G0": ("G0",), "G2": ("G2",)}, {"pair": "granted on G0 must end"}),
        # granted on a group that is no more
        ({}, {"pair": ("G0", "G1")}, {"pair": ("G0", "G1"), "G2": ("G2",)}, {}),
        # granted on a group that has other GPUs now
        ({"pair": (1, 2)}, {"pair": ("G0", "G1")}, {"G2": ("G2",)}, {"pair": "regrouped once its allocations"}),
        # one of its GPUs is in another group, too
        (
            {"pair": (0, 1), "trio": (1, 2)},
            {"pair": ("G0", "G1")},
            {"pair": ("G0", "G1")},
            {"trio": "granted on pair must end"},
        ),
        # the same group
        ({"pair": (0, 1)}, {"pair": ("G0", "G1")}, {"pair": ("G0", "G1"), "G2": ("G2",)}, {}),
    ],
)
def test_what_is_granted_stays_grouped_as_it_was(
    declared: dict[str, tuple[int, ...]],
    held: Mapping[str, tuple[str, ...]],
    served: dict[str, tuple[str, ...]],
    objected: dict[str, str],
) -> None:
    found = groups(config(**declared), infos(3), held)
    assert shown(found) == served
    objections = {group.name: group.objection for group in found if group.objection}
    assert objections.keys() == objected.keys()
    assert all(objected[name] in objections[name] for name in objected)
    owners = group_of(found)
    for name, gpus in held.items():
        assert all(owners[uuid].name == name for uuid in gpus)


def test_of_two_groups_that_were_granted_on_one_gpu_the_first_counts() -> None:
    held = {"pair": ("G0", "G1"), "G1": ("G1",)}
    assert shown(groups(config(), infos(3), held)) == {"pair": ("G0", "G1"), "G2": ("G2",)}


REFS = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)


@given(declared=st.dictionaries(st.sampled_from(["a", "b", "c"]), REFS, max_size=3), count=st.integers(0, 5))
def test_no_gpu_is_served_by_two_groups_and_none_is_forgotten(declared: dict[str, list[int]], count: int) -> None:
    taken: set[int] = set()
    disjoint = {name: tuple(r for r in refs if not (r in taken or taken.add(r))) for name, refs in declared.items()}  # type: ignore[func-returns-value]
    disjoint = {name: refs for name, refs in disjoint.items() if refs}
    found = groups(config(**disjoint), infos(count), {})
    assert group_of(found).keys() == {f"G{n}" for n in range(count)}
    served = [uuid for group in found if not group.objection for uuid in group.gpus]
    assert len(served) == len(set(served))


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("G1", ("G1",), "GPU 1"),
        (set_name(("G0", "G1")), ("G0", "G1"), "GPU 0, 1"),
        ("pair", ("G1", "G0"), "group pair (GPU 1, 0)"),
        ("solo", ("G1",), "group solo (GPU 1)"),
        (set_name(("G0", "G9")), ("G0", "G9"), "GPU 0, G9"),
        ("G9", ("G9",), "G9"),
    ],
)
def test_gpus_are_called_by_number_and_a_group_by_its_name_too(name: str, gpus: tuple[str, ...], said: str) -> None:
    assert label(name, gpus, {"G0": 0, "G1": 1}) == said
    assert declared_name(name, gpus[0]) == (name if said.startswith("group") else "")
