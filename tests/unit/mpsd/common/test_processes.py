"""/proc, from a recorded tree and from the real one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.common import processes
from mpsd.common.marker import MARKER
from mpsd.common.processes import PodProcess

UID = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0"
SLICE_UID = UID.replace("-", "_")
STATIC_UID = "3d8c29bb3cf1ae0d6b5bd0a54a3b2c1d"  # static pods: a hash without dashes
ID = "9f" * 32


class Proc:
    """A recorded procfs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        pid: int,
        *,
        parent: int = 1,
        name: bytes = b"app",
        start: int = 4242,
        env: Mapping[str, str] | None = None,
        cgroup: str = "0::/init.scope\n",
    ) -> None:
        directory = self.root / str(pid)
        directory.mkdir()
        tail = b" ".join(str(n).encode() for n in [0] * 17)
        (directory / "stat").write_bytes(b"%d (%s) S %d %s %d 0 0\n" % (pid, name, parent, tail, start))
        entries = [f"{k}={v}".encode() + b"\0" for k, v in (env or {}).items()]
        (directory / "environ").write_bytes(b"".join(entries))
        (directory / "cgroup").write_text(cgroup)

    def __str__(self) -> str:
        return str(self.root)


@pytest.fixture
def proc(short_tmp: Path) -> Proc:
    return Proc(short_tmp)


@pytest.mark.parametrize("name", [b"app", b"a b", b"a) S 1 (b", b")", b"((", b"new\nline)"])
def test_start_time_and_parent_whatever_the_name(proc: Proc, name: bytes) -> None:
    proc.add(7, parent=3, name=name, start=987654321)
    assert processes.start_time(7, str(proc)) == 987654321
    assert processes.parent(7, str(proc)) == 3


@pytest.mark.parametrize("stat", [b"", b"7", b"7 (app", b"7 (app) S", b"7 (app) S x y z" + b" q" * 30])
def test_malformed_stat_is_none(proc: Proc, stat: bytes) -> None:
    proc.add(7)
    (proc.root / "7" / "stat").write_bytes(stat)
    assert processes.start_time(7, str(proc)) is None


def test_absent_process(proc: Proc) -> None:
    root = str(proc)
    assert processes.start_time(7, root) is None
    assert processes.environ(7, root) == {}
    assert processes.marker(7, proc=root) is None
    assert processes.cgroup_paths(7, root) == ()
    assert processes.pod_uid_of(7, root) is None
    assert processes.container_cgroup(7, root) == ""


def test_environ_keeps_bytes_and_the_first_of_two(proc: Proc) -> None:
    proc.add(7)
    (proc.root / "7" / "environ").write_bytes(b"A=1\0B=x=y\0A=2\0bare\0=odd\0BAD=\xff\xfe\0EMPTY=\0")
    found = processes.environ(7, str(proc))
    assert found == {"A": "1", "B": "x=y", "": "odd", "BAD": os.fsdecode(b"\xff\xfe"), "EMPTY": ""}
    assert os.fsencode(found["BAD"]) == b"\xff\xfe"


def test_marker_of_the_nearest_ancestor(proc: Proc) -> None:
    proc.add(1, parent=0, env={MARKER: "init"})
    proc.add(10, env={MARKER: "outer"})
    proc.add(11, parent=10, env={MARKER: ""})
    proc.add(12, parent=11)
    proc.add(20, parent=10, env={MARKER: "inner"})
    proc.add(21, parent=20)
    proc.add(30, parent=1)
    root = str(proc)
    assert processes.marker(12, proc=root) == "outer"
    assert processes.marker(21, proc=root) == "inner"
    assert processes.marker(30, proc=root) is None
    assert processes.marker(21, "OTHER", root) is None


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", "schlüssel".encode(), b"a\nb", b"x" * 65])
def test_a_marker_that_cannot_be_ours_counts_as_none(proc: Proc, value: bytes) -> None:
    proc.add(10)
    proc.add(11, env={MARKER: "outer"})
    proc.add(12, parent=11)
    for pid in (10, 12):
        (proc.root / str(pid) / "environ").write_bytes(MARKER.encode() + b"=" + value + b"\0")
    assert processes.marker(10, proc=str(proc)) is None
    assert processes.marker(12, proc=str(proc)) == "outer"


