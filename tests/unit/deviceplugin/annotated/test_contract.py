"""Every row of the annotation contract's tables: keys, sizes, defaults, modes, portions, device lists, errors."""

import pytest

from deviceplugin.annotated.contract import (
    DEVICES,
    LIMIT,
    MAX_DEVICES,
    MODE,
    PORTION,
    REQUEST,
    SUFFIXES,
    Ask,
    ContractError,
    ask_of,
    parse_key,
)
from mpsd.common.errors import GpufracError
from mpsd.gpu.model import MIB, Mode

PREFIX = "nvidia.com/container."
GIB_MIB = 1024
PART = "; a fraction of a GPU is for the scheduler, which makes memory of it (annotation gpu-fraction)"
QUANTITY = "must be a Kubernetes quantity such as 8Gi, 512Mi or 1G"
MODES = "must be time-slicing or sm-sharing"
PORTION_RULE = "must be a decimal number greater than 0 and at most 1"


def key(suffix: str, container: str = "main") -> str:
    return f"{PREFIX}{container}{suffix}"


def asked(values: dict[str, str], container: str = "main") -> Ask | None:
    """`values` by suffix."""
    return ask_of({key(suffix): text for suffix, text in values.items()}, container, PREFIX)


def ask(values: dict[str, str]) -> Ask:
    found = asked(values)
    assert found is not None
    return found


def error(values: dict[str, str]) -> ContractError:
    with pytest.raises(ContractError) as caught:
        asked(values)
    assert str(caught.value).isprintable()
    return caught.value


# -- examples


def test_the_example_with_time_slicing() -> None:
    annotations = {
        "nvidia.com/container.trainer.gpu-memory.request": "4Gi",
        "nvidia.com/container.trainer.gpu-memory.limit": "8Gi",
        "nvidia.com/container.trainer.gpus.devices": "GPU-1d2e0000-aaaa-bbbb-cccc-000000000001",
    }
    assert ask_of(annotations, "trainer", PREFIX) == Ask(
        request_bytes=4096 * MIB,
        limit_bytes=8192 * MIB,
        mode=Mode.TIME_SLICING,
        thread_percent=None,
        devices=("GPU-1d2e0000-aaaa-bbbb-cccc-000000000001",),
    )
    assert ask_of(annotations, "sidecar", PREFIX) is None


def test_the_example_with_shared_sms_on_two_gpus() -> None:
    annotations = {
        "nvidia.com/container.llm.gpu-memory.limit": "20480Mi",
        "nvidia.com/container.llm.gpu-compute.mode": "sm-sharing",
        "nvidia.com/container.llm.gpu-compute.portion": "0.5",
        "nvidia.com/container.llm.gpus.devices": "GPU-aaa,GPU-bbb",
    }
    assert ask_of(annotations, "llm", PREFIX) == Ask(
        request_bytes=20480 * MIB,
        limit_bytes=20480 * MIB,
        mode=Mode.SM_SHARING,
        thread_percent=50,
        devices=("GPU-aaa", "GPU-bbb"),
    )


def test_what_kais_binder_writes() -> None:
    uuid = "GPU-1d2e0000-aaaa-bbbb-cccc-000000000001"
    annotations = {
        "nvidia.com/container.trainer.gpu-memory.request": "4096Mi",
        "nvidia.com/container.trainer.gpu-memory.limit": "8192Mi",
        "nvidia.com/container.trainer.gpu-compute.mode": "sm-sharing",
        "nvidia.com/container.trainer.gpus.devices": f"k8s.device-plugin.nvidia.com/gpu={uuid}",
        "received-resource-type": "Fraction",
        "kai.scheduler/numa-placement-predicted": "{}",
    }
    assert ask_of(annotations, "trainer", PREFIX) == Ask(
        request_bytes=4096 * MIB,
        limit_bytes=8192 * MIB,
        mode=Mode.SM_SHARING,
        devices=(f"k8s.device-plugin.nvidia.com/gpu={uuid}",),
    )


