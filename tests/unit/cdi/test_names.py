import pytest

from cdi import names
from cdi.errors import CdiError, InvalidNameError


@pytest.mark.parametrize(
    "text",
    [
        "gpufrac.dev/allocation=s0123456789abcdef0123",
        "nvidia.com/gpu=0",
        "nvidia.com/gpu=GPU-5a3c7e1f-0000-4c11-9d5e-0123456789ab",
        "nvidia.com/gpu=GPU-uuid::3",
        "Vendor_1.example-x/Class.sub_a=a.b:c_d-e",
        "ab/cd=1",
    ],
)
def test_good_qualified_names_round_trip(text: str) -> None:
    parsed = names.parse_qualified(text)
    assert str(parsed) == text
    assert names.format_qualified(*parsed) == text
    assert names.parse_kind(parsed.kind) == (parsed.vendor, parsed.class_name)
    assert names.is_qualified(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu0",
        "=x",
        "nvidia.com=gpu0",
        "nvidia.com/gpu",
        "nvidia.com/gpu=",
        "/gpu=0",
        "nvidia.com/=0",
        "1vendor/gpu=0",
        "v/gpu=0",
        "vendor/g=0",
        "vendor-/gpu=0",
        "vendor/gpu.=0",
        "vendor/g/pu=0",
        "ven dor/gpu=0",
        "vendor/gpu=MIG-GPU-x/3/0",
        "vendor/gpu=:0",
        "vendor/gpu=0:",
        "vendor/gpu=a=b",
        "vendor/gpu=a\n",
        "vendor\n/gpu=a",
        "véndor/gpu=a",
        "vendor/gpu=٣",
    ],
)
def test_bad_qualified_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidNameError, match="cannot use"):
        names.parse_qualified(text)
    assert not names.is_qualified(text)


def test_format_checks_each_part() -> None:
    for parts in (("aa/b", "cc", "d"), ("aa", "cc/d", "e"), ("aa", "bb", "c/d")):
        with pytest.raises(InvalidNameError):
            names.format_qualified(*parts)
    assert names.format_kind("aa", "bb") == "aa/bb"


def test_error_text_is_bounded_and_in_the_family() -> None:
    with pytest.raises(CdiError) as caught:
        names.parse_qualified("x" * 10_000)
    assert len(str(caught.value)) < 200
