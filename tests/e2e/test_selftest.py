"""`gpufrac selftest` on simulated nodes: real processes prove limits that hold, and find those that do not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpsd.sim.driver import SimulatedDriver
from mpsd.sim.mps.faults import set_fault
from tests.cli import gpufrac
from tests.e2e.test_sim import Up, pod, process
from tests.waiting import until

CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - {name: example.com/shared, memory: {request: 8Gi}, compute: {mode: sm-sharing}}
  - {name: example.com/slice, memory: {request: 9Gi}, compute: {mode: time-slicing}, enforcement: none}
"""
OLD, NEW = "580.95.05", "615.71.09"
PROMISED = {
    OLD: [("sm-sharing", "cooperative")],
    NEW: [("sm-sharing", "cooperative"), ("sm-sharing", "hard"), ("time-slicing", "hard")],
}


class SimNode:
    def __init__(self, up: Up) -> None:
        self.up = up
        self.root = f"{up.directory}/run"
        self.driver = SimulatedDriver(f"{self.root}/sim")

    def selftest(self, code: int, *arguments: str) -> dict[str, Any]:
        done = process("selftest", "--run-root", self.root, "-o", "json", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert not Path(self.driver.cgroups.root, "gpufrac-selftest").exists()
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found

    def status(self) -> str:
        return gpufrac("status", "--run-root", self.root).stdout


@contextmanager
def sim_node(root: Path, *options: str) -> Iterator[SimNode]:
    config = root / "config.yaml"
    config.write_text(CONFIG)
    up = Up(root / "n", "--gpus", "2", "--gpu-memory", "40Gi", "--config", str(config), *options)
    try:
        assert "is up" in up.first_line, up.stop()[1]
        yield SimNode(up)
    finally:
        up.stop()


def verdicts(found: dict[str, Any], key: str) -> list[tuple[str, str, list[int]]]:
    return [(v["mode"], v["level"], v[key]) for v in found["verdicts"] if v[key]]


@pytest.mark.parametrize("options", [("--driver", OLD), ("--driver", NEW), ("--driver", NEW, "--no-dmem")])
def test_limits_that_hold_are_proven_and_others_are_found(short_tmp: Path, options: tuple[str, ...]) -> None:
    with sim_node(short_tmp, *options) as node:
        promised = PROMISED[options[1]]
        assert "selftest:     never run" in node.status()
        found = node.selftest(0)
        assert verdicts(found, "proven") == [(*each, [0, 1]) for each in promised]
        assert not verdicts(found, "failed")
        assert "selftest:     proven: sm-sharing cooperative on 2 GPUs" in node.status()
        # What ran for the proof is seen to be gone with mpsd's next look.
        until(lambda: "Nothing needs attention." in node.status(), node.status)

        set_fault(node.driver.directory, "limit-not-enforced")
        node.driver.set_fault("limit-forgotten")
        found = node.selftest(1, "--gpu", "1")
        assert verdicts(found, "failed") == [(*each, [1]) for each in promised]
        assert "! the self-test found limits that do not hold: sm-sharing cooperative on GPU 1" in node.status()


def test_a_bound_gpu_is_used_in_its_own_mode_only(short_tmp: Path) -> None:
    with sim_node(short_tmp, "--driver", NEW) as node:
        assert node.up.sim("admit", "-", text=pod("a", resource="example.com/slice")).returncode == 0
        found = node.selftest(0)
        assert verdicts(found, "unproven") == [("sm-sharing", "cooperative", [0]), ("sm-sharing", "hard", [0])]
        assert verdicts(found, "proven")[-1] == ("time-slicing", "hard", [0, 1])
        assert node.up.sim("client", "a/main", "--allocate", "8Gi").returncode == 0

        for name in "bcd":
            assert node.up.sim("admit", "-", text=pod(name, resource="example.com/slice")).returncode == 0
        full = node.selftest(1, "--gpu", "0")
        assert {row["ok"] for row in full["results"]} == {None}
        assert any("are not granted, and 4Gi are needed" in row["found"] for row in full["results"])
