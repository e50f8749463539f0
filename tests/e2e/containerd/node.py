"""A containerd of a test's own: everything it keeps is in the test's directory, its mounts in a mount namespace of its
own where a fresh tmpfs covers /run, and its pods' cgroups under one parent that is removed at the end.

containerd leaves shims behind that outlive it; they are found by the socket on their command line.
"""

import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.e2e.containerd import image
from tests.e2e.containerd.cri import Cri, CriError
from tests.waiting import WAIT_S, until

VARIABLE = "GPUFRAC_CONTAINERD"
OLDEST = (2, 1)
"""The first that takes CDI devices from an NRI plugin; older ones leave them out without a word."""
_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")

_IN_NAMESPACE = """
set -e
mount -t tmpfs tmpfs /run
echo ready
exec cat
"""

_CONFIG = """
version = 3
root = '{base}/r'
state = '{base}/s'
[grpc]
  address = '{base}/c.sock'
[debug]
  level = 'info'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{image}'
[plugins.'io.containerd.cri.v1.runtime']
  cdi_spec_dirs = ['{cdi}']
  restrict_oom_score_adj = true
  enable_unprivileged_ports = false
  enable_unprivileged_icmp = false
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  Root = '{base}/o'
  SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['{base}/n']
  conf_dir = '{base}/n'
[plugins.'io.containerd.internal.v1.opt']
  path = '{base}/opt'
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = '{base}/nri.sock'
  plugin_path = '{base}/np'
  plugin_config_path = '{base}/nc'
  plugin_registration_timeout = '5s'
  plugin_request_timeout = '{request_timeout}'
"""


def why_not() -> str:
    """Why these tests can't run here; "" when they can."""
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return f"{VARIABLE} names no directory with bin/containerd"
    if os.geteuid() != 0:
        return "needs root"
    for program in _PROGRAMS:
        if not os.access(os.path.join(directory, "bin", program), os.X_OK):
            return f"{VARIABLE}={directory} has no bin/{program}"
    version = subprocess.run(
        [os.path.join(directory, "bin", "containerd"), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    ).stdout
    if not (match := re.search(r" v?(\d+)\.(\d+)\.", version)) or (int(match[1]), int(match[2])) < OLDEST:
        return (
            f"{VARIABLE}={directory} holds {version.strip() or 'no working containerd'}, these tests need 2.1 or later"
        )
    for name in ("runc", "unshare", "nsenter", "mount", "ldd"):
        if shutil.which(name) is None:
            return f"needs {name}"
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"], check=False, timeout=WAIT_S
    ).returncode:
        return "may not mount in a mount namespace of its own"
    return ""


