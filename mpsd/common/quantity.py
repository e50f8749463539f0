"""Kubernetes quantities, exactly (pure).

The grammar is the one of resource.ParseQuantity (k8s.io/apimachinery 0.36, tried against its code): an optional sign,
digits with an optional point, then a suffix `n u m k M G T P E`, `Ki Mi Gi Ti Pi Ei`, or `e`/`E` with a signed
exponent. Case matters; blanks, `B` and underscores are errors; `.`, `-` and a bare suffix are zero.

Two things differ on purpose. A value beyond +-(2^63-1) is an error: Go caps `8Ei` in silence, lets `16E` wrap to zero
and hangs on `1e2147483648`. A text longer than MAX_TEXT is an error too, so that no input costs time.
"""

import json
import re
from fractions import Fraction
from math import ceil

from mpsd.common.errors import ConfigError

MAX_VALUE = 2**63 - 1
MAX_TEXT = 128
"""Longest text we look at, in characters."""

API_FORMAT_ERROR = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
API_SUFFIX_ERROR = "unable to parse quantity's suffix"
API_NOT_INTEGER = "must be an integer"
API_NEGATIVE = "must be greater than or equal to 0"

_NANO = 10**9
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_MEANT = {suffix.lower(): suffix for suffix in ("k", "M", "G", "T", "P", *_BINARY)}

_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?P<suffix>[numkMGTPE]?|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]+))"
)
_SCANNED = re.compile(r"[+-]?[0-9]*(?:\.[0-9]*)?[eEinumkKMGTP]*[-+]?[0-9]*")
"""What Go's scanner lets through: the suffix is judged afterwards, with an error of its own."""


class QuantityError(ConfigError):
    """A text is no quantity, or not one that fits. `reason` is the rule alone, without the text."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(f"cannot use quantity {quoted(text)}: {reason}")
        self.text = text
        self.reason = reason


class OutOfRangeError(QuantityError):
    """A quantity beyond +-(2^63-1)."""

    def __init__(self, text: str) -> None:
        super().__init__(text, f"must be at most {MAX_VALUE} (2^63-1)")


def parse_quantity(text: str) -> Fraction:
    """The exact value; like Go, what is finer than 1n is rounded away from zero to a whole nano.

    Raises:
        QuantityError: not a quantity, too long, or beyond +-(2^63-1).
    """
    if len(text) > MAX_TEXT:
        raise QuantityError(text, f"must be at most {MAX_TEXT} characters long")
    match = _QUANTITY.fullmatch(text)
    if not text or match is None:
        raise QuantityError(text, f"must be a Kubernetes quantity such as 8Gi, 512Mi or 1G{_suggestion(text)}")
    part = match["part"] or ""
    digits = int(match["whole"] + part or "0")
    suffix = match["suffix"] or ""
    if suffix in _BINARY:
        magnitude = Fraction(digits << _BINARY[suffix], 10 ** len(part))
    else:
        exponent = int(match["exponent"] or _DECIMAL[suffix]) - len(part)
        magnitude = _scaled(text, digits, exponent)
    magnitude = Fraction(ceil(magnitude * _NANO), _NANO)
    if magnitude > MAX_VALUE:
        raise OutOfRangeError(text)
    return -magnitude if match["sign"] == "-" else magnitude


def parse_bytes(text: str) -> int:
    """A size in bytes, rounded up to a whole byte as Quantity.Value() does.

    Raises:
        QuantityError: as parse_quantity, and for negative values.
    """
    value = parse_quantity(text)
    if value < 0:
        raise QuantityError(text, "must not be negative")
    return ceil(value)


def parse_count(value: object) -> int:
    """The count of an extended resource in a pod spec, judged as the API server does.

    `value` is what YAML or JSON decoding gave; `null` is 0. The server tests milli-units: `1.9999999` counts as 2.

    Raises:
        QuantityError: its `reason` is the API server's text (API_NEGATIVE, API_NOT_INTEGER, API_FORMAT_ERROR,
            API_SUFFIX_ERROR), except for values beyond 2^63-1, which are ours to refuse.
    """
    if value is None:
        return 0
    text = _json_text(value)
    if len(text) > MAX_TEXT:
        raise QuantityError(text, f"must be at most {MAX_TEXT} characters long")
    try:
        count = parse_quantity(text)
    except OutOfRangeError:
        raise
    except QuantityError as error:
        known = text and _SCANNED.fullmatch(text)
        raise QuantityError(text, API_SUFFIX_ERROR if known else API_FORMAT_ERROR) from error
    if count < 0:
        raise QuantityError(text, API_NEGATIVE)
    if ceil(count * 1000) % 1000:
        raise QuantityError(text, API_NOT_INTEGER)
    return ceil(count)


def format_bytes(size_bytes: int) -> str:
    """The canonical form: `8Gi`, `1536Mi`, `512`. Exact: the largest binary suffix that leaves a whole number."""
    for suffix, shift in reversed(_BINARY.items()):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{suffix}"
    return str(size_bytes)


def quoted(text: str) -> str:
    """`text` in double quotes, fit for one line of an error or a log: shortened, all but printable ASCII escaped."""
    return json.dumps(text if len(text) <= 64 else f"{text[:60]}...")


def _scaled(text: str, digits: int, exponent: int) -> Fraction:
    """digits * 10^exponent, without ever computing a power that can't matter. The exponent may be any number."""
    if digits == 0:
        return Fraction(0)
    if exponent > 18:
        raise OutOfRangeError(text)
    if exponent < -MAX_TEXT - 9:
        return Fraction(1, _NANO)
    return Fraction(digits) * Fraction(10) ** exponent


def _suggestion(text: str) -> str:
    """What was probably meant, for the usual slips: blanks, `GiB`, `gi`, `1_000`."""
    match = re.fullmatch(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]{0,2}?)[bB]?\s*", text)
    if match is None:
        return ""
    meant = _MEANT.get(match[2].lower(), "" if not match[2] else None)
    return "" if meant is None else f'; did you mean "{match[1].replace("_", "")}{meant}"?'


def _json_text(value: object) -> str:
    """The text the API server's decoder sees. It trims blanks around a quoted quantity."""
    if isinstance(value, str):
        return value.strip(" ")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**MAX_TEXT else "9" * (MAX_TEXT + 1)
    if isinstance(value, float):
        return repr(value)
    raise QuantityError(type(value).__name__, API_FORMAT_ERROR)
