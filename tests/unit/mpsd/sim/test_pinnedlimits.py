"""The grammar of limits and device lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.sim.model import gpu_uuid
from mpsd.sim.pinnedlimits import (
    client_limits,
    parse_command_value,
    parse_environment,
    parse_environment_value,
    resolve_device,
    server_limits,
    show_value,
    visible_devices,
)

A, B, C = "GPU-aa11", "GPU-aa22", "GPU-bb33"
MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1G", GIB),
        ("8192M", 8 * GIB),
        ("0M", 0),
        ("512MB", None),
        ("1K", None),
        ("1g", None),
        ("1", None),
        ("G", None),
        ("", None),
        ("-1G", None),
        ("1.5G", None),
        ("٣G", None),
        (" 1G", None),
    ],
)
def test_command_values_are_an_integer_with_g_or_m(text: str, size_bytes: int | None) -> None:
    assert parse_command_value(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("512MB", 512 * MIB), ("4K", 4096), ("2G", 2 * GIB), ("2 G", None), ("B", None)]
)
def test_environment_values_know_more_suffixes(text: str, size_bytes: int | None) -> None:
    assert parse_environment_value(text) == size_bytes


def test_environment_entries() -> None:
    assert parse_environment("0=1G,GPU-aa11=512MB") == [("0", GIB), ("GPU-aa11", 512 * MIB)]
    assert parse_environment("0=1G,oops,=2G") == [("0", GIB), ("oops", None), ("", None)]
    assert parse_environment("") == []


@given(st.text(max_size=40))
def test_any_environment_text_has_a_meaning(text: str) -> None:
    for _, size_bytes in parse_environment(text):
        assert size_bytes is None or size_bytes >= 0


@given(st.integers(min_value=0, max_value=1 << 20))
def test_floored_display_never_shows_more_than_is_set(mib: int) -> None:
    shown = parse_command_value(show_value(mib * MIB, f"{mib}M", floor_g=True))
    assert shown is not None
    assert mib * MIB - GIB < shown <= mib * MIB
    assert show_value(mib * MIB, f"{mib}M", floor_g=False) == f"{mib}M"


def test_devices_by_ordinal_uuid_and_unique_prefix() -> None:
    visible = [A, B, C]
    assert [resolve_device(d, visible) for d in ("0", "2", A, "GPU-b")] == [A, C, A, C]
    assert [resolve_device(d, visible) for d in ("3", "-1", "GPU-aa", "GPU-x", "", "bb33")] == [None] * 6


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        (None, [A, B, C]),
        ("", []),
        ("2,0", [C, A]),
        ("1,9,0", [B]),
        ("GPU-bb,GPU-aa11", [C, A]),
        ("0,GPU-aa11", []),
        ("-1", []),
    ],
)
def test_visible_devices_are_renumbered(spec: str | None, left: list[str]) -> None:
    assert visible_devices([A, B, C], spec) == left


def test_the_last_limit_set_for_a_device_wins_and_unknown_devices_are_ignored() -> None:
    assert server_limits([("0", 1), (A, 2), ("1", 3), ("9", 4)], [A, B]) == {A: 2, B: 3}
    assert server_limits([(A, 2), ("0", 1)], [A, B]) == {A: 1}


def lowered(
    own: str | None, *, visible: tuple[str, ...] = (A,), malformed: bool = True, invisible: bool = True
) -> dict[str, int]:
    return client_limits({A: 4 * GIB}, own, list(visible), malformed, invisible)


def test_a_client_only_lowers() -> None:
    assert lowered(None) == {A: 4 * GIB}
    assert lowered("0=1G") == {A: GIB}
    assert lowered(f"{A}=9G") == {A: 4 * GIB}
    assert lowered("0=1G,1=2G", visible=(A, B)) == {A: GIB, B: 2 * GIB}


def test_one_invisible_entry_drops_every_limit() -> None:
    assert lowered("0=2G,1=4G") == {}
    assert lowered("0=2G,GPU-ffff=4G") == {}
    assert lowered("0=2G,1=4G", invisible=False) == {A: 4 * GIB}


def test_a_malformed_entry_follows_its_switch() -> None:
    assert lowered("0=2gb") == {}
    assert lowered("0=2gb", malformed=False) == {A: 4 * GIB}


@given(st.integers(0, 64), st.integers(0, 64))
def test_a_visible_entry_never_raises(server: int, own: int) -> None:
    assert client_limits({A: server}, f"0={own}M", [A], True, True)[A] <= server


def test_simulated_uuids_are_well_formed() -> None:
    import uuid

    assert [str(uuid.UUID(gpu_uuid(i).removeprefix("GPU-"))) for i in range(20)] == [gpu_uuid(i)[4:] for i in range(20)]
