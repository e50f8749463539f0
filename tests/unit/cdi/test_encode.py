"""What is written, and every rule that keeps something from being written."""

import json

import pytest

from cdi.decode import decode_json
from cdi.encode import encode_spec
from cdi.errors import InvalidSpecError
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from tests.unit.cdi.support import KIND, allocation_spec, check_file

ENV = ContainerEdits(env=("A=1",))
BIND = ("bind", "rw")


def test_bytes_of_an_allocation() -> None:
    assert encode_spec(allocation_spec()) == (
        b'{"cdiVersion":"0.3.0","devices":[{"containerEdits":{"env":["GPUFRAC_ALLOCATION=0123456789abcdef0123",'
        b'"GPUFRAC_MEMORY_LIMIT_BYTES=8589934592","CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps","NVIDIA_VISIBLE_DEVICES=void"],'
        b'"mounts":[{"containerPath":"/tmp/nvidia-mps","hostPath":"/run/gpufrac/gpu0/pipe",'
        b'"options":["rbind","rw","nosuid","nodev"]}]},"name":"s0123456789abcdef0123"}],"kind":"gpufrac.dev/allocation"}\n'
    )


def test_everything_at_once_fits_the_schema_and_comes_back() -> None:
    edits = ContainerEdits(
        env=("A=1", "B=", "C=a=b\nc"),
        device_nodes=(
            DeviceNode("/dev/nvidia0", "/dev/host0", "c", 195, 0, 0o666, "rw", 0, 44),
            DeviceNode("/dev/nvidiactl", permissions="none"),
            DeviceNode("/dev/fifo", type="p"),
        ),
        mounts=(
            Mount("/a", "/b", BIND),
            Mount("tmpfs", "/c", ("size=1m",), "tmpfs"),
            Mount("/", "/host", ("rbind", "ro")),
        ),
        hooks=(Hook("createContainer", "/usr/bin/hook", ("hook", "x"), ("E=1",), 5),),
        additional_gids=(44, 4294967295),
        intel_rdt=IntelRdt("clos", "L3:0=f", "MB:0=10", ("L3:0=1",), True),
        net_devices=(NetDevice("eth0", "net0"),),
    )
    spec = Spec("v.w/cls.d", (Device("0:1", edits, {"example.com/a": "b"}), Device("z", ENV)), ENV, {"c": ""})
    raw = check_file(encode_spec(spec))
    assert raw["cdiVersion"] == "1.1.0"
    assert raw["devices"][0]["containerEdits"]["deviceNodes"][0]["fileMode"] == 438
    assert decode_json(encode_spec(spec)) == ("1.1.0", spec)


def test_equal_specs_give_equal_bytes() -> None:
    a, b = Device("a", ENV), Device("b", ENV)
    assert encode_spec(Spec(KIND, (b, a), ContainerEdits())) == encode_spec(Spec(KIND, (a, b)))
    assert b"containerEdits" not in encode_spec(Spec(KIND, (a,), ContainerEdits())).replace(
        b'"containerEdits":{"env"', b""
    )
    assert encode_spec(Spec(KIND, (a,), annotations={"x": "1", "y": "2"})) == encode_spec(
        Spec(KIND, (a,), annotations={"y": "2", "x": "1"})
    )


def test_text_is_kept_as_it_is() -> None:
    value = 'A=\t"é\u2028𝄞'
    data = encode_spec(Spec(KIND, (Device("d", ContainerEdits(env=(value,))),)))
    assert json.loads(data)["devices"][0]["containerEdits"]["env"] == [value]


