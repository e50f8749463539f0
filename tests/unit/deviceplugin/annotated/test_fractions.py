"""Who asked for a part of a GPU, and who for a size."""

import pytest

from deviceplugin.annotated.contract import ask_of
from deviceplugin.annotated.fractions import is_part_of_gpu


@pytest.mark.parametrize(
    ("keys", "is_part"),
    [
        ({}, False),
        ({"gpu-fraction": "0.5"}, True),
        ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "main"}, True),
        ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "other"}, False),
        ({"gpu-memory": "4096"}, False),
        *(({"gpu-fraction": text}, False) for text in ("", "0", "1", "1.5", "-0.5", "NaN", "half", "0." + "1" * 500)),
    ],
)
def test_who_asks_for_a_part_of_a_gpu_is_known(keys: dict[str, str], is_part: bool) -> None:
    assert is_part_of_gpu(keys, "main") is is_part
    ask = ask_of({"nvidia.com/container.main.gpu-memory.request": "4Gi", **keys}, "main", "nvidia.com/container.")
    assert ask is not None
    assert ask.of_total is is_part
