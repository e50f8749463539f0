"""Our spec files in the hands of a real consumer: podman with runc (Debian 12's podman 4.3.1 takes CDI up to 0.5.0).

The machine stays as it was: podman keeps all its state in the test's directory and runs in a mount namespace of its
own, where a fresh tmpfs covers /run and our directory is /run/cdi.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi.encode import encode_spec
from cdi.inject import apply, effective_env
from cdi.model import ContainerEdits, Device, Mount, Spec
from cdi.registry import NotFound
from cdi.scan import scan
from cdi.writer import SpecDirectory
from tests.waiting import WAIT_S

VENDOR, CLASS = "gpufrac.dev", "allocation"
KIND = f"{VENDOR}/{CLASS}"
KEY = "0123456789abcdef0123"
NAME = f"{KIND}=s{KEY}"

_IN_NAMESPACE = """
set -e
mount -t tmpfs tmpfs /run
if [ -d /etc/cdi ]; then mount -t tmpfs tmpfs /etc/cdi; fi
mkdir /run/cdi
mount --bind "$1" /run/cdi
shift
exec "$@"
"""


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    for program in ("podman", "runc", "unshare", "mount", "ldd"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if os.path.realpath("/var/run") != "/run":
        return "needs /var/run to be /run"
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"], check=False, timeout=WAIT_S
    ).returncode:
        return "may not mount in a mount namespace of its own"
    return ""


@pytest.fixture(scope="module")
def podman_works() -> None:
    if reason := _why_not():
        pytest.skip(f"podman: {reason}")


class Podman:
    """Runs commands in containers from a small root file system, with `directory` as the node's CDI directory."""

    def __init__(self, base: Path) -> None:
        self.directory = base / "cdi"
        self.directory.mkdir()
        self._base = base
        self._root = base / "root"
        for directory in ("proc", "sys", "dev", "tmp"):
            (self._root / directory).mkdir(parents=True)
        for program in ("sh", "cat", "env"):
            self._install(program)

    def _install(self, program: str) -> None:
        path = shutil.which(program)
        assert path is not None
        done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False, timeout=WAIT_S)
        for file in (path, *re.findall(r"(/\S+) \(0x", done.stdout)):
            target = self._root / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        shutil.copy(path, self._root / program)

    def run(self, *args: str, devices: tuple[str, ...] = (), env: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit status and output of a command in a new container."""
        command = ["unshare", "-m", "sh", "-c", _IN_NAMESPACE, "sh", str(self.directory)]
        command += ["podman", "--root", str(self._base / "s"), "--runroot", str(self._base / "r")]
        command += ["--tmpdir", str(self._base / "t"), "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]
        command += ["--events-backend", "none", "--runtime", "runc", "run", "--rm", "--net=none"]
        command += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
        command += [part for device in devices for part in ("--device", device)]
        command += [part for entry in env for part in ("--env", entry)]
        command += ["--rootfs", str(self._root), *args]
        done = subprocess.run(
            command,
            check=False,
            timeout=WAIT_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout.decode(errors="replace")


@pytest.fixture
def podman(podman_works: None, short_tmp: Path) -> Podman:
    return Podman(short_tmp)


@pytest.fixture
def specs(podman: Podman) -> Iterator[SpecDirectory]:
    with SpecDirectory(str(podman.directory), VENDOR, CLASS) as directory:
        yield directory


def _spec(pipe_directory: Path) -> Spec:
    env = (
        f"GPUFRAC_ALLOCATION={KEY}",
        "GPUFRAC_MEMORY_LIMIT_BYTES=8589934592",
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
        "NVIDIA_VISIBLE_DEVICES=void",
    )
    mount = Mount(str(pipe_directory), "/tmp/nvidia-mps", ("rbind", "rw", "nosuid", "nodev"))
    return Spec(KIND, (Device(f"s{KEY}", ContainerEdits(env=env, mounts=(mount,))),))


def _env_of(output: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


pytestmark = [pytest.mark.root, pytest.mark.podman]


def test_container_gets_env_and_mount(podman: Podman, specs: SpecDirectory, short_tmp: Path) -> None:
    pipe_directory = short_tmp / "pipe"
    pipe_directory.mkdir()
    (pipe_directory / "control").write_text("from the host\n")
    spec = _spec(pipe_directory)
    specs.put(KEY, spec)

    own = ("CUDA_MPS_PIPE_DIRECTORY=/of/the/pod", "NVIDIA_VISIBLE_DEVICES=all", "OWN=1")
    status, output = podman.run("/env", devices=(NAME,), env=own)
    assert status == 0, output
    inside = _env_of(output)
    expected = effective_env(apply(scan([str(podman.directory)]), [NAME], {"process": {"env": list(own)}}))
    assert expected.items() <= inside.items()
    assert inside["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert inside["GPUFRAC_ALLOCATION"] == KEY
    assert inside["OWN"] == "1"

    script = "cat /tmp/nvidia-mps/control; echo from inside > /tmp/nvidia-mps/answer; cat /proc/self/mountinfo"
    status, output = podman.run("/sh", "-c", f"PATH=/; {script}", devices=(NAME,))
    assert status == 0, output
    assert output.startswith("from the host\n")
    assert (pipe_directory / "answer").read_text() == "from inside\n"
    options = next(line.split()[5] for line in output.splitlines() if " /tmp/nvidia-mps " in line)
    assert {"rw", "nosuid", "nodev"} <= set(options.split(","))


def test_the_file_is_the_permission_to_start(podman: Podman, specs: SpecDirectory, short_tmp: Path) -> None:
    status, output = podman.run("/env", devices=(NAME,))
    assert status != 0
    assert f"unresolvable CDI devices {NAME}" in output
    specs.put(KEY, _spec(short_tmp))
    assert podman.run("/env", devices=(NAME,))[0] == 0
    specs.apply({})
    status, output = podman.run("/env", devices=(NAME,))
    assert status != 0
    assert f"unresolvable CDI devices {NAME}" in output


def test_registry_sees_what_podman_sees(podman: Podman) -> None:
    def write(file: str, *devices: str) -> None:
        edits = ContainerEdits(env=(f"FILE={file}",))
        (podman.directory / file).write_bytes(
            encode_spec(Spec("v.example/cls", tuple(Device(d, edits) for d in devices)))
        )

    write("a.json", "good", "twice")
    write("b.json", "other", "twice")
    write(".dot.json", "dot")
    write(".a.json.1.0a1b2c3d-0.tmp", "good", "temp")
    write("c.yml", "yml")
    (podman.directory / "broken.json").write_bytes(
        b'{"cdiVersion":"0.3.0","kind":"v.example/cls","devices":[{"name":"br'
    )
    (podman.directory / "newer.json").write_bytes(
        b'{"cdiVersion":"9.0.0","kind":"v.example/cls","devices":[{"name":"newer","containerEdits":{"env":["A=1"]}}]}'
    )
    registry = scan([str(podman.directory)])
    expected = {"good": True, "other": True, "dot": True, "twice": False, "temp": False, "yml": False, "newer": False}
    resolved = {name: not isinstance(registry.resolve(f"v.example/cls={name}"), NotFound) for name in expected}
    assert resolved == expected

    good = tuple(f"v.example/cls={name}" for name, found in expected.items() if found)
    bad = tuple(f"v.example/cls={name}" for name, found in expected.items() if not found)
    status, output = podman.run("/env", devices=good)
    assert status == 0, output
    # The last device of the request wins the one variable all of them set.
    assert _env_of(output)["FILE"] == effective_env(apply(registry, good, {}))["FILE"] == ".dot.json"
    for name in bad:
        status, output = podman.run("/env", devices=(name,))
        assert status != 0
        assert f"unresolvable CDI devices {name}" in output