def test_what_kais_binder_writes_for_a_fraction() -> None:
    """`gpu-fraction: "0.5"` of a GPU labelled 24576 MiB."""
    annotations = {
        "gpu-fraction": "0.5",
        "nvidia.com/container.trainer.gpu-memory.request": "12288Mi",
        "nvidia.com/container.trainer.gpus.devices": "GPU-1d2e0000-aaaa-bbbb-cccc-000000000001",
    }
    found = ask_of(annotations, "trainer", PREFIX)
    assert found is not None
    assert (found.request_bytes, found.limit_bytes) == (12288 * MIB, 12288 * MIB)


def test_kais_reservation_pod_is_left_alone() -> None:
    annotations = {
        "run.ai/reserve_for_gpu_index": "GPU-1d2e0000-aaaa-bbbb-cccc-000000000001",
        "karpenter.sh/do-not-disrupt": "true",
        "nvidia.com/container.resource-reservation.gpu-compute.mode": "sm-sharing",
    }
    assert ask_of(annotations, "resource-reservation", PREFIX) is None


# -- keys


@pytest.mark.parametrize("prefix", [PREFIX, "example.com/container.", "example.com/", ""])
def test_prefixes(prefix: str) -> None:
    annotations = {f"{prefix}main.gpu-memory.limit": "4Gi"}
    assert ask_of(annotations, "main", prefix) is not None
    assert ask_of(annotations, "main", "other.com/container.") is None


def test_a_name_that_begins_like_another_does_not_match() -> None:
    annotations = {key(LIMIT, "trainer"): "4Gi", key(LIMIT, "trainer-2"): "8Gi", key(MODE, "trainer-2"): "sm-sharing"}
    first, second = (ask_of(annotations, name, PREFIX) for name in ("trainer", "trainer-2"))
    assert first == Ask(request_bytes=4096 * MIB, limit_bytes=4096 * MIB, mode=Mode.TIME_SLICING)
    assert second == Ask(request_bytes=8192 * MIB, limit_bytes=8192 * MIB, mode=Mode.SM_SHARING)
    assert ask_of(annotations, "trainer-", PREFIX) is None


def test_several_containers_of_a_pod() -> None:
    annotations = {key(LIMIT, "a"): "1Gi", key(REQUEST, "b"): "2Gi", key(LIMIT, "not-in-the-pod"): "nonsense"}
    for name, gib in (("a", 1), ("b", 2)):
        found = ask_of(annotations, name, PREFIX)
        assert found is not None
        assert found.limit_bytes == gib * 1024 * MIB


@pytest.mark.parametrize(
    "other",
    [
        "nvidia.com/container.main.gpu-memory.limits",
        "nvidia.com/container.main.gpu-memory.Limit",
        "nvidia.com/containers.main.gpu-memory.limit",
        "example.com/container.main.gpu-memory.limit",
        "nvidia.com/container.other.gpu-memory.limit",
        "gpu-memory",
        "gpu-fraction",
        "kai.scheduler/container.main.gpu-memory.portion.limit",
    ],
)
def test_other_keys_are_not_read(other: str) -> None:
    assert ask_of({other: "nonsense"}, "main", PREFIX) is None
    assert ask_of({other: "nonsense", key(LIMIT): "1Gi"}, "main", PREFIX) is not None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_legal_keys(suffix: str) -> None:
    for name in ("a", "a-b", "0", "n" * 63):
        assert parse_key(key(suffix, name), PREFIX) == (name, suffix)
    for name in ("", "-a", "a-", "A", "a.b", "a_b", "n" * 64, "\u00e9"):
        assert parse_key(key(suffix, name), PREFIX) is None
    assert parse_key(f"{key(suffix)}s", PREFIX) is None
    assert parse_key(key(suffix).upper(), PREFIX) is None


# -- is it fractional, and what is left out


@pytest.mark.parametrize(
    "values",
    [
        {},
        {MODE: "sm-sharing"},
        {MODE: "nonsense"},
        {PORTION: "nonsense"},
        {DEVICES: "GPU-aaa"},
        {MODE: "", PORTION: "", DEVICES: ",,"},
    ],
)
def test_without_a_memory_key_the_others_mean_nothing(values: dict[str, str]) -> None:
    assert asked(values) is None


