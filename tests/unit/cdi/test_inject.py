"""What a container gets."""

import copy
from typing import Any

import pytest

from cdi.errors import DeviceNodeError, UnresolvableError
from cdi.inject import HostNode, apply, effective_env
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi.registry import build
from tests.unit.cdi.support import allocation_spec, env_spec, registry_of, spec_file

BIND = ("bind", "rw")


def _device(**edits: Any) -> Spec:
    return Spec("ven/cls", (Device("d", ContainerEdits(**edits)),))


def _apply(spec: Spec, oci_spec: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    return apply(registry_of(spec), [f"{spec.kind}={spec.devices[0].name}"], oci_spec or {}, **kwargs)


def test_limits_beat_the_pods_own_env() -> None:
    oci_spec = {"process": {"env": ["PATH=/bin", "CUDA_MPS_PIPE_DIRECTORY=/evil", "NVIDIA_VISIBLE_DEVICES=all"]}}
    before = copy.deepcopy(oci_spec)
    result = _apply(allocation_spec(), oci_spec)
    assert oci_spec == before
    assert result["process"]["env"][:3] == oci_spec["process"]["env"]
    assert effective_env(result) == {
        "PATH": "/bin",
        "GPUFRAC_ALLOCATION": "0123456789abcdef0123",
        "GPUFRAC_MEMORY_LIMIT_BYTES": "8589934592",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "NVIDIA_VISIBLE_DEVICES": "void",
    }


def test_effective_env_takes_the_last_and_skips_what_is_no_pair() -> None:
    assert effective_env({"process": {"env": ["A=1", "B", "A=2=3", "C="]}}) == {"A": "2=3", "C": ""}
    assert effective_env({}) == effective_env({"process": None}) == effective_env({"process": {"env": None}}) == {}


def test_the_last_of_two_devices_wins_one_variable() -> None:
    registry = registry_of(env_spec("ven/aa", "x"), env_spec("ven/bb", "y"))
    assert effective_env(apply(registry, ["ven/aa=x", "ven/bb=y"], {})) == {"D": "y"}
    assert effective_env(apply(registry, ["ven/bb=y", "ven/aa=x"], {})) == {"D": "x"}


def test_spec_edits_apply_once_per_file_and_before_its_devices() -> None:
    hook = Hook("createRuntime", "/bin/spec")
    devices = tuple(Device(n, ContainerEdits(hooks=(Hook("createRuntime", f"/bin/{n}"),))) for n in "ab")
    spec = Spec("ven/cls", devices, ContainerEdits(hooks=(hook,)))
    result = apply(registry_of(spec), ["ven/cls=b", "ven/cls=a"], {"hooks": {"createRuntime": [{"path": "/bin/own"}]}})
    assert [h["path"] for h in result["hooks"]["createRuntime"]] == ["/bin/own", "/bin/spec", "/bin/b", "/bin/a"]


def test_spec_edits_of_the_file_that_wins_the_device() -> None:
    low = Spec("ven/cls", (Device("d", ContainerEdits(env=("A=low",))),), ContainerEdits(env=("S=low",)))
    high = Spec("ven/cls", (Device("d", ContainerEdits(env=("A=high",))),), ContainerEdits(env=("S=high",)))
    registry = build([spec_file(low, "/etc/cdi/a.json", 0), spec_file(high, "/run/cdi/a.json", 1)])
    assert effective_env(apply(registry, ["ven/cls=d"], {})) == {"A": "high", "S": "high"}


def test_mounts_replace_by_destination_and_are_sorted_by_depth() -> None:
    spec = _device(
        mounts=(Mount("/x", "/a/b/c", BIND), Mount("/shm", "/dev/shm", BIND), Mount("tmpfs", "/z", (), "tmpfs"))
    )
    own = [{"destination": d, "source": "own"} for d in ("/proc", "/a/b/c/d", "/dev/shm", "/dev")]
    mounts = _apply(spec, {"mounts": own})["mounts"]
    assert [m["destination"] for m in mounts] == ["/proc", "/dev", "/z", "/dev/shm", "/a/b/c", "/a/b/c/d"]
    assert mounts[3] == {"destination": "/dev/shm", "source": "/shm", "options": ["bind", "rw"]}
    assert mounts[2] == {"destination": "/z", "source": "tmpfs", "type": "tmpfs"}


def test_mounts_of_the_container_keep_their_order_without_cdi_mounts() -> None:
    own = [{"destination": "/a/b"}, {"destination": "/a"}]
    assert _apply(env_spec("ven/cls", "d"), {"mounts": own})["mounts"] == own


def test_device_nodes_go_to_devices_and_to_the_cgroup() -> None:
    nodes = (
        DeviceNode("/dev/nvidia0", type="c", major=195, file_mode=0o666, permissions="rw"),
        DeviceNode("/dev/nvidiactl"),
        DeviceNode("/dev/none", type="c", major=1, minor=3, permissions="none"),
        DeviceNode("/dev/fifo", type="p"),
    )
    own = {
        "linux": {
            "devices": [{"path": "/dev/nvidia0"}, {"path": "/dev/own"}],
            "resources": {"devices": [{"allow": False}]},
        }
    }
    linux = _apply(_device(device_nodes=nodes), own, host_nodes={"/dev/nvidiactl": HostNode("c", 195, 255)})["linux"]
    assert linux["devices"] == [
        {"path": "/dev/own"},
        {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666},
        {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255},
        {"path": "/dev/none", "type": "c", "major": 1, "minor": 3},
        {"path": "/dev/fifo", "type": "p", "major": 0, "minor": 0},
    ]
    assert linux["resources"]["devices"] == [
        {"allow": False},
        {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"},
        {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rwm"},
        {"allow": True, "type": "c", "major": 1, "minor": 3},
    ]


def test_device_nodes_belong_to_the_containers_user() -> None:
    nodes = (DeviceNode("/dev/a", type="c", major=1), DeviceNode("/dev/b", type="c", major=1, uid=0, gid=0))
    for user, expected in (({"uid": 7, "gid": 8}, [(7, 8), (0, 0)]), ({"uid": 0, "gid": 0}, [(None, None), (0, 0)])):
        devices = _apply(_device(device_nodes=nodes), {"process": {"user": user}})["linux"]["devices"]
        assert [(d.get("uid"), d.get("gid")) for d in devices] == expected


def test_numbers_come_from_the_host_path() -> None:
    spec = _device(device_nodes=(DeviceNode("/dev/a", "/dev/host"), DeviceNode("/dev/b", "/dev/host", major=9)))
    devices = _apply(spec, host_nodes={"/dev/host": HostNode("b", 8, 1)})["linux"]["devices"]
    assert [(d["type"], d["major"], d["minor"]) for d in devices] == [("b", 8, 1), ("b", 9, 0)]
    with pytest.raises(DeviceNodeError, match="cannot inject device node '/dev/host': no such device on the host"):
        _apply(spec)
    with pytest.raises(DeviceNodeError, match="the spec says type c, the host b"):
        _apply(_device(device_nodes=(DeviceNode("/dev/a", type="c"),)), host_nodes={"/dev/a": HostNode("b", 8, 1)})


def test_groups_hooks_rdt_and_net_devices() -> None:
    spec = _device(
        additional_gids=(44, 45),
        hooks=(Hook("poststop", "/bin/h", ("h", "x"), ("E=1",), 3),),
        intel_rdt=IntelRdt("clos", schemata=("L3:0=f",)),
        net_devices=(NetDevice("eth1", "net1"),),
    )
    result = _apply(spec, {"process": {"user": {"uid": 1, "additionalGids": [44]}}})
    assert result == {
        "process": {"user": {"uid": 1, "additionalGids": [44, 45]}},
        "hooks": {"poststop": [{"path": "/bin/h", "args": ["h", "x"], "env": ["E=1"], "timeout": 3}]},
        "linux": {"intelRdt": {"closID": "clos", "schemata": ["L3:0=f"]}, "netDevices": {"eth1": {"name": "net1"}}},
    }


def test_unresolvable_devices_are_all_named() -> None:
    with pytest.raises(UnresolvableError) as caught:
        apply(registry_of(env_spec("ven/cls", "d")), ["ven/cls=d", "ven/cls=x", "bad", "ven/zz=y"], {})
    assert str(caught.value) == "unresolvable CDI devices ven/cls=x, bad, ven/zz=y"
    assert caught.value.names == ("ven/cls=x", "bad", "ven/zz=y")
    assert caught.value.reasons["ven/cls=x"] == "kind ven/cls has only d"
