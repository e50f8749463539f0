"""`gpufrac events`, on files as both processes write them."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from mpsd.common.reason import Reason
from mpsd.events.file import directory_of
from mpsd.events.kinds import EventKind
from mpsd.events.model import Subject
from mpsd.events.recorder import Recorder
from tests.cli import gpufrac

HOUR_S = 3600.0
NOW_S = 1_700_002_800.0  # 2023-11-14T23:00:00Z
SHARE = Subject(key="k", resource="gpufrac.dev/a", gpus=("GPU-1111",), indices=(0,))
OWNED = Subject(key="k", namespace="default", pod="a", container="main", pod_uid="uid-a")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where both processes have written."""
    found = str(tmp_path_factory.mktemp("state"))
    recorders = {name: Recorder(found, name) for name in ("plugin", "mpsd")}
    plugin = recorders["plugin"]
    plugin.tell(EventKind.GRANTED, SHARE, detail="8Gi, sm-sharing", unix_s=NOW_S - HOUR_S)
    plugin.tell(EventKind.POD_KNOWN, OWNED, unix_s=NOW_S - HOUR_S + 1)
    plugin.tell(EventKind.REFUSED, Subject(resource="gpufrac.dev/b"), Reason("AllTaken", "all are taken"), unix_s=NOW_S)
    recorders["mpsd"].tell(EventKind.STARTED, pid=7, unix_s=NOW_S - HOUR_S / 2)
    for recorder in recorders.values():
        recorder.work(last=True)
        recorder.close()
    return found


def test_what_both_processes_told_is_one_table_by_time(root: str) -> None:
    done = gpufrac("events", "--state-root", root)
    assert done.returncode == 0
    assert [re.split(r"  +", line) for line in done.stdout.splitlines()] == [
        ["TIME", "KIND", "OF", "WHAT"],
        ["2023-11-14T22:00:00Z", "Granted", "default/a/main on GPU 0", "8Gi, sm-sharing"],
        ["2023-11-14T22:30:00Z", "Started", "mpsd", "-"],
        ["2023-11-14T23:00:00Z", "Refused", "gpufrac.dev/b", "all are taken"],
    ]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ((), ["Granted", "PodKnown", "Started", "Refused"]),
        (("--pod", "default/a"), ["Granted", "PodKnown"]),
        (("--gpu", "0"), ["Granted"]),
        (("--gpu", "GPU-1111"), ["Granted"]),
        (("--since", "2023-11-14T22:15:00Z"), ["Started", "Refused"]),
        (("--since", "2023-11-14T23:45:00+01:00"), ["Refused"]),
        (("--since", "10m"), []),
        (("--pod", "b"), []),
    ],
)
def test_a_program_gets_those_that_it_asks_for(root: str, options: tuple[str, ...], kinds: list[str]) -> None:
    done = gpufrac("events", "--state-root", root, "-o", "json", *options)
    assert [one["kind"] for one in json.loads(done.stdout)] == kinds


def test_a_time_that_is_none_is_refused_with_what_to_write(root: str) -> None:
    done = gpufrac("events", "--state-root", root, "--since", "yesterday")
    assert done.returncode == 2
    assert "such as 90s, 10m, 2h or 7d" in done.stderr


def test_a_node_without_events_has_none(tmp_path: Path) -> None:
    done = gpufrac("events", "--state-root", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"No such event is in {directory_of(str(tmp_path))}.\n")


def test_who_may_not_read_them_hears_that(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refused(path: str, *given: int, **more: int) -> int:
        if str(path).startswith(root):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *given, **more)

    monkeypatch.setattr(os, "open", refused)
    for options in ((), ("--follow",)):
        done = gpufrac("events", "--state-root", root, *options)
        assert done.returncode == 1
        assert "run it as root (sudo)" in done.stderr


def test_where_they_are_is_what_the_config_says_or_has_to_be_said(tmp_path: Path, root: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"""
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: [{{name: gpufrac.dev/a, memory: {{request: 8Gi}}, compute: {{mode: sm-sharing}}}}]
stateRoot: {root}
""")
    assert "Granted" in gpufrac("events", "--config", str(config)).stdout
    done = gpufrac("events", "--run-root", str(tmp_path))
    assert done.returncode == 1
    assert "name --state-root" in done.stderr


class Pause:
    """In place of a pause: what happens meanwhile."""

    def __init__(self, root: str) -> None:
        self.root, self.passed = root, 0

    def __call__(self, seconds: float) -> None:
        self.passed += 1
        if self.passed == 2:
            raise KeyboardInterrupt
        plugin = Recorder(self.root, "plugin")
        plugin.tell(EventKind.RELEASED, SHARE, unix_s=NOW_S + 1)
        plugin.work(last=True)
        plugin.close()


@pytest.mark.parametrize("output", ["table", "json"])
def test_what_comes_is_shown_once_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    plugin = Recorder(str(tmp_path), "plugin")
    plugin.tell(EventKind.GRANTED, SHARE, unix_s=NOW_S)
    plugin.tell(EventKind.POD_KNOWN, OWNED, unix_s=NOW_S)
    plugin.work(last=True)
    plugin.close()
    monkeypatch.setattr(time, "sleep", Pause(str(tmp_path)))
    done = gpufrac("events", "--state-root", str(tmp_path), "-f", "-o", output)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    if output == "json":
        shown = [json.loads(line) for line in lines]
        assert [(one["kind"], one["pod"]) for one in shown] == [("Granted", "a"), ("PodKnown", "a"), ("Released", "a")]
    else:
        assert [line.split()[1] for line in lines] == ["KIND", "Granted", "Released"]
        assert "default/a/main on GPU 0" in lines[2]
