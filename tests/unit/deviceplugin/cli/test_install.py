"""Units are written and removed, and nobody's changes are lost."""

from pathlib import Path

import pytest

from deviceplugin.cli import install
from deviceplugin.draft.units import MPSD, NAMES, PLUGIN
from tests.cli import gpufrac

CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: [{name: gpufrac.dev/a, unit: 1Gi, compute: {mode: sm-sharing}}]
"""


class Node:
    """A directory of units, a config, and what systemctl was asked for."""

    def __init__(self, root: Path) -> None:
        self.units, self.config = root / "system", root / "config.yaml"
        self.units.mkdir()
        self.config.write_text(CONFIG)
        self.asked: list[tuple[str, ...]] = []

    def install(self, *options: str) -> tuple[int, str]:
        done = gpufrac("install", "systemd", "--config", str(self.config), "--directory", str(self.units), *options)
        return done.returncode, done.stdout + done.stderr

    def uninstall(self, *options: str) -> tuple[int, str]:
        done = gpufrac("uninstall", "systemd", "--directory", str(self.units), *options)
        return done.returncode, done.stdout + done.stderr

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.units.iterdir()}


@pytest.fixture
def node(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(short_tmp)
    monkeypatch.setattr(install, "RUNS", str(short_tmp))
    monkeypatch.setattr(install, "_systemctl", lambda *words: made.asked.append(words))
    return made


def test_units_are_written_once_and_started_on_request(node: Node) -> None:
    code, said = node.install()
    assert (code, node.there, node.asked) == (0, set(NAMES), [("daemon-reload",)])
    assert f"systemctl enable --now {MPSD} {PLUGIN}" in said
    assert f"--config {node.config}" in (node.units / MPSD).read_text()
    code, said = node.install("--now")
    assert (code, said.count("is as it should be")) == (0, 2)
    assert node.asked[1:] == [("daemon-reload",), ("enable", "--now", *NAMES)]


def test_a_dry_run_prints_and_changes_nothing(node: Node) -> None:
    code, said = node.install("--dry-run")
    assert (code, node.there, node.asked) == (0, set(), [])
    assert "[Service]" in said


def test_where_systemd_does_not_run_the_commands_are_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "RUNS", "/nonexistent")
    code, said = node.install()
    assert (code, node.asked) == (0, [])
    assert "systemctl daemon-reload && systemctl enable --now" in said


def test_what_somebody_edited_is_kept(node: Node) -> None:
    node.install()
    path = node.units / PLUGIN
    path.write_text(path.read_text() + "Environment=A=b\n")
    before = path.read_text()
    for done in (node.install(), node.uninstall()):
        assert done[0] == 1
        assert PLUGIN in done[1]
        assert "--force" in done[1]
    assert (path.read_text(), node.there) == (before, set(NAMES))
    assert node.install("--force")[0] == 0
    assert path.read_text() != before


def test_a_config_that_is_missing_or_wrong_installs_nothing(node: Node) -> None:
    node.config.write_text("kind: NodeConfig\n")
    assert node.install()[0] == 2
    node.config.unlink()
    code, said = node.install()
    assert (code, node.there) == (2, set())
    assert f"gpufrac config init --output {node.config}" in said


def test_no_directory_of_units_is_told(node: Node) -> None:
    node.units.rmdir()
    code, said = node.install()
    assert (code, f"there is no {node.units}" in said, "--directory" in said) == (1, True, True)


def test_an_uninstall_ends_both_and_leaves_what_is_not_ours(node: Node) -> None:
    node.install()
    (node.units / f"{MPSD}.d").mkdir()
    (node.units / "other.service").touch()
    code, said = node.uninstall("--dry-run")
    assert (code, len(node.there)) == (0, 4)
    code, said = node.uninstall()
    assert (code, node.there) == (0, {f"{MPSD}.d", "other.service"})
    assert node.asked[1:] == [("disable", "--now", PLUGIN, MPSD), ("daemon-reload",)]
    assert f"{MPSD}.d" in said
    code, said = node.uninstall()
    assert (code, said) == (0, f"no units of gpufrac are in {node.units}\n")
