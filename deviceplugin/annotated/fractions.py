"""Whether a container's sizes are a part of a GPU that a scheduler made memory of: KAI's keys of a whole pod (pure).

KAI's binder multiplies `gpu-fraction` by the GPU's total memory (its node label `nvidia.com/gpu.memory`), for one
container of the pod. Its admission refuses values that are no part.
"""

from collections.abc import Mapping

KAI_FRACTION = "gpu-fraction"
_KAI_CONTAINER = "gpu-fraction-container-name"
_LONGEST = 32  # characters of a sound number


def is_part_of_gpu(annotations: Mapping[str, str], container: str) -> bool:
    """Whether KAI made this container's sizes of a part of the GPU."""
    return annotations.get(_KAI_CONTAINER, container) == container and 0 < _number(annotations.get(KAI_FRACTION)) < 1


def _number(text: str | None) -> float:
    """0 where it is none."""
    try:
        return float(text) if text is not None and len(text) <= _LONGEST else 0.0
    except ValueError:
        return 0.0