@pytest.mark.parametrize(
    ("values", "request_mib", "limit_mib"),
    [
        ({REQUEST: "4Gi"}, 4096, 4096),
        ({LIMIT: "8Gi"}, 8192, 8192),
        ({REQUEST: "4Gi", LIMIT: "8Gi"}, 4096, 8192),
        ({REQUEST: "4Gi", LIMIT: "4096Mi"}, 4096, 4096),
        ({REQUEST: "1048575.5Ki", LIMIT: "1048575.1Ki"}, 1024, 1024),
    ],
)
def test_one_size_stands_for_the_other(values: dict[str, str], request_mib: int, limit_mib: int) -> None:
    assert (ask(values).request_bytes, ask(values).limit_bytes) == (request_mib * MIB, limit_mib * MIB)


def test_defaults() -> None:
    assert ask({LIMIT: "1Mi"}) == Ask(
        request_bytes=MIB, limit_bytes=MIB, mode=Mode.TIME_SLICING, thread_percent=None, devices=()
    )


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        ((REQUEST, LIMIT, MODE, PORTION, DEVICES), REQUEST),
        ((LIMIT, MODE, PORTION, DEVICES), LIMIT),
        ((MODE, PORTION, DEVICES), MODE),
        ((PORTION, DEVICES), PORTION),
        ((DEVICES,), DEVICES),
    ],
)
def test_the_first_error_wins(broken: tuple[str, ...], first: str) -> None:
    sound = {REQUEST: "1Gi", LIMIT: "1Gi", MODE: "sm-sharing", PORTION: "1", DEVICES: "0"}
    assert error(sound | dict.fromkeys(broken, ",")).key == key(first)


# -- sizes

SIZES = [
    ("4Gi", 4096),
    ("4294967296", 4096),
    ("2048Mi", 2048),
    ("1024Ki", 1),
    ("100M", 96),
    ("500M", 477),
    ("1000M", 954),
    ("1G", 954),
    ("1024M", 977),
    ("2048M", 1954),
    ("4096M", 3907),
    ("5G", 4769),
    ("1048576", 1),
    ("1048577", 2),
    ("1.5Gi", 1536),
    (".5Gi", 512),
    ("5.Gi", 5 * GIB_MIB),
    ("+1Gi", 1024),
    ("0.1Gi", 103),
    ("1e9", 954),
    ("1E9", 954),
    ("1Ti", 1024 * GIB_MIB),
    ("1000000000000m", 954),
    ("7680Mi", 7680),
    ("8Gi", 8192),
    ("1048575.1", 1),
]


@pytest.mark.parametrize("suffix", [REQUEST, LIMIT])
@pytest.mark.parametrize(("text", "mib"), SIZES)
def test_sizes(suffix: str, text: str, mib: int) -> None:
    assert ask({suffix: text}).request_bytes == ask({suffix: text}).limit_bytes == mib * MIB


BARE = "must be at least 1Mi, and a number without a suffix counts bytes"
BAD_SIZES = [
    ("1048575", f'{BARE}; did you mean "1048575Mi"?'),
    ("4096", f'{BARE}; did you mean "4096Mi"?'),
    ("1M", "must be at least 1Mi"),
    ("500Ki", "must be at least 1Mi"),
    ("0", "must be at least 1Mi"),
    ("100m", "must be at least 1Mi"),
    ("-0", "must be at least 1Mi"),
    ("Mi", "must be at least 1Mi"),
    ("1E3", "must be at least 1Mi"),
    ("-1Gi", "must not be negative"),
    ("", QUANTITY),
    ("  2048Mi  ", f'{QUANTITY}; did you mean "2048Mi"?'),
    ("abc", QUANTITY),
    ("4GB", f'{QUANTITY}; did you mean "4G"?'),
    ("K", QUANTITY),
    ("1K", f'{QUANTITY}; did you mean "1k"?'),
    ("4gi", f'{QUANTITY}; did you mean "4Gi"?'),
    ("4GiB", f'{QUANTITY}; did you mean "4Gi"?'),
    ("4 Gi", f'{QUANTITY}; did you mean "4Gi"?'),
    ("0x10", QUANTITY),
    ("1_000", f'{QUANTITY}; did you mean "1000"?'),
    ("0.5Gi,", QUANTITY),
    ("50%", f"{QUANTITY}{PART}"),
    ("0.5", f"must be at least 1Mi{PART}"),
    ("abc%", QUANTITY),
    (".25", f"must be at least 1Mi{PART}"),
    ("5e-1", f"must be at least 1Mi{PART}"),
    ("0", "must be at least 1Mi"),
    ("0.5k", "must be at least 1Mi"),
    ("NaN", QUANTITY),
    ("\u0664Gi", QUANTITY),
    ("8Ei", "must be at most 9223372036854775807 (2^63-1)"),
    ("16E", "must be at most 9223372036854775807 (2^63-1)"),
    ("1e2147483648", "must be at most 9223372036854775807 (2^63-1)"),
    ("9223372036854775807", "must be at most 8796093022207Mi"),
    ("1" * 129, "must be at most 128 characters long"),
]


