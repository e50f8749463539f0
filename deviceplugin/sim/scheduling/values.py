"""What KAI's annotations hold: numbers as Go reads them, and the words of keys (pure)."""

import re
from math import ceil

from deviceplugin.sim.scheduling.placement import WHOLE_GPU
from mpsd.common.quantity import QuantityError, parse_quantity

RESERVED_RESOURCE = WHOLE_GPU
PORTION_PREFIX, PORTION_SUFFIX = "kai.scheduler/container.", ".gpu-memory.portion.limit"
TIME_SLICING, SM_SHARING = "time-slicing", "sm-sharing"

FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def go_float(text: str | None) -> float | None:
    """strconv.ParseFloat, but for hexadecimal numbers, infinities and NaN: no rule lets these pass."""
    return float(text) if text is not None and FLOAT.fullmatch(text) else None


def is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text[:20]) < 1 << 64 and len(text) <= 20


def quantity_bytes(text: str) -> int | None:
    """Bytes of a quantity above zero."""
    try:
        size = parse_quantity(text)
    except QuantityError:
        return None
    return ceil(size) if size > 0 else None