def test_marker_gives_up_on_loops_and_long_chains(proc: Proc) -> None:
    proc.add(10, parent=11)
    proc.add(11, parent=10)
    for pid in range(100, 150):
        proc.add(pid, parent=pid - 1, env={MARKER: "far"} if pid == 100 else {})
    assert processes.marker(10, proc=str(proc)) is None
    assert processes.marker(131, proc=str(proc)) == "far"
    assert processes.marker(132, proc=str(proc)) is None


@pytest.mark.parametrize(
    ("path", "uid", "container"),
    [
        # systemd driver: QoS classes, static pod, kind's extra prefix, CRI-O, a cgroup made inside the container
        (f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope", UID, f"cri-containerd-{ID}.scope"),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice/crio-{ID}.scope/container",
            UID,
            f"crio-{ID}.scope",
        ),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{STATIC_UID}.slice/crio-{ID}.scope",
            STATIC_UID,
            f"crio-{ID}.scope",
        ),
        (
            f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE_UID}.slice/cri-containerd-{ID}.scope",
            UID,
            f"cri-containerd-{ID}.scope",
        ),
        (f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice", UID, ""),
        # cgroupfs driver
        (f"/kubepods/burstable/pod{UID}/{ID}", UID, ID),
        (f"/kubepods/besteffort/pod{UID}/{ID}/nested/deep", UID, ID),
        (f"/kubepods/pod{UID}/{ID}", UID, ID),
        (f"/custom/root/kubepods/pod{UID}/{ID}", UID, ID),
        (f"/kubepods/pod{UID}", UID, ""),
        # runtime on cgroupfs, kubelet on systemd
        (
            f"/system.slice/containerd.service/kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{ID}",
            UID,
            f"kubepods-burstable-pod{SLICE_UID}.slice:cri-containerd:{ID}",
        ),
        # seen from a cgroup namespace of our own
        (f"/../../kubepods-besteffort-pod{SLICE_UID}.slice/crio-{ID}.scope", UID, f"crio-{ID}.scope"),
        (f"/../../pod{UID}/{ID}", UID, ID),
        (f"/../../../burstable/pod{UID}/{ID}", UID, ID),
        # not pods
        ("/", None, ""),
        ("/init.scope", None, ""),
        ("/system.slice/kubelet.service", None, ""),
        (f"/machine.slice/libpod-{ID}.scope", None, ""),
        ("/user.slice/user-1000.slice/user@1000.service/podman-123.scope", None, ""),
        (f"/docker/{ID}", None, ""),
        ("/kubepods.slice/kubepods-burstable.slice", None, ""),
        ("/kubepods/podium.slice.d/x", None, ""),
    ],
)  # fmt: skip
def test_cgroup_shapes(proc: Proc, path: str, uid: str | None, container: str) -> None:
    proc.add(7, cgroup=f"0::{path}\n")
    assert processes.pod_uid_of(7, str(proc)) == uid
    full = processes.container_cgroup(7, str(proc))
    assert full.rpartition("/")[2] == container
    assert path.startswith(full)


def test_hybrid_hierarchies(proc: Proc) -> None:
    lines = [f"5:cpuset:/kubepods/pod{UID}/{ID}", f"1:name=systemd:/kubepods/pod{UID}/{ID}", "0::/", "bad line"]
    proc.add(7, cgroup="\n".join(lines) + "\n")
    assert processes.cgroup_paths(7, str(proc)) == (f"/kubepods/pod{UID}/{ID}", "/")
    assert processes.pod_uid_of(7, str(proc)) == UID


def test_deleted_cgroup(proc: Proc) -> None:
    proc.add(7, cgroup=f"0::/kubepods/pod{UID}/{ID} (deleted)\n")
    assert processes.container_cgroup(7, str(proc)) == f"/kubepods/pod{UID}/{ID}"


