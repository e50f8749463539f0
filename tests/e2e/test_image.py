"""The image, built and run: both processes as containers with a read-only root, beside a kubelet; mpsd's is replaced
while a share is held.

`GPUFRAC_IMAGE_BASE` names a tar of a root file system with Python and its venv module (docs/testing.md). The machine
stays as it was: images are in the test's directory.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.sim.mps.install import install_emulator
from tests.e2e.mpsdnode import ROOT
from tests.e2e.pluginnode import SMALL, PluginNode
from tests.waiting import WAIT_S

BASE = os.environ.get("GPUFRAC_IMAGE_BASE", "")
BUILD_S = 600
ON_THE_HOST = """
import sys
from mpsd import simulated
from mpsd.host.place import HostPlace
from mpsd.host.survival import probe
from mpsd.daemon.process import run as program
def place(config):
    directories = [config.mps.run_root]
    return HostPlace(probe(lambda words: program(words, {}, b"", 30.0, 65536), directories, init=int(sys.argv[2])))
simulated.place = place
from mpsd.app import run
sys.exit(run(sys.argv[1]))
"""
"""mpsd with simulated GPUs, which has its daemons started as on a real node: in the host's namespaces, which are
ours and those of PID 1 that not every machine shows, and cgroups."""


def why_not() -> str:
    if not BASE:
        return "GPUFRAC_IMAGE_BASE names no tar of a root file system"
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("buildah", "podman", "runc") if shutil.which(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


pytestmark = [pytest.mark.root, pytest.mark.podman, pytest.mark.skipif(bool(why_not()), reason=f"image: {why_not()}")]


class Images:
    """Storage of its own, and containers that are ended with it."""

    def __init__(self, directory: Path) -> None:
        self._store = ("--root", f"{directory}/s", "--runroot", f"{directory}/r", "--storage-driver", "vfs")
        self._podman = ("podman", *self._store, "--tmpdir", f"{directory}/t", "--cgroup-manager", "cgroupfs",
                        "--events-backend", "none", "--runtime", "runc")  # fmt: skip
        self.names: list[str] = []

    def call(self, *words: str, time_s: float = WAIT_S) -> str:
        done = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=time_s)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def podman(self, *words: str) -> str:
        return self.call(*self._podman, *words)

    def build(self) -> None:
        """As the head of the Containerfile says for a machine without a registry."""
        wheels = f"{ROOT}/build/wheels"
        self.call(sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", wheels, ".", "setuptools>=77",
                  time_s=BUILD_S)  # fmt: skip
        self.podman("import", "--quiet", BASE, "localhost/base")
        options = "PIP_OPTIONS=--no-index --find-links=/src/build/wheels"
        self.call("buildah", *self._store, "build", "--isolation", "chroot", "--build-arg", "BASE=localhost/base",
                  "--build-arg", options, "-f", "deploy/image/Containerfile", "-t", "localhost/gpufrac", ".",
                  time_s=BUILD_S)  # fmt: skip

    def start(self, name: str, node: PluginNode, *options: str, command: tuple[str, ...]) -> None:
        self.names.append(name)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # no more: that may not be ours to raise
        limits = ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=4096:4096")
        still = ("--read-only", "--read-only-tmpfs=false", "--net=none", "--pid=host", *limits)
        here = ("-v", f"{node.root}:{node.root}")
        log = ("--log-driver", "k8s-file", "--log-opt", f"path={node.root}/{name}0.log")
        self.podman("run", "--detach", "--name", name, *still, *here, *log, *options, "localhost/gpufrac", *command)

    def end(self, name: str) -> None:
        self.podman("stop", "--time", "60", name)
        self.podman("rm", "--force", name)
        self.names.remove(name)

    def close(self) -> None:
        for name in self.names:
            with contextlib.suppress(AssertionError):
                self.podman("rm", "--force", "--time", "0", name)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    made = Images(tmp_path_factory.mktemp("images"))
    made.build()
    yield made
    made.close()


@pytest.fixture
def node(short_tmp: Path, tmp_path: Path) -> Iterator[PluginNode]:
    """The driver's programs are on the host alone, as they are where no container toolkit brings them."""
    resource = f"\n  - {{name: {SMALL}, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}"
    made = PluginNode(short_tmp, gpus=1, resources=resource)
    binary = install_emulator(str(tmp_path), f"{short_tmp}/run/sim")
    made.config.write_text(made.config.read_text().replace("mps: {", f"mps: {{binary: {binary}, "))
    yield made
    made.close()


def test_it_says_what_it_is_and_has_nothing_to_build_with(images: Images) -> None:
    (about,) = json.loads(images.podman("inspect", "localhost/gpufrac"))
    assert about["Config"]["Entrypoint"] == ["gpufrac"]
    assert about["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    run = ("run", "--rm", "--read-only", "--net=none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
    assert images.podman(*run, "localhost/gpufrac", "--version").startswith("gpufrac ")
    found = images.podman(*run, "--entrypoint", "find", "localhost/gpufrac", "/opt/gpufrac", "-name", "pip*")
    assert found == ""


def test_a_share_outlives_the_replacement_of_mpsds_container(images: Images, node: PluginNode) -> None:
    mpsd = ("--privileged", "--entrypoint", "/opt/gpufrac/bin/python")
    supervise = ("-c", ON_THE_HOST, str(node.config), str(os.getpid()))
    plugin = ("--cap-drop=all", "--cap-add=SYS_PTRACE,DAC_READ_SEARCH", "--security-opt=no-new-privileges")
    node.kubelet.start()
    images.start("mpsd", node, *mpsd, command=supervise)
    before = node.mpsd.until_ready()
    images.start("plugin", node, *plugin, command=("plugin", "--config", str(node.config)))
    node.until(lambda: node.allocatable(SMALL) > 0)
    root = ("--run-root", f"{node.root}/run")
    for name in ("mpsd", "plugin"):
        said = images.podman("exec", name, "gpufrac", "status", "--check=ready", "--process", name, *root)
        assert "ready" in said or "ok" in said, said
    pod = node.admit_running("holder")
    (key,) = node.cdi_keys()
    daemon = before.gpus[0].daemon
    assert daemon is not None

    images.end("mpsd")
    assert os.path.exists(f"/proc/{daemon.pid}"), "the daemon lives on without mpsd's container"
    node.until_status(lambda status: status.mpsd_error)
    images.start("mpsd", node, *mpsd, command=supervise)
    after = node.mpsd.until_ready(before)
    assert (after.gpus[0].daemon.pid if after.gpus[0].daemon else None) == daemon.pid
    node.until_status(lambda status: not status.mpsd_error and status.allocations[0].state == "attached")
    assert node.cdi_keys() == {key}

    images.end("plugin")
    images.start("plugin", node, *plugin, command=("plugin", "--config", str(node.config)))
    node.until_status(lambda status: [a.key for a in status.allocations] == [key])

    images.end("plugin")
    node.kubelet.delete(pod)
    said = images.podman("exec", "mpsd", "gpufrac", "mpsd", "cleanup", "--yes", *root)
    assert said.startswith("The node is as it was found")
    assert not os.path.exists(f"/proc/{daemon.pid}")
