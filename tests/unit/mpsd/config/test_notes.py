"""What a valid config will not do."""

import pytest
from msgspec import structs

from mpsd.config.model import (
    AnnotationsConfig,
    AwayPolicy,
    Enforcement,
    GpuRef,
    GpuSelection,
    KubernetesConfig,
    NodeConfig,
)
from mpsd.config.notes import notes as all_notes
from tests.builders import config, fixed, resource, uuid


def notes(cfg: NodeConfig) -> list[str]:
    """All but the advice to name GPUs by UUID."""
    return [text for text in all_notes(cfg) if "by index" not in text]


@pytest.mark.parametrize("ref", [0, uuid(0)])
def test_names_that_outlive_a_gpu_are_advised(ref: GpuRef) -> None:
    pair = resource("p", fixed(8), groups=("pair0",))
    annotations = AnnotationsConfig(gpus=selection((ref,)), enforcement=Enforcement.NONE)
    for cfg in (
        config(gpus=selection(None, ref)),
        config(resource("a", fixed(8), gpus=selection((ref,)))),
        config(pair, groups=(("pair0", (ref, uuid(7))),)),
        config(annotations=annotations),
    ):
        advice = [text for text in all_notes(cfg) if "by UUID" in text]
        assert [text.partition(":")[0] for text in advice] == ["GPUs are named by index (0)"] * isinstance(ref, int)


def selection(include: tuple[GpuRef, ...] | None = None, *exclude: GpuRef) -> GpuSelection:
    return GpuSelection(include=include, exclude=exclude)


ALL = selection()


def asked(annotated: GpuSelection, own: GpuSelection = ALL, gpus: GpuSelection = ALL) -> NodeConfig:
    annotations = AnnotationsConfig(gpus=annotated, enforcement=Enforcement.NONE)
    return config(resource("a", fixed(8), gpus=own), gpus=gpus, annotations=annotations)


@pytest.mark.parametrize(
    ("cfg", "closed"),
    [
        (asked(ALL), True),
        (asked(ALL, selection((0,))), True),
        (asked(selection((1, 2)), selection((2,))), True),
        (asked(selection((1, 2)), gpus=selection((1, 2))), True),
        (asked(selection(None, 0), selection(None, 0)), True),
        (asked(selection((0, 1)), selection((1, 2))), False),
        (asked(selection((0, 1))), False),
        (asked(selection(None, 0)), False),
        (asked(selection(None, 0), selection((0, 1))), False),
        (asked(selection(None, uuid(0)), selection((0,))), False),
        (asked(selection((uuid(0),)), selection((0,))), False),
    ],
)
def test_a_resource_without_a_gpu_that_is_not_set_aside(cfg: NodeConfig, closed: bool) -> None:
    assert [text.partition(" ")[0] for text in notes(cfg)] == ["gpufrac.dev/a"] * closed
    assert cfg.annotations is not None
    assert notes(structs.replace(cfg, annotations=structs.replace(cfg.annotations, share=True))) == []
    assert notes(structs.replace(cfg, annotations=None)) == []


@pytest.mark.parametrize(("annotated", "closed"), [((1,), True), ((2,), False), ((0, 1, 2), True)])
def test_a_group_is_set_aside_with_one_of_its_gpus(annotated: tuple[int, ...], closed: bool) -> None:
    pair = resource("p", fixed(8), groups=("pair0",))
    annotations = AnnotationsConfig(gpus=selection(annotated), enforcement=Enforcement.NONE)
    assert bool(notes(config(pair, groups=(("pair0", (0, 1)),), annotations=annotations))) is closed


@pytest.mark.parametrize("policy", AwayPolicy)
@pytest.mark.parametrize("access", ["off", "in-cluster", "/etc/kubernetes/kubelet.conf"])
def test_stopping_needs_the_api_server(policy: AwayPolicy, access: str) -> None:
    annotations = AnnotationsConfig(gpus=ALL, enforcement=Enforcement.NONE, when_away=policy)
    found = notes(config(annotations=annotations, kubernetes=KubernetesConfig(access=access)))
    assert bool(found) is (policy is AwayPolicy.STOP and access == "off")
    assert all("`kubernetes.access`" in text for text in found)


def test_a_share_of_several_gpus_needs_as_many_that_are_left() -> None:
    two = resource("two", fixed(8), gpu_count=2)
    (few,) = notes(config(two, gpus=selection((0,))))
    assert few == "gpufrac.dev/two will advertise 0: a share lies on 2 GPUs, and gpus.include names 1"
    assert notes(config(two, gpus=selection((0, 1)))) == []
    for include, noted in (((0, 1), True), ((0, 1, 2), False)):
        annotations = AnnotationsConfig(gpus=selection((0,)), enforcement=Enforcement.NONE)
        found = notes(config(two, gpus=selection(include), annotations=annotations))
        assert [text for text in found if "too many of its GPUs are set aside" in text] == found
        assert bool(found) is noted
