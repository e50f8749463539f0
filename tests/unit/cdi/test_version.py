import pytest

from cdi.model import ContainerEdits, Device, DeviceNode, IntelRdt, Mount, NetDevice, Spec
from cdi.version import KNOWN_VERSIONS, is_older, minimum_version, parse_version

ENV = ContainerEdits(env=("A=1",))


def _with(edits: ContainerEdits) -> tuple[Spec, Spec]:
    """The edits at a device, and at the spec."""
    return Spec("ven/cls", (Device("d", edits),)), Spec("ven/cls", (Device("d", ENV),), edits)


@pytest.mark.parametrize(
    ("version", "edits"),
    [
        ("0.3.0", ENV),
        ("0.3.0", ContainerEdits(mounts=(Mount("/a", "/b", ("bind", "rw")),), device_nodes=(DeviceNode("/dev/x"),))),
        ("0.4.0", ContainerEdits(mounts=(Mount("/a", "/b", (), "bind"),))),
        ("0.5.0", ContainerEdits(device_nodes=(DeviceNode("/dev/x", "/dev/y"),))),
        ("0.7.0", ContainerEdits(additional_gids=(5,))),
        ("0.7.0", ContainerEdits(intel_rdt=IntelRdt("clos"))),
        ("1.1.0", ContainerEdits(intel_rdt=IntelRdt(schemata=("L3:0=f",)))),
        ("1.1.0", ContainerEdits(intel_rdt=IntelRdt(enable_monitoring=True))),
        ("1.1.0", ContainerEdits(net_devices=(NetDevice("eth0", "net0"),))),
    ],
)
def test_fields_decide_wherever_they_are(version: str, edits: ContainerEdits) -> None:
    assert [minimum_version(spec) for spec in _with(edits)] == [version, version]


@pytest.mark.parametrize(
    ("version", "spec"),
    [
        ("0.3.0", Spec("v.w/cls", (Device("d0", ENV),))),
        ("0.5.0", Spec("ven/cls", (Device("d", ENV), Device("0", ENV)))),
        ("0.6.0", Spec("ven/cls.d", (Device("d", ENV),))),
        ("0.6.0", Spec("ven/cls", (Device("d", ENV, {"a": "b"}),))),
        ("0.6.0", Spec("ven/cls", (Device("0", ENV),), annotations={"a": "b"})),
    ],
)
def test_names_and_annotations_decide(version: str, spec: Spec) -> None:
    assert minimum_version(spec) == version


def test_known_versions() -> None:
    assert parse_version("0.5.0") == parse_version("v0.5.0") == "0.5.0"
    for unknown in ("", "0.5", "1.0", "vv0.5.0", "0.2.0", "1.2.0", " 0.5.0", "0.9.0"):
        assert parse_version(unknown) is None
    assert [is_older(v, "0.7.0") for v in KNOWN_VERSIONS] == [True] * 4 + [False] * 4
    assert is_older("0.8.0", "1.0.0")