def test_processes_of_pods(proc: Proc) -> None:
    pod = f"0::/kubepods.slice/kubepods-pod{SLICE_UID}.slice"
    proc.add(1, parent=0)
    proc.add(100)  # a host daemon: the shim
    proc.add(110, parent=100, cgroup=f"{pod}/cri-containerd-aa.scope\n", env={MARKER: "key1"})
    proc.add(111, parent=110, cgroup=f"{pod}/cri-containerd-aa.scope\n")
    proc.add(120, parent=100, cgroup=f"{pod}/cri-containerd-pause.scope\n")
    proc.add(130, parent=100, cgroup=f"{pod}/crio-conmon-aa.scope\n")
    proc.add(140, parent=100, cgroup="0::/kubepods/podother/bb\n", env={"GPUFRAC_SIM_POD_UID": "forged"})
    (proc.root / "self").mkdir()
    assert processes.processes_of_pods(str(proc)) == {
        UID: [
            PodProcess(110, "cri-containerd-aa.scope", "key1"),
            PodProcess(111, "cri-containerd-aa.scope", "key1"),
            PodProcess(120, "cri-containerd-pause.scope", None),
        ],
        "other": [PodProcess(140, "bb", None)],
    }


def test_an_environment_that_may_not_be_read_is_neither_there_nor_absent(proc: Proc) -> None:
    pod = f"0::/kubepods.slice/kubepods-pod{SLICE_UID}.slice"
    scope = f"{pod}/cri-containerd-aa.scope\n"
    proc.add(100)  # the host's shim, which nobody may read
    proc.add(110, parent=100, cgroup=scope)
    proc.add(111, parent=110, cgroup=scope)
    proc.add(112, parent=110, cgroup=scope, env={MARKER: "key1"})
    proc.add(120, parent=100, cgroup=f"{pod}/cri-containerd-bb.scope\n")
    for pid in (100, 110):
        (proc.root / str(pid) / "environ").unlink()
        (proc.root / str(pid) / "environ").mkdir()  # any error but that it is gone
    assert processes.read_environ(110, str(proc)) is None
    assert processes.read_environ(999, str(proc)) == {}, "it is gone"
    assert processes.environ(110, str(proc)) == {}
    assert [(p.pid, p.marker, p.unreadable) for p in processes.processes_of_pods(str(proc))[UID]] == [
        (110, None, True),
        (111, None, True),
        (112, "key1", False),
        (120, None, False),
    ]


def test_simulated_pods_only_when_asked_for(proc: Proc) -> None:
    env = {"GPUFRAC_SIM_POD_UID": UID, "GPUFRAC_SIM_CONTAINER": "main", MARKER: "key1"}
    proc.add(7, env=env, cgroup="0::/kubepods/podofci/x\n")
    proc.add(8, cgroup="0::/kubepods/podofci/x\n")
    root = str(proc)
    found = processes.processes_of_pods(root, simulated=True)
    assert found == {UID: [PodProcess(7, "main", "key1")], "ofci": [PodProcess(8, "x", None)]}
    assert processes.pod_uid_of(7, root, simulated=True) == UID
    assert processes.container_cgroup(7, root, simulated=True) == "main"
    assert processes.pod_uid_of(8, root, simulated=True) == "ofci", "a real kubelet may serve a simulated backend"
    assert processes.pod_uid_of(7, root) == "ofci"


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(stat=st.binary(max_size=80), environ=st.binary(max_size=80), cgroup=st.binary(max_size=80))
def test_any_bytes_are_survived(tmp_path: Path, stat: bytes, environ: bytes, cgroup: bytes) -> None:
    directory = tmp_path / "7"
    directory.mkdir(exist_ok=True)
    for name, data in (("stat", stat), ("environ", environ), ("cgroup", cgroup)):
        (directory / name).write_bytes(data)
    root = str(tmp_path)
    processes.start_time(7, root)
    processes.environ(7, root)
    processes.container_cgroup(7, root)
    processes.processes_of_pods(root)
    processes.processes_of_pods(root, simulated=True)


def test_the_real_proc() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        env={MARKER: "real"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    assert processes.marker(child.pid) == "real"
    assert processes.parent(child.pid) == os.getpid()
    assert (processes.start_time(child.pid) or 0) >= (processes.start_time(os.getpid()) or 1)
    assert processes.cgroup_paths(child.pid)
    child.communicate()
    assert processes.start_time(child.pid) is None
    assert len(processes.boot_id()) == 36
    assert isinstance(processes.processes_of_pods(), dict)