NODE = {"type": "c", "major": 195}
BAD_EDITS = {
    "env without =": (ContainerEdits(env=("NOEQ",)), "env[0]: 'NOEQ'"),
    "env without a name": (ContainerEdits(env=("A=1", "=V")), "env[1]: '=V'"),
    "env twice": (ContainerEdits(env=("A=1", "A=2")), "variable 'A' appears more than once"),
    "env with NUL": (ContainerEdits(env=("A=\0",)), "NUL"),
    "env that is no Unicode": (ContainerEdits(env=("A=\ud800",)), "Unicode"),
    "mount without options": (ContainerEdits(mounts=(Mount("/a", "/b"),)), "bind or rbind is needed"),
    "mount without bind": (ContainerEdits(mounts=(Mount("/a", "/b", ("ro",)),)), "bind or rbind is needed"),
    "mount neither ro nor rw": (ContainerEdits(mounts=(Mount("/a", "/b", ("bind",)),)), "one of ro and rw"),
    "mount ro and rw": (ContainerEdits(mounts=(Mount("/a", "/b", (*BIND, "ro")),)), "one of ro and rw"),
    "mount from nothing": (ContainerEdits(mounts=(Mount("", "/b", BIND),)), "mounts[0].hostPath"),
    "mount to nothing": (ContainerEdits(mounts=(Mount("/a", "", BIND),)), "mounts[0].containerPath"),
    "mount from a relative path": (ContainerEdits(mounts=(Mount("a", "/b", BIND),)), "hostPath: 'a'"),
    "mount to a relative path": (ContainerEdits(mounts=(Mount("/a", "b", BIND),)), "containerPath: 'b'"),
    "mount with ..": (ContainerEdits(mounts=(Mount("/a/../etc", "/b", BIND),)), "hostPath: '/a/../etc'"),
    "mount with a slash at the end": (ContainerEdits(mounts=(Mount("/a", "/b/", BIND),)), "containerPath: '/b/'"),
    "mount with //": (ContainerEdits(mounts=(Mount("//a", "/b", BIND),)), "hostPath: '//a'"),
    "mount over the root": (ContainerEdits(mounts=(Mount("/a", "/", BIND),)), "would hide"),
    "mount with NUL": (ContainerEdits(mounts=(Mount("/a\0", "/b", BIND),)), "NUL"),
    "mounts to one place": (
        ContainerEdits(mounts=(Mount("/a", "/b", BIND), Mount("/c", "/b", BIND))),
        "containerPath '/b' appears more than once",
    ),
    "node without a path": (ContainerEdits(device_nodes=(DeviceNode(""),)), "deviceNodes[0].path: must not be empty"),
    "node with a relative path": (ContainerEdits(device_nodes=(DeviceNode("dev/x"),)), "path: 'dev/x'"),
    "node with a relative host path": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", "x"),)), "hostPath: 'x'"),
    "node of an unknown type": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", type="x"),)), "type: 'x'"),
    "node number without a type": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", major=195),)), "is needed with"),
    "node with a negative number": (
        ContainerEdits(device_nodes=(DeviceNode("/dev/x", type="c", major=-1),)),
        "major: -1",
    ),
    "node number beyond int64": (
        ContainerEdits(device_nodes=(DeviceNode("/dev/x", type="c", major=1, minor=2**63),)),
        "minor: 9223372036854775808",
    ),
    "node with permissions": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", permissions="rx"),)), "'rx'"),
    "node with permissions twice": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", permissions="rr"),)), "'rr'"),
    "node with an octal mode read as decimal": (
        ContainerEdits(device_nodes=(DeviceNode("/dev/x", file_mode=20666),)),
        "fileMode: 20666",
    ),
    "node owner": (ContainerEdits(device_nodes=(DeviceNode("/dev/x", uid=2**32),)), "uid: 4294967296"),
    "nodes at one path": (ContainerEdits(device_nodes=(DeviceNode("/dev/x"),) * 2), "path '/dev/x' appears more than"),
    "hook name": (ContainerEdits(hooks=(Hook("precreate", "/x"),)), "hookName: 'precreate'"),
    "hook without a path": (ContainerEdits(hooks=(Hook("prestart", ""),)), "hooks[0].path: must not be empty"),
    "hook with a relative path": (ContainerEdits(hooks=(Hook("prestart", "x"),)), "hooks[0].path: 'x'"),
    "hook env": (ContainerEdits(hooks=(Hook("prestart", "/x", env=("X",)),)), "hooks[0].env[0]: 'X'"),
    "hook timeout": (ContainerEdits(hooks=(Hook("prestart", "/x", timeout=0),)), "timeout: 0"),
    "group root": (ContainerEdits(additional_gids=(0,)), "group 0"),
    "group below 0": (ContainerEdits(additional_gids=(-1,)), "additionalGids[0]: -1"),
    "RDT class": (ContainerEdits(intel_rdt=IntelRdt("a/b")), "closID: 'a/b'"),
    "net device without a name": (ContainerEdits(net_devices=(NetDevice("eth0", ""),)), "must not be empty"),
    "net device twice": (ContainerEdits(net_devices=(NetDevice("e", "a"), NetDevice("e", "b"))), "'e' appears more"),
}


def test_the_top_rdt_class_has_a_name_of_its_own() -> None:
    edits = ContainerEdits(intel_rdt=IntelRdt("/"))
    assert b'"closID":"/"' in encode_spec(Spec(KIND, (Device("d", edits),)))


@pytest.mark.parametrize("case", BAD_EDITS)
def test_bad_edits_are_refused_at_device_and_spec(case: str) -> None:
    edits, text = BAD_EDITS[case]
    for spec in (Spec(KIND, (Device("d", edits),)), Spec(KIND, (Device("d", ENV),), edits)):
        with pytest.raises(InvalidSpecError) as caught:
            encode_spec(spec)
        assert text in str(caught.value)
        assert str(caught.value).startswith("cannot write CDI spec of kind 'gpufrac.dev/allocation': ")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec("allocation", (Device("d", ENV),)), "kind: 'allocation'"),
        (Spec("ven/cls/d", (Device("d", ENV),)), "kind: 'ven/cls/d'"),
        (Spec("vv/" + "c" * 64, (Device("d", ENV),)), "kind: the vendor may have 253 characters and the class 63"),
        (Spec(KIND), "at least one device"),
        (Spec(KIND, (Device("d"),)), "devices[0].containerEdits: must not be empty"),
        (Spec(KIND, (Device("d/e", ENV),)), "devices[0].name: 'd/e'"),
        (Spec(KIND, (Device("", ENV),)), "devices[0].name: ''"),
        (Spec(KIND, (Device("d", ENV), Device("d", ENV))), "device name 'd' appears more than once"),
        (Spec(KIND, (Device("d", ENV),), annotations={"a b": ""}), "annotations: key 'a b'"),
        (Spec(KIND, (Device("d", ENV, {"x/y/z": ""}),)), "devices[0].annotations: key 'x/y/z'"),
        (Spec(KIND, (Device("d", ENV),), annotations={"a": "x" * 262144}), "more than 262144 bytes"),
    ],
)
def test_bad_specs_are_refused(spec: Spec, text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        encode_spec(spec)
    assert text in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        encode_spec(Spec("x", (Device("-", ContainerEdits(env=("A",), mounts=(Mount("a", "b"),))),)))
    assert len(caught.value.faults) == 7
