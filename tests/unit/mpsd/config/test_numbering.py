"""Which GPU an index in the config means."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from mpsd.config.model import AnnotationsConfig, Enforcement, GpuRef, GpuSelection, NodeConfig
from mpsd.config.numbering import moved, named_indices, numbered, settle, warnings
from mpsd.gpu.model import GpuInfo
from mpsd.shares.groups import groups
from tests.builders import config, fixed, info, resource, uuid

A, B, C, D = (uuid(n) for n in range(4))


def listed(*uuids: str) -> list[GpuInfo]:
    return [structs.replace(info(0), uuid=gpu, index=index) for index, gpu in enumerate(uuids)]


@pytest.mark.parametrize(
    ("known", "now", "held", "followed"),
    [
        ({}, [A, B], {A: 0, B: 1}, {A: 0, B: 1}),
        ({A: 0}, [A, B], {A: 0, B: 1}, {A: 0, B: 1}),  # one more
        ({A: 0, B: 1, C: 2}, [B, C], {A: 0, B: 1, C: 2}, {B: 0, C: 1}),  # the first is gone
        ({A: 0, B: 1, C: 2}, [A, B], {A: 0, B: 1, C: 2}, {A: 0, B: 1, C: 2}),  # the last is gone
        ({A: 0, B: 1}, [B, A], {A: 0, B: 1}, {B: 0, A: 1}),
        ({A: 0, B: 1}, [C, B], {A: 0, B: 1}, {C: 0, B: 1}),  # the first was replaced
        ({A: 0, B: 1}, [], {A: 0, B: 1}, {A: 0, B: 1}),  # the driver is not loaded yet
    ],
)
def test_a_known_meaning_is_held_where_the_config_names_indices(
    known: Mapping[str, int], now: list[str], held: Mapping[str, int], followed: Mapping[str, int]
) -> None:
    assert settle(known, listed(*now), hold=True) == held
    assert settle(known, listed(*now), hold=False) == followed


def test_selections_and_groups_go_by_the_meaning() -> None:
    gpus = [numbered(i, {A: 0, B: 1, C: 2}) for i in listed(B, C, D)]
    first_two = GpuSelection(include=(0, 1))
    assert [i.uuid for i in gpus if first_two.admits(i)] == [B]
    assert [i.uuid for i in gpus if GpuSelection(exclude=(2,)).admits(i)] == [B, D]
    assert [i.uuid for i in gpus if GpuSelection(include=(C,)).admits(i)] == [C]
    cfg = config(groups=(("pair", (1, 2)), ("other", (0, C))))
    pair, other = groups(cfg, gpus, {})[:2]
    assert (pair.gpus, pair.objection) == ((B, C), "")
    assert other.objection == "its GPU 0 is not on this node"
    assert moved(gpus) == [f"{B} is 0 now and was 1", f"{C} is 1 now and was 2", f"{D} is 2 now and new"]


def everywhere(ref: GpuRef) -> list[NodeConfig]:
    annotations = AnnotationsConfig(gpus=GpuSelection(include=(ref,)), enforcement=Enforcement.NONE)
    return [
        config(gpus=GpuSelection(include=(ref,))),
        config(gpus=GpuSelection(exclude=(ref,))),
        config(resource("a", fixed(8), gpus=GpuSelection(exclude=(ref,)))),
        config(groups=(("pair", (ref, A)),)),
        config(annotations=annotations),
    ]


def warned(cfg: NodeConfig, known: dict[str, int], gpus: list[GpuInfo]) -> list[str]:
    return [text for part in warnings(cfg, known, gpus) for text in part]


@pytest.mark.parametrize("ref", [7, D])
def test_whatever_the_config_names_and_is_not_there_is_named(ref: GpuRef) -> None:
    gpus = [numbered(i, {A: 0, B: 1}) for i in listed(A, B)]
    for cfg in everywhere(ref):
        (said,) = warned(cfg, {A: 0, B: 1}, gpus)
        assert said.startswith(f"the config names GPU {ref}, which is not on this node: ")
        assert named_indices(cfg) == ({7} if ref == 7 else set())
    for cfg in everywhere(B):
        assert warned(cfg, {A: 0, B: 1}, gpus) == []


def test_a_move_is_told_where_the_config_names_one_of_its_indices() -> None:
    known = {A: 0, B: 1, C: 2}
    gpus = [numbered(i, known) for i in listed(A, C)]
    assert warned(config(gpus=GpuSelection(include=(0,))), known, gpus) == []
    (said, *_) = warned(config(gpus=GpuSelection(exclude=(2,))), known, gpus)
    assert said.endswith(f"run `gpufrac mpsd confirm-indices`: {C} is 1 now and was 2")


def test_of_two_with_one_number_the_one_that_is_there_has_it() -> None:
    there, lost = listed(B)[0], listed(A)[0]
    assert settle({}, [there, lost], hold=False) == {B: 0}
    assert settle({A: 0}, [there, lost], hold=True) == {A: 0}
    assert settle({A: 0, B: 1}, [there, lost], hold=False) == {B: 0}
