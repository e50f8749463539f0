"""The runtime's part: merging answers, CDI edits, the devices a container sees, processes."""

import os
import subprocess
from pathlib import Path

import pytest

from cdi.registry import scan
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.sim.runtime import (
    CreateContainerError,
    Edits,
    Runtime,
    merged_answer,
    resolve,
    terminate,
    write_nvidia_spec,
)

GPUS = ("GPU-0", "GPU-1", "GPU-2")


def answer(*names: str, **envs: str) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(envs=envs, cdi_devices=[pb.CDIDevice(name=name) for name in names])


def test_of_several_answers_the_first_writer_wins_and_names_count_once() -> None:
    one = answer("a/b=c", X="1")
    one.mounts.add(container_path="/m", host_path="/1")
    one.devices.add(container_path="/d", host_path="/1", permissions="rw")
    two = answer("a/b=c", "a/b=d", X="2", Y="2")
    two.mounts.add(container_path="/m", host_path="/2")
    two.devices.add(container_path="/d", host_path="/2", permissions="r")
    merged = merged_answer([one, two])
    assert dict(merged.envs) == {"X": "1", "Y": "2"}
    assert [m.host_path for m in merged.mounts] == ["/1"]
    assert [d.host_path for d in merged.devices] == ["/1"]
    assert [d.name for d in merged.cdi_devices] == ["a/b=c", "a/b=d"]


def test_allocate_mounts_are_bind_mounts() -> None:
    given = answer()
    given.mounts.add(container_path="/m", host_path="/h", read_only=True)
    assert resolve(scan(()), given, {}).mounts == (("/m", "/h", ("rbind", "rprivate", "ro")),)


@pytest.mark.parametrize(("name", "minors"), [("1", [1]), ("GPU-2", [2]), ("all", [0, 1, 2])])
def test_the_nvidia_spec_is_usable(tmp_path: Path, name: str, minors: list[int]) -> None:
    write_nvidia_spec(str(tmp_path), GPUS)
    registry = scan((str(tmp_path),))
    assert registry.errors == {}
    edits = resolve(registry, answer(f"nvidia.com/gpu={name}"), {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    nodes = {node["path"]: (node["type"], node["major"], node["minor"]) for node in edits.device_nodes}
    assert nodes == {
        "/dev/nvidiactl": ("c", 195, 255),
        "/dev/nvidia-uvm": ("c", 510, 0),
        **{f"/dev/nvidia{minor}": ("c", 195, minor) for minor in minors},
    }


@pytest.mark.parametrize(
    ("visible", "nvidia_runtime", "expected"),
    [
        ("void", True, "GPU-1"),
        ("GPU-2", True, "GPU-1,GPU-2"),
        ("GPU-2", False, "GPU-1"),
        ("all", True, "GPU-0,GPU-1,GPU-2"),
        ("0", True, "GPU-0,GPU-1"),
        ("none", True, "GPU-1"),
        ("", True, "GPU-1"),
    ],
)
def test_a_container_sees_gpus_by_device_node_or_by_env(visible: str, nvidia_runtime: bool, expected: str) -> None:
    runtime = Runtime((), GPUS, nvidia_runtime=nvidia_runtime)
    edits = Edits(env={"NVIDIA_VISIBLE_DEVICES": visible}, device_nodes=({"path": "/dev/nvidia1"},))
    process, env = runtime.start("uid", "c", edits, to_completion=True)
    assert process.wait() == 0
    assert env["GPUFRAC_SIM_DEVICES"] == expected


def test_unresolvable_devices_are_named(tmp_path: Path) -> None:
    with pytest.raises(CreateContainerError, match="CDI device injection failed: unresolvable CDI devices x/y=z"):
        Runtime((str(tmp_path),)).resolve([answer("x/y=z")], {})


def test_an_environment_no_process_can_have_is_an_error_of_creation() -> None:
    with pytest.raises(CreateContainerError, match="failed to create"):
        Runtime(()).start("uid", "c", Edits(env={"A": "\0"}), to_completion=True)


def test_terminate_ends_the_process_and_what_was_started_in_the_container() -> None:
    runtime = Runtime(())
    process, env = runtime.start("uid-1", "c", Edits(), to_completion=False)
    other, _ = runtime.start("uid-2", "c", Edits(), to_completion=False)
    stubborn = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo up; while :; do /bin/sleep 0.1; done"], env=env, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline() == b"up\n"
    try:
        terminate([process], "uid-1")
        assert process.poll() is not None
        assert stubborn.wait(10) == -9
        assert os.path.exists(f"/proc/{other.pid}"), "another pod's process is left alone"
    finally:
        stubborn.stdout.close()
        terminate([other], "uid-2")
