"""GPUs that the config names and the node does not have."""

from mpsd.config.model import AnnotationsConfig, Enforcement, GpuSelection
from mpsd.config.named import absent
from tests.builders import config, fixed, info, resource, uuid


def test_what_is_included_and_not_there_is_named_with_its_place() -> None:
    cfg = config(
        resource("a", fixed(8), gpus=GpuSelection(include=(0, uuid(1)))),
        resource("b", fixed(8), gpus=GpuSelection(include=(0, 5, uuid(7)))),
        gpus=GpuSelection(include=(0, 1, 3), exclude=(9,)),
        annotations=AnnotationsConfig(enforcement=Enforcement.NONE, gpus=GpuSelection(include=(4,))),
    )
    lines = absent(cfg, [info(0), info(1)])
    assert [line.partition(", and no such GPU")[0] for line in lines] == [
        "config: gpus.include names GPU 3",
        f"config: resources[1].gpus.include names GPU 5, {uuid(7)}",
        "config: annotations.gpus.include names GPU 4",
    ]


def test_all_and_what_is_left_out_need_nobody() -> None:
    assert absent(config(resource("a", fixed(8)), gpus=GpuSelection(exclude=(7,))), [info(0)]) == ()
