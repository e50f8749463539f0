"""What is left of gpufrac where none of its processes runs: what must be undone first, and what goes."""

import os
from pathlib import Path

import msgspec
import pytest

from deviceplugin.reconcile import traces
from mpsd.common import processes
from mpsd.config.load import parse_config
from mpsd.config.model import NodeConfig
from mpsd.daemon import process
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.state import Saved
from mpsd.gpu.model import ComputeMode
from tests.cli import gpufrac

UUID = "GPU-51000000-0000-4000-8000-000000000000"


class Node:
    """Directories with what both processes leave there, and things of others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        text = f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: [{{name: gpufrac.dev/a, unit: 1Gi, compute: {{mode: sm-sharing}}}}]
mps: {{runRoot: {root}/run, logRoot: {root}/log}}
cdi: {{directory: {root}/cdi}}
kubelet: {{root: {root}/kubelet, devicePlugins: {root}/kubelet/device-plugins}}
stateRoot: {root}/state
backend: simulated
"""
        self.path = root / "config.yaml"
        self.path.write_text(text)
        self.config: NodeConfig = parse_config(text, "config.yaml")
        for name in ("run/mps/GPU-1", "run/plugin.sock.lock/..", "log/mps/GPU-1", "state/plugin/allocations", "cdi"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in (
            "run/mpsd.sock.lock",
            "run/mpsd.json",
            "log/mpsd.lock",
            "state/mpsd.lock",
            "state/plugin/node.json",
        ):
            (root / name).touch()
        (root / "log/mps/GPU-1/control.log").write_text("started\n")
        self.save()

    def save(self, **changes: object) -> None:
        saved = msgspec.structs.replace(Saved(boot_id=processes.boot_id()), **changes)
        (self.root / "state/mpsd.json").write_bytes(msgspec.json.encode(saved))

    def uninstall(self, *options: str) -> tuple[int, str]:
        done = gpufrac("uninstall", "node", "--config", str(self.path), *options)
        return done.returncode, done.stdout + done.stderr

    @property
    def there(self) -> set[str]:
        return {path.relative_to(self.root).as_posix() for path in self.root.rglob("*")} - {"config.yaml"}


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


def test_everything_of_ours_goes_and_nothing_else(node: Node) -> None:
    (node.root / "state/of-others").touch()
    (node.root / "cdi/nvidia.yaml").touch()
    code, said = node.uninstall()
    assert (code, node.there) == (0, {"state", "state/of-others", "cdi", "cdi/nvidia.yaml"}), said
    assert f"not ours, so it stays: {node.root}/state/of-others" in said
    assert "Nothing of gpufrac is left on this node" in said
    assert node.uninstall()[1].endswith("Nothing of gpufrac was here.\n")


def test_logs_may_be_kept(node: Node) -> None:
    assert node.uninstall("--keep-logs")[0] == 0
    assert "log/mps/GPU-1/control.log" in node.there
    assert not any(name.startswith(("run", "state")) for name in node.there)


def test_a_dry_run_names_it_all_and_changes_nothing(node: Node) -> None:
    before = node.there
    code, said = node.uninstall("--dry-run")
    assert (code, node.there) == (0, before)
    assert {f"would remove {node.root}/{name}" for name in ("run/mps", "state/plugin", "log/mps")} <= {
        *said.split("\n")
    }


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}'])
def test_state_that_cannot_be_read_keeps_all(node: Node, content: bytes) -> None:
    (node.root / "state/mpsd.json").write_bytes(content)
    before = node.there
    code, said = node.uninstall()
    assert (code, node.there >= before) == (1, True)
    assert "whether every compute mode was given back is not known" in said
    assert "gpufrac mpsd cleanup" in said


def test_a_compute_mode_that_is_ours_keeps_all_until_a_reboot(node: Node) -> None:
    node.save(compute_modes={UUID: ComputeMode.DEFAULT})
    before = node.there
    code, said = node.uninstall()
    assert (code, node.there >= before) == (1, True)
    assert f"GPU {UUID} has a compute mode of ours, and DEFAULT is to be given back: start mpsd" in said
    node.save(compute_modes={UUID: ComputeMode.DEFAULT}, boot_id="another")
    assert node.uninstall()[0] == 0


def test_where_the_state_is_lost_its_copy_tells(node: Node) -> None:
    """As it does to mpsd: else a compute mode of ours would stay in silence."""
    node.save(compute_modes={UUID: ComputeMode.DEFAULT})
    (node.root / "state/mpsd.json").rename(node.root / "run/mpsd.json")
    before = node.there
    code, said = node.uninstall()
    assert (code, node.there >= before) == (1, True)
    assert f"GPU {UUID} has a compute mode of ours" in said


def test_a_daemon_that_runs_keeps_all(node: Node) -> None:
    own = process.identify(os.getpid())
    assert own is not None
    pipe, boot = f"{node.root}/run/mps/{UUID}", processes.boot_id()
    ours = DaemonIdentity(
        boot_id=boot, pid=own.pid, start_time=own.start_time, process_group=own.pid, pipe_directory=pipe
    )
    node.save(daemons={UUID: ours})
    code, said = node.uninstall()
    assert (code, f"pid {own.pid}" in said, "state/mpsd.json" in node.there) == (1, True, True)
    node.save(daemons={UUID: msgspec.structs.replace(ours, start_time=1)})
    assert node.uninstall()[0] == 0


def test_what_was_cut_short_is_finished_by_the_next(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is killed: what says that something is to be undone is the last to go."""
    remove = traces._remove
    steps = len(traces.there(Node(short_tmp).config, logs=True))
    for survives in range(steps - 1):  # without the plugin's directory, which goes before
        (short_tmp / str(survives)).mkdir()
        node = Node(short_tmp / str(survives))
        left = [survives]

        def step(path: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            remove(path)

        with monkeypatch.context() as cut:
            cut.setattr(traces, "_remove", step)
            with pytest.raises(KeyboardInterrupt):
                traces.remove(node.config, logs=True)
        assert (node.root / "state/mpsd.json").exists()
        assert node.uninstall()[0] == 0
        assert node.there == {"cdi"}


def test_a_plugin_that_holds_its_lock_is_told(node: Node) -> None:
    from mpsd.common.lockfile import open_lock, try_lock

    descriptor = open_lock(f"{node.root}/run/plugin.lock")
    assert try_lock(descriptor)
    before = node.there
    code, said = node.uninstall()
    assert (code, node.there >= before, "stop it first" in said) == (1, True, True)
    os.close(descriptor)