class Containerd:
    """A running containerd, for `with`. Leaving it ends pods, processes and cgroups.

    `stop` and `start` restart it under running pods. What containers mount must not be below /run (see above) nor be
    mounted after the start: its mount namespace is a private copy.

    Args:
        directory: an absolute, short path (sockets lie in it), the test's to remove.
        cdi_directory: its only CDI directory, made when it is not there.
        request_timeout: how long it waits for an NRI plugin's answer.
        extra: more of its configuration file.
    """

    def __init__(self, directory: Path, cdi_directory: Path, *, request_timeout: str = "2s", extra: str = "") -> None:
        self.directory, self.cdi_directory = directory, cdi_directory
        self.nri_socket = str(directory / "nri.sock")
        self.log = directory / "containerd.log"
        self._programs = Path(os.environ[VARIABLE]) / "bin"
        self._socket = str(directory / "c.sock")
        self.cgroup_parent = f"/gpufrac-test-{secrets.token_hex(4)}"
        self._holder: subprocess.Popen[bytes] | None = None  # keeps the mount namespace while containerd restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        for path in (cdi_directory, *(directory / name for name in ("n", "opt", "np", "nc"))):
            path.mkdir(exist_ok=True)
        self._config = directory / "config.toml"
        self._config.write_text(
            _CONFIG.format(
                base=directory,
                cdi=cdi_directory,
                image=image.NAME,
                request_timeout=request_timeout,
            )
            + extra
        )
        self.cri = Cri(self._socket, image.NAME, self.cgroup_parent)

    def __enter__(self) -> "Containerd":
        try:
            self.start()
            archive = self.directory / "image.tar"
            image.write_image(archive)
            self._run("ctr", "-a", self._socket, "-n", "k8s.io", "images", "import", "--local", str(archive))
            until(self.cri.has_image, "the image")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.log.exists():
            lines = self.log.read_text(errors="replace").splitlines()
            print("\n".join(line for line in lines if "level=info" not in line)[-4000:])
        self.close()

    def start(self) -> None:
        """Starts containerd, and waits until it answers CRI calls."""
        if self._holder is None:
            self._holder = _mount_namespace()
        environment = {"PATH": f"{self._programs}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"}
        self._log = open(self.log, "ab")  # noqa: SIM115 - closed when the process has ended
        self._process = subprocess.Popen(
            ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "containerd", "--config", str(self._config)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        until(self._answers, "containerd")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends containerd alone: containers and their shims go on."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(WAIT_S)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def exec_env(self, container: str) -> dict[str, str]:
        """The environment of a running container's first process; of one name the last entry counts."""
        return dict(entry.split("=", 1) for entry in self.exec_env_entries(container))

    def exec_env_entries(self, container: str) -> list[str]:
        pid = self.cri.status(container).pid
        assert pid > 0, f"container {container} does not run"
        return [entry for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if entry]

    def inside(self, container: str, path: str) -> Path:
        """A path as a running container's first process sees it."""
        return Path(f"/proc/{self.cri.status(container).pid}/root") / path.lstrip("/")

    def close(self) -> None:
        """Ends everything that was started here."""
        try:
            if self._process is not None and self._process.poll() is None:
                for pod in self._pods():
                    for end in (self.cri.stop_pod, self.cri.remove_pod):
                        try:
                            end(pod)
                        except CriError as error:
                            print(f"pod {pod}: {error.call}: {error.text}")
            self.stop()
        finally:
            self.cri.close()
            _kill_all(self._leftovers())
            if self._holder is not None:
                self._holder.communicate(timeout=WAIT_S)
                self._holder = None
            _remove_cgroups(self.cgroup_parent)

    def _pods(self) -> list[str]:
        try:
            return list(self.cri.pods())
        except CriError:
            return []

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"containerd ended: {self.log.read_text()[-4000:]}")
        try:
            self.cri.version()
        except CriError:
            return False
        return True

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [str(self._programs / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"

    def _leftovers(self) -> list[int]:
        """Shims of ours, known by our socket on their command line, and all that is in our cgroups."""
        found = {
            int(pid)
            for root in _cgroup_directories(self.cgroup_parent)
            for directory, _, _ in os.walk(root)
            for pid in _read(os.path.join(directory, "cgroup.procs")).split()
        }
        for pid in filter(str.isdigit, os.listdir("/proc")):
            program, *arguments = _read(f"/proc/{pid}/cmdline").split("\0")
            if os.path.basename(program).startswith("containerd-shim") and self._socket in arguments:
                found.add(int(pid))
        return sorted(found - {0, os.getpid()})


def _mount_namespace() -> subprocess.Popen[bytes]:
    """A process in a mount namespace of its own that ends when its standard input does, with us at the latest."""
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", _IN_NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n", "no mount namespace"
    return holder


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    until(lambda: not any(_alive(pid) for pid in pids), "the end of shims")


def _alive(pid: int) -> bool:
    status = _read(f"/proc/{pid}/stat")
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


def _cgroup_directories(path: str) -> list[str]:
    """That cgroup's directory in each hierarchy (v1), or in the one there is (v2)."""
    roots = ["/sys/fs/cgroup", *(os.path.join("/sys/fs/cgroup", one) for one in os.listdir("/sys/fs/cgroup"))]
    return [root + path for root in roots if not os.path.islink(root) and os.path.isdir(root + path)]


def _remove_cgroups(path: str) -> None:
    for root in _cgroup_directories(path):
        for directory, _, _ in os.walk(root, topdown=False):
            until(functools.partial(_removed, directory), f"an empty {directory}")


def _removed(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