@pytest.mark.parametrize("suffix", [REQUEST, LIMIT])
@pytest.mark.parametrize(("text", "rule"), BAD_SIZES)
def test_bad_sizes(suffix: str, text: str, rule: str) -> None:
    found = error({suffix: text})
    assert (found.key, found.value, found.detail) == (key(suffix), text, rule)


def test_the_request_is_at_most_the_limit() -> None:
    found = error({REQUEST: "8Gi", LIMIT: "4Gi", MODE: "nonsense"})
    assert str(found) == (
        'cannot use annotation nvidia.com/container.main.gpu-memory.request: "8Gi": must be at most the limit '
        "(4Gi in nvidia.com/container.main.gpu-memory.limit), counted in whole MiB"
    )


def test_a_limit_beyond_any_gpu_is_the_planners_to_refuse() -> None:
    assert ask({LIMIT: "1Pi"}).limit_bytes == 2**50


def test_an_error_is_a_value_and_one_sentence() -> None:
    found = error({LIMIT: "4GB"})
    assert isinstance(found, GpufracError)
    assert str(found) == (
        'cannot use annotation nvidia.com/container.main.gpu-memory.limit: "4GB": '
        'must be a Kubernetes quantity such as 8Gi, 512Mi or 1G; did you mean "4G"?'
    )


@pytest.mark.parametrize("suffix", [LIMIT, MODE, PORTION, DEVICES])
def test_long_values_are_shown_short(suffix: str) -> None:
    assert len(str(error({LIMIT: "1Gi", suffix: "x,\n" * 80_000}))) < 400


# -- mode


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("time-slicing", Mode.TIME_SLICING),
        ("sm-sharing", Mode.SM_SHARING),
        (" sm-sharing\n", Mode.SM_SHARING),
        ("\u00a0\u3000sm-sharing\u2028", Mode.SM_SHARING),
    ],
)
def test_modes(text: str, mode: Mode) -> None:
    assert ask({LIMIT: "1Gi", MODE: text}).mode is mode


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", ""),
        ("  ", ""),
        ("SM-Sharing", "sm-sharing"),
        ("sm_sharing", "sm-sharing"),
        ("time slicing", "time-slicing"),
        ("TIME-SLICING", "time-slicing"),
        ("mps", ""),
        ("sm-sharing,time-slicing", ""),
        ("\x1csm-sharing", "sm-sharing"),
    ],
)
def test_bad_modes(text: str, meant: str) -> None:
    found = error({LIMIT: "1Gi", MODE: text})
    assert (found.key, found.value) == (key(MODE), text)
    assert found.detail == MODES + (f'; did you mean "{meant}"?' if meant else "")


# -- portion


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("1", 100),
        ("1.0", 100),
        ("0.5", 50),
        ("5e-1", 50),
        ("  0.5\t", 50),
        ("0.333", 33),
        (repr(1 / 3), 33),
        ("0.336", 33),
        ("0.125", 12),
        ("0.29", 28),
        ("0.005", 1),
        ("0.0049", 1),
        ("1e-3", 1),
        ("0.0000001", 1),
        ("+0.5", 50),
        (".5", 50),
        ("1.", 100),
        ("0.99999999999999999999", 100),
    ],
)
def test_portions(text: str, percent: int) -> None:
    assert ask({LIMIT: "1Gi", MODE: "sm-sharing", PORTION: text}).thread_percent == percent
    assert ask({LIMIT: "1Gi", MODE: "time-slicing", PORTION: text}).thread_percent is None
    assert ask({LIMIT: "1Gi", PORTION: text}).thread_percent is None


