"""Every row of the grammar table, as tried with k8s.io/apimachinery 0.36, and what we refuse beyond it."""

from fractions import Fraction

import pytest

from mpsd.common.errors import ConfigError
from mpsd.common.quantity import (
    API_FORMAT_ERROR,
    API_NEGATIVE,
    API_NOT_INTEGER,
    API_SUFFIX_ERROR,
    MAX_VALUE,
    QuantityError,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_quantity,
    quoted,
)

MALFORMED = [
    *("1K", "1ki", "1mi", "1g", "1GB", "1MiB", "4GiB", "1 Gi", " 1Gi", " 8Gi", "1Gi ", "1_000", "0x10", "NaN", "inf"),
    *("1e", "1e+", "1e3.5", "1e3Mi", "--1", "+-1", "1-5", "", " ", "1.2.3", "1,5Gi", "1ui", "1Gi\n", "\u0661Gi", "e"),
]


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(QuantityError, match=r"^cannot use quantity .*: must be a Kubernetes quantity such as 8Gi"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("8Gi", 8 * 2**30),
        ("1E", 10**18),
        ("1E3", 1000),
        ("1e3", 1000),
        ("1e+3", 1000),
        ("1500e-3", Fraction(3, 2)),
        ("1m", Fraction(1, 1000)),
        ("1u", Fraction(1, 10**6)),
        ("1n", Fraction(1, 10**9)),
        ("1k", 1000),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1Ki", 2**10),
        ("1Mi", 2**20),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("7Ei", 7 * 2**60),
        (".", 0),
        ("-", 0),
        ("+", 0),
        ("Mi", 0),
        ("k", 0),
        ("-0", 0),
        ("e3", 0),
        ("1.", 1),
        ("+1", 1),
        (".5", Fraction(1, 2)),
        ("007", 7),
        ("-1", -1),
        ("-1.5Gi", -3 * 2**29),
        ("1.5Gi", 1536 * 2**20),
        ("0.5Ki", 512),
        ("1e-1000", Fraction(1, 10**9)),
        ("-1e-1000", Fraction(-1, 10**9)),
        ("0.1n", Fraction(1, 10**9)),
        ("1e-2147483649", Fraction(1, 10**9)),
        ("0e2147483648", 0),
        ("9223372036854775807", MAX_VALUE),
    ],
)
def test_values(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("8Ei", "9Ei", "9223372036854775808", "10E", "16E", "1e19", "1e1000", "1e2147483648", "-16E"),
        *("9223372036854775807.1", "1e99999999999999999999999", "99999999999999999999999999999999999999Gi"),
    ],
)
def test_what_is_beyond_int64_is_refused_at_once(text: str) -> None:
    with pytest.raises(QuantityError, match="must be at most 9223372036854775807"):
        parse_quantity(text)


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "0" * 100_000, "1e" + "9" * 100_000, "0." + "1" * 100_000, "x" * 100_000]
)
def test_huge_texts_are_refused_at_once_and_shown_short(text: str) -> None:
    with pytest.raises(QuantityError, match="must be at most 128 characters long") as caught:
        parse_quantity(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "size"),
    [("1m", 1), ("1.5", 2), ("0.1Gi", 107374183), ("1000M", 10**9), ("4Gi", 2**32), ("0", 0), ("1e-1000", 1)],
)
def test_bytes_are_rounded_up(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_bytes_are_not_negative() -> None:
    with pytest.raises(QuantityError, match='cannot use quantity "-1Gi": must not be negative'):
        parse_bytes("-1Gi")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *(("4GiB", "4Gi"), (" 8Gi", "8Gi"), ("8 Gi", "8Gi"), ("8gi", "8Gi"), ("512mb", "512M"), ("512mB", "512M")),
        *(("1_000", "1000"), ("1.5gb", "1.5G"), ("64K", "64k")),
    ],
)
def test_the_usual_slips_get_a_suggestion(text: str, meant: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_quantity(text)
    assert caught.value.reason.endswith(f'; did you mean "{meant}"?')
    parse_quantity(meant)


@pytest.mark.parametrize("text", ["NaN", "0x10", "--1", "1e3Mi", "", "eight", "1e"])
def test_no_suggestion_where_there_is_none(text: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_quantity(text)
    assert "did you mean" not in caught.value.reason


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (8 * 2**30, "8Gi"),
        (1536 * 2**20, "1536Mi"),
        (512, "512"),
        (0, "0"),
        (1025, "1025"),
        (-(2**30), "-1Gi"),
        (2**60, "1Ei"),
    ],
)
def test_canonical_form(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (1, 1),
        ("2", 2),
        ("1k", 1000),
        ("1000m", 1),
        (" 3 ", 3),
        (None, 0),
        (0, 0),
        ("-0", 0),
        (1.0, 1),
        ("1.9999999", 2),
    ],
)
def test_counts(value: object, count: int) -> None:
    assert parse_count(value) == count


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("500m", API_NOT_INTEGER),
        (0.5, API_NOT_INTEGER),
        ("1.5", API_NOT_INTEGER),
        ("1u", API_NOT_INTEGER),
        (-1, API_NEGATIVE),
        ("-500m", API_NEGATIVE),
        ("4GiB", API_FORMAT_ERROR),
        ("", API_FORMAT_ERROR),
        (True, API_FORMAT_ERROR),
        ([1], API_FORMAT_ERROR),
        ({}, API_FORMAT_ERROR),
        (float("nan"), API_FORMAT_ERROR),
        ("one", API_FORMAT_ERROR),
        ("1K", API_SUFFIX_ERROR),
        ("1e", API_SUFFIX_ERROR),
        ("--1", API_SUFFIX_ERROR),
    ],
)
def test_counts_are_refused_in_the_words_of_the_api_server(value: object, reason: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_count(value)
    assert caught.value.reason == reason


@pytest.mark.parametrize("value", [2**63, 10**5000, "8Ei", "1e2147483648", "9" * 100_000, 1e300], ids=range(6))
def test_counts_beyond_int64_are_refused_at_once(value: object) -> None:
    with pytest.raises(QuantityError, match="must be at most"):
        parse_count(value)


def test_texts_of_the_api_server() -> None:
    assert API_NOT_INTEGER == "must be an integer"
    assert API_NEGATIVE == "must be greater than or equal to 0"
    assert API_FORMAT_ERROR == (
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
    )


def test_an_error_is_for_users_and_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quantity("8Gi\n\x1b[31mroot: all is well\u202e")
    assert str(caught.value).startswith('cannot use quantity "8Gi\\n\\u001b[31mroot: all is well\\u202e": must')
    assert str(caught.value).isprintable()


def test_quoted_texts_are_short() -> None:
    assert quoted("a" * 64) == '"' + "a" * 64 + '"'
    assert quoted("a" * 65) == '"' + "a" * 60 + '..."'
