"""Quantities against plain arithmetic, and against whatever text comes."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.common.quantity import MAX_VALUE, QuantityError, format_bytes, parse_bytes, parse_count, parse_quantity

SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(10 ** (3 * (i + 1))) for i, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(2 ** (10 * (i + 1))) for i, suffix in enumerate("KMGTPE")},
}
SIZES = st.integers(min_value=0, max_value=MAX_VALUE)


@given(SIZES)
def test_the_canonical_form_reads_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(0, 10**12), st.text("0123456789", max_size=12), st.sampled_from(sorted(SUFFIXES)), st.booleans())
def test_values_are_exact_and_rounded_up_to_nano(whole: int, part: str, suffix: str, negative: bool) -> None:
    exact = Fraction(f"{whole}.{part or '0'}") * SUFFIXES[suffix]
    text = f"{'-' if negative else ''}{whole}{'.' + part if part else ''}{suffix}"
    if exact > MAX_VALUE:
        with pytest.raises(QuantityError, match="must be at most"):
            parse_quantity(text)
        return
    magnitude = Fraction(ceil(exact * 10**9), 10**9)
    assert parse_quantity(text) == (-magnitude if negative else magnitude)


@given(st.integers(1, 999), st.integers(-5000, 5000))
def test_decimal_exponents(digits: int, exponent: int) -> None:
    try:
        value = parse_quantity(f"{digits}e{exponent}")
    except QuantityError:
        assert digits * 10 ** max(exponent, 0) > MAX_VALUE
    else:
        exact = Fraction(digits) * Fraction(10) ** exponent
        assert exact <= value < exact + Fraction(1, 10**9)


@given(
    st.text() | st.text("0123456789+-.eEinumkKMGTP ", max_size=20) | st.text("0123456789", min_size=120, max_size=200)
)
def test_any_text_is_a_value_in_range_or_a_quantity_error(text: str) -> None:
    for parse in (parse_quantity, parse_bytes, parse_count):
        try:
            value = parse(text)
        except QuantityError as error:
            texts = (error.reason, str(error))
            assert all(texts)
            assert all(map(str.isprintable, texts))
        else:
            assert -MAX_VALUE <= value <= MAX_VALUE
