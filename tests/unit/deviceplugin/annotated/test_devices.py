"""Device lists against the GPUs of a node."""

import pytest

from deviceplugin.annotated.devices import KINDS, resolve
from tests.builders import info, uuid

GPUS = [info(2), info(0), info(1)]
A, B, C = uuid(0), uuid(1), uuid(2)
KNOWN = f"this node has 0 = {A}, 1 = {B}, 2 = {C}"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), ()),
        ((A,), (A,)),
        ((C, A), (C, A)),
        (("1", "0"), (B, A)),
        (("all",), (A, B, C)),
        (("2", "all"), (C, A, B)),
        ((A, "0", f"nvidia.com/gpu={A}"), (A,)),
        *(((f"{kind}={name}",), expected) for kind in KINDS for name, expected in ((B, (B,)), ("1", (B,)))),
        *(((f"{kind}=all",), (A, B, C)) for kind in KINDS),
    ],
)
def test_devices_of_the_node(entries: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert resolve(entries, GPUS) == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (uuid(7), f'device "{uuid(7)}" is not on this node: {KNOWN}'),
        ("3", f'device "3" is not on this node: {KNOWN}'),
        ("nvidia.com/gpu=3", f'device "nvidia.com/gpu=3" is not on this node: {KNOWN}'),
        *(
            (name, f'device "{name}" is no GPU, and a container with a share of one needs at least one: {KNOWN}')
            for name in ("none", "void")
        ),
        *(
            (name, f'device "{name}" is a MIG device, and only whole GPUs are shared: {KNOWN}')
            for name in ("MIG-5fd4d87b-3c5e-4b1f-9f6e-0c1d2e3f4a5b", "MIG-GPU-a/1/0", "0:1", "nvidia.com/gpu=0:1")
        ),
        *(
            (name, f'device "{name}" is neither a GPU\'s UUID nor an index nor all: {KNOWN}')
            for name in ("gpu0", "00", "-1", " 0", "ALL", A.lower(), "nvidia.com/gpu=", "nvidia.com/gpu", "")
        ),
        *(
            (f"{kind}=0", f'device "{kind}=0" is of an unknown CDI kind: known are {", ".join(KINDS)}')
            for kind in ("amd.com/gpu", "nvidia.com/mig", "", "nvidia.com/gpu=nvidia.com/gpu")
        ),
    ],
)
def test_what_is_no_device_of_the_node(entry: str, reason: str) -> None:
    assert resolve((entry,), GPUS) == reason
    assert resolve((A, entry), GPUS) == reason


def test_a_node_without_gpus() -> None:
    assert resolve(("all",), ()) == 'device "all" is not on this node: it has no GPUs now'
    assert resolve((), ()) == ()


def test_reasons_are_short() -> None:
    reason = resolve(("x\n" * 100_000,), [info(i) for i in range(99)])
    assert isinstance(reason, str)
    assert reason.isprintable()
    assert reason.endswith(f"15 = {uuid(15)} and 83 more")
    assert len(reason) < 1000