@pytest.mark.parametrize("mode", ["sm-sharing", "time-slicing"])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, "") for text in ("0", "0.0", "-0", "-0.5", "1.0000001", "1.5", "500m", "abc", "", "   ")),
        *((text, "") for text in ("NaN", "nan", "Inf", "+Infinity", "-Inf", "1e999", "1e-999", "0x1p-1", "1_0e-1")),
        *((text, "") for text in ("0,5", "\u0660.5", ".", "e-1", "0." + "0" * 200 + "1", "101", "101%", "0%")),
        ("50", "0.5"),
        ("100", "1"),
        ("50%", "0.5"),
        ("33%", "0.33"),
    ],
)
def test_bad_portions(mode: str, text: str, meant: str) -> None:
    """In every mode, though only sm-sharing uses one."""
    found = error({LIMIT: "1Gi", MODE: mode, PORTION: text})
    assert (found.key, found.value) == (key(PORTION), text)
    assert found.detail == PORTION_RULE + (f'; did you mean "{meant}"?' if meant else "")


def test_no_portion_is_no_cap() -> None:
    assert ask({LIMIT: "1Gi", MODE: "sm-sharing"}).thread_percent is None


# -- devices


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("GPU-abc,GPU-def", ("GPU-abc", "GPU-def")),
        ("0,1", ("0", "1")),
        ("all", ("all",)),
        ("none", ("none",)),
        ("void", ("void",)),
        (
            "k8s.device-plugin.nvidia.com/gpu=GPU-abc,k8s.device-plugin.nvidia.com/gpu=GPU-def",
            ("k8s.device-plugin.nvidia.com/gpu=GPU-abc", "k8s.device-plugin.nvidia.com/gpu=GPU-def"),
        ),
        (" GPU-abc , GPU-def\n", ("GPU-abc", "GPU-def")),
        ("0,0", ("0", "0")),
        ("nonsense", ("nonsense",)),
        ("", ()),
        (" \t", ()),
        (",".join(map(str, range(MAX_DEVICES))), tuple(map(str, range(MAX_DEVICES)))),
    ],
)
def test_devices(text: str, entries: tuple[str, ...]) -> None:
    assert ask({LIMIT: "1Gi", DEVICES: text}).devices == entries


def test_a_container_without_devices_can_be_reporter() -> None:
    assert ask({LIMIT: "1Gi"}).devices == ()


@pytest.mark.parametrize("text", [",", "GPU-a,", ",GPU-a", "GPU-a,,GPU-b", "GPU-a, ,GPU-b"])
def test_a_device_without_a_name(text: str) -> None:
    found = error({LIMIT: "1Gi", DEVICES: text})
    assert (found.key, found.value) == (key(DEVICES), text)
    assert found.detail == "must be names of devices with one comma between them: one of the names is empty"


def test_too_many_devices() -> None:
    assert error({LIMIT: "1Gi", DEVICES: "0," * MAX_DEVICES + "0"}).detail == "must name at most 128 devices"


# -- what the operator does on a malformed value when it fails closed, as we always do


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ({LIMIT: ""}, LIMIT),
        ({LIMIT: " 1Gi"}, LIMIT),
        ({REQUEST: "lots"}, REQUEST),
        ({LIMIT: "-1Gi"}, LIMIT),
        ({LIMIT: "1Ki"}, LIMIT),
        ({REQUEST: "2Gi", LIMIT: "1Gi"}, REQUEST),
        ({LIMIT: "1Gi", MODE: ""}, MODE),
        ({LIMIT: "1Gi", MODE: "mps"}, MODE),
        ({LIMIT: "1Gi", MODE: "Time-Slicing"}, MODE),
        ({LIMIT: "1Gi", PORTION: "half"}, PORTION),
        ({LIMIT: "1000Ti"}, None),
        ({LIMIT: "1Gi", DEVICES: "  "}, None),
        ({LIMIT: "1Gi", DEVICES: "nonsense"}, None),
        ({MODE: "mps", DEVICES: "nonsense", PORTION: "half"}, None),
    ],
)
def test_errors_by_input(values: dict[str, str], outcome: str | None) -> None:
    if outcome is None:
        asked(values)
    else:
        assert error(values).key == key(outcome)
