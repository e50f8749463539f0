"""Annotations of whatever content: sizes agree with quantities, portions with arithmetic, and nothing crashes."""

from math import ceil

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deviceplugin.annotated.contract import (
    DEVICES,
    LIMIT,
    MAX_FINDINGS,
    MODE,
    PORTION,
    REQUEST,
    SUFFIXES,
    Ask,
    ContractError,
    ask_of,
    findings,
    parse_key,
)
from deviceplugin.annotated.devices import KINDS, resolve
from mpsd.common.quantity import MAX_VALUE, QuantityError, parse_quantity
from mpsd.config.load import ConfigErrors, parse_config
from mpsd.config.model import NodeConfig
from mpsd.gpu.model import MIB
from tests.builders import info, uuid

HEAD = "apiVersion: gpufrac.dev/v1\nkind: NodeConfig\n"
PREFIX = "nvidia.com/container."
LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
PREFIXES = st.sampled_from((PREFIX, "example.com/container.", "example.com/", "x/c", ""))
QUANTITIES = st.text("0123456789+-.eEinumkKMGTP ", max_size=20) | st.builds(
    "{}{}".format, st.integers(0, 10**20), st.sampled_from(("", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti", "Ei"))
)
PORTIONS = st.floats(0, 1, exclude_min=True)


def outcome(values: dict[str, str]) -> Ask | ContractError | None:
    """For the container `main`, by suffix."""
    try:
        return ask_of({f"{PREFIX}main{suffix}": text for suffix, text in values.items()}, "main", PREFIX)
    except ContractError as error:
        return error


@given(QUANTITIES, st.sampled_from((REQUEST, LIMIT)))
def test_sizes_agree_with_quantities(text: str, suffix: str) -> None:
    ask = outcome({suffix: text})
    try:
        value = parse_quantity(text)
    except QuantityError:
        assert isinstance(ask, ContractError)
        return
    # It is rounded up to whole bytes first, as the operator does, and then judged.
    if ceil(value) < MIB or ceil(value / MIB) * MIB > MAX_VALUE:
        assert isinstance(ask, ContractError)
    else:
        assert isinstance(ask, Ask)
        assert ask.request_bytes == ask.limit_bytes == ceil(value / MIB) * MIB


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_request_is_never_above_its_limit(request_mib: int, limit_mib: int) -> None:
    ask = outcome({REQUEST: f"{request_mib}Mi", LIMIT: f"{limit_mib}Mi"})
    if request_mib > limit_mib:
        assert isinstance(ask, ContractError)
    else:
        assert isinstance(ask, Ask)
        assert (ask.request_bytes, ask.limit_bytes) == (request_mib * MIB, limit_mib * MIB)


def percent_of(portion: float) -> int:
    ask = outcome({LIMIT: "1Gi", MODE: "sm-sharing", PORTION: repr(portion)})
    assert isinstance(ask, Ask)
    assert ask.thread_percent is not None
    return ask.thread_percent


@given(PORTIONS, PORTIONS)
def test_portions_are_monotonic_and_from_1_to_100(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1 <= percent_of(low) <= percent_of(high) <= 100


@given(st.lists(PORTIONS, min_size=1, max_size=50))
def test_portions_of_one_gpu_are_never_too_much(portions: list[float]) -> None:
    """Where they sum to 1, their percents sum to 100, and one more for each that is below one percent."""
    assume(sum(portions) <= 1)
    percents = [percent_of(portion) for portion in portions]
    assert sum(percents) <= 100 + sum(portion < 0.01 for portion in portions)


@given(st.text(), st.text(), st.text(), st.text(), st.text())
def test_any_values_are_an_ask_or_an_error(request: str, limit: str, mode: str, portion: str, devices: str) -> None:
    for values in (
        {REQUEST: request},
        {LIMIT: limit},
        {LIMIT: "1Gi", MODE: mode},
        {LIMIT: "1Gi", PORTION: portion},
        {LIMIT: "1Gi", DEVICES: devices},
        {REQUEST: request, LIMIT: limit, MODE: mode, PORTION: portion, DEVICES: devices},
    ):
        ask = outcome(values)
        if isinstance(ask, ContractError):
            assert ask.value == values[ask.key.removeprefix(f"{PREFIX}main")]
            assert ask.detail
            assert str(ask).isprintable()
        else:
            assert ask is not None
            assert all(ask.devices)
            assert isinstance(resolve(ask.devices, [info()]), str | tuple)


@given(LABELS, LABELS, PREFIXES, st.sampled_from(SUFFIXES))
def test_names_never_mix(name: str, other: str, prefix: str, suffix: str) -> None:
    """Also where one name begins like the other."""
    for longer in (other, f"{name}-2", f"{name}2"):
        assume(longer != name)
        annotations = {f"{prefix}{longer}{LIMIT}": "2Gi", f"{prefix}{longer}{suffix}": "2Gi"}
        assert ask_of(annotations, name, prefix) is None
        ask = ask_of({**annotations, f"{prefix}{name}{LIMIT}": "1Gi"}, name, prefix)
        assert ask is not None
        assert ask.limit_bytes == 1024 * MIB
        assert parse_key(f"{prefix}{longer}{suffix}", prefix) == (longer, suffix)


@given(st.lists(LABELS, max_size=4), PREFIXES, st.sampled_from(SUFFIXES))
def test_a_legal_key_is_never_a_finding(names: list[str], prefix: str, suffix: str) -> None:
    annotations = {}
    for name in names:
        annotations[f"{prefix}{name}{suffix}"] = "x"
        annotations[f"{prefix}{name}{LIMIT}"] = "x"
        annotations[f"{prefix}{name}{MODE}"] = "sm-sharing"
    assert findings(annotations, prefix) == ()


PIECES = st.sampled_from(
    (
        *("nvidia.com/", "container.", "containers", "Container", "main", "gpu-memory", "gpus", "devices", "portion"),
        *("limit", "limits", "request", "gpu-compute", "mode", ".", "-", "_", "/", "kai.scheduler/", "\u0130", "\n"),
    )
)
KEYS = st.lists(PIECES, max_size=9).map("".join) | st.text(max_size=400)


@given(st.lists(KEYS, max_size=30), PREFIXES | st.text(max_size=20))
def test_findings_never_crash_and_are_bounded(keys: list[str], prefix: str) -> None:
    annotations = dict.fromkeys(keys, "")
    found = findings(annotations, prefix)
    assert len(found) <= MAX_FINDINGS
    assert found == findings(dict(reversed(annotations.items())), prefix)
    for finding in found:
        assert finding.key in annotations
        assert str(finding).startswith("annotation ")
        assert parse_key(finding.key, prefix) is None or finding.nearest


@given(KEYS, PREFIXES)
def test_what_is_suggested_is_legal(key: str, prefix: str) -> None:
    for finding in findings({key: ""}, prefix):
        if finding.nearest and not finding.nearest.startswith("kai.scheduler/"):
            assert parse_key(finding.nearest.replace("<container>", "main"), prefix)
            assert len(finding.nearest.rpartition("/")[2]) <= 63


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.data())
def test_devices_come_in_the_order_written_each_once(indices: list[int], data: st.DataObject) -> None:
    spellings = st.sampled_from(("{0}", "{1}", *(f"{kind}={name}" for kind in KINDS for name in ("{0}", "{1}"))))
    entries = [data.draw(spellings).format(index, uuid(index)) for index in indices]
    gpus = data.draw(st.permutations([info(index) for index in range(8)]))
    assert resolve(entries, gpus) == tuple(uuid(index) for index in dict.fromkeys(indices))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_prefix_the_config_takes_leaves_room_for_a_key(suffix: str) -> None:
    """The config can't import the contract: what it knows of the longest suffix is held to it here."""
    room = 63 - len("a") - max(map(len, SUFFIXES))

    def config(length: int) -> NodeConfig:
        prefix = f"example.com/{'c' * (length - 1)}."
        return parse_config(f"{HEAD}annotations: {{gpus: {{include: all}}, prefix: {prefix}}}\n", "f")

    longest = config(room).annotations
    assert longest is not None
    assert parse_key(f"{longest.prefix}a{suffix}", longest.prefix) == ("a", suffix)
    with pytest.raises(ConfigErrors):
        config(room + 1)
