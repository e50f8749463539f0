"""A node whose directories hold what the last version wrote, with pods on it, comes up with this one."""

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.kubelet.pod import AdmittedPod
from deviceplugin.sim.node.children import Children
from deviceplugin.sim.node.node import SimulatedNode
from deviceplugin.sim.runtime.container import Container, State
from mpsd.common.marker import MARKER
from mpsd.common.processes import boot_id
from mpsd.localapi.client import MpsdClient
from tests.recorded.scene import (
    BOOT,
    DRAINED,
    RECORDED,
    ROOT,
    SCENES,
    answers,
    config_of,
    cuda_process,
    gpufrac,
    outputs,
    pods_of,
    refused_config,
)
from tests.recorded.shape import missing, shape
from tests.waiting import WAIT_S, until


class LateChildren(Children):
    """Its node's files are laid down before a process starts."""

    def __init__(self, directory: str, lay_down: Callable[[], None]) -> None:
        super().__init__(directory)
        self._lay_down = lay_down

    def start(self, name: str) -> int:
        self._lay_down()
        return super().start(name)


class OldNode(SimulatedNode):
    """A simulated node that finds the files of a recorded scene, and its pods at the kubelet."""

    def __init__(self, directory: Path, scene: str) -> None:
        super().__init__(str(directory), config_of(scene))
        self.scene = scene
        uids = self.recorded_json("pods.json")
        self.refused = [loaded for loaded in pods_of(scene) if loaded.pod.name == "too-many"]
        self.pods = [
            AdmittedPod(loaded.pod, uids[loaded.pod.name], tuple(map(Container, loaded.pod.containers)))
            for loaded in pods_of(scene)
            if loaded not in self.refused
        ]
        self._laid_down = False
        self.processes = LateChildren(self.directory, self._lay_down)

    def recorded(self, name: str) -> str:
        text = (RECORDED / self.scene / name).read_text()
        return text.replace(ROOT, self.directory).replace(BOOT, boot_id())

    def recorded_json(self, name: str) -> Any:
        return json.loads(self.recorded(name))

    def files(self, *patterns: str) -> dict[str, str]:
        """Recorded files below the node's directory, and what is in them."""
        place = RECORDED / self.scene
        names = [str(path.relative_to(place)) for pattern in patterns for path in place.glob(pattern)]
        return {name: self.recorded(name) for name in names}

    def now(self, *patterns: str) -> dict[str, str]:
        """The same of what is there now."""
        return {
            str(path.relative_to(self.directory)): path.read_text().rstrip("\n") + "\n"
            for pattern in patterns
            for path in Path(self.directory).glob(pattern)
        }

    def _lay_down(self) -> None:
        if self._laid_down:
            return
        self._laid_down = True
        for path, text in self.files("state/**/*.json", "cdi/*.json").items():
            target = Path(self.directory, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        Path(self.kubelet.device_plugins, checkpoint.FILE_NAME).write_text(self.recorded("checkpoint.json"))
        self.kubelet.stop()
        self.kubelet.start()
        self.kubelet.take_over(self.pods)

    def daemons(self) -> dict[str, int | None]:
        """PID by name."""
        found = (gpu.daemon for gpu in MpsdClient(self.config.mpsd_socket).snapshot().gpus)
        return {daemon.name: daemon.pid for daemon in found if daemon is not None}

    def start_mpsd_with_old_records(self) -> None:
        """A new mpsd finds what the last version remembered of the daemons that run."""
        self.processes.stop("mpsd", signal.SIGKILL)
        state = Path(self.directory, "state", "mpsd.json")
        running = json.loads(state.read_text())["daemons"]
        saved = self.recorded_json("state/mpsd.json")
        assert saved["daemons"].keys() == running.keys()
        for name, identity in saved["daemons"].items():
            identity |= {key: running[name][key] for key in ("pid", "start_time", "process_group")}
        for path in (state, Path(self.directory, "run", "mpsd.json")):
            path.write_text(json.dumps(saved))
        self.processes.start("mpsd")
        self.wait_ready(WAIT_S)


def as_before(files: Mapping[str, str]) -> dict[str, str]:
    """CDI files less what containers are told since the last version."""
    return {name: re.sub(r',"GPUFRAC_FAULT_DOMAIN=[^"]*"', "", text) for name, text in files.items()}


@pytest.fixture(params=SCENES)
def node(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[OldNode]:
    old = OldNode(short_tmp / "n", request.param)
    try:
        old.start(WAIT_S)
        yield old
    finally:
        old.close()


def test_a_node_of_the_last_version_goes_on_with_this_one(node: OldNode) -> None:
    allocations, cdi = "state/plugin/allocations/*.json", "cdi/gpufrac.dev-*.json"
    until(lambda: as_before(node.now(cdi)) == node.files(cdi), lambda: str(node.now(cdi)))
    assert node.now(allocations).keys() == node.files(allocations).keys()

    # What the kubelet remembers of the last version's answers still starts containers.
    for pod in node.pods:
        for container in pod.containers:
            node.kubelet.restart_container(pod, container.spec.name)
    assert node.kubelet.wait_settled(node.pods, WAIT_S)
    keys = {
        container.process_env[MARKER]
        for pod in node.pods
        for container in pod.containers
        if container.state is State.RUNNING
    }
    held = {Path(name).stem for name in node.files(allocations)}
    assert keys <= held
    assert len(keys) == len(node.pods)
    assert node.now(cdi).keys() == node.files(cdi).keys()

    # The daemons are those that this mpsd started; the next one finds them in records of the last version.
    daemons = node.daemons()
    node.start_mpsd_with_old_records()
    assert node.daemons() == daemons

    fields = node.recorded_json("fields.json")
    node.admit(node.refused)
    assert not missing(fields["sim run"], shape(node.report(node.kubelet.pods())))
    assert not missing(fields["drain"], shape(gpufrac(node, "drain", DRAINED)))
    assert not missing(fields["selftest"], shape(gpufrac(node, "selftest")))
    with cuda_process(node, node.pods[0].spec.name), refused_config(node):
        for command, said in outputs(node).items():
            assert not missing(fields[command], shape(said)), command
        for process, methods in answers(node).items():
            for method, answer in methods.items():
                old = node.recorded_json(f"answers/{process}-{method}.json")
                assert not missing(shape(old), shape(answer)), f"{process} {method}"
