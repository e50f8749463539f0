"""Containers on several GPUs of a simulated node, wherever the scheduler put them: what they get, what they see, and
who waits for whom."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpsd.gpu.model import MIB
from tests.cli import gpufrac
from tests.e2e.test_sim import GIB, OUT_OF_MEMORY, Up, holding, run
from tests.e2e.test_sim import pod as share
from tests.e2e.test_sim_annotated import GPU, NEW, main, pod
from tests.waiting import until

FILES = Path(__file__).parent / "several"
HALF_MIB = 40202
"""Of the usable memory of a simulated GPU of 80 GiB."""


class Got(NamedTuple):
    """What a container has: its GPUs by index, MiB on each."""

    gpus: tuple[int, ...]
    request_mib: int
    limit_mib: int
    mode: str


SLICED, SHARED = "time-slicing", "sm-sharing"
LARGE, BURST = Got((0, 1), 4000, 4000, SLICED), Got((0,), 4096, 8192, SLICED)
CASES = {
    "server-on-four": (4, {"server": Got((0, 1, 2, 3), 40960, 61440, SHARED)}),
    "half-of-two": (2, {"notebook": Got((0, 1), HALF_MIB, 64324, SLICED)}),
    "large-then-burst": (2, {"large": LARGE, "burst": BURST}),
    "burst-then-large": (2, {"large": LARGE, "burst": BURST}),
    "one-then-two": (2, {"one": Got((0,), 4000, 4000, SHARED), "two": Got((0, 1), 4000, 4000, SHARED)}),
    "two-halves": (2, {name: Got((0,), HALF_MIB, HALF_MIB, SLICED) for name in ("first", "second")}),
}


def got(report: dict[str, Any], name: str) -> Got:
    container = main(report, name)
    allocation = container["allocation"]
    assert container["state"] == "Running"
    assert allocation["enforcement"] == "hard"
    env = container["env"]
    assert env["NVIDIA_GPU_MEMORY_REQUEST"] == str(allocation["requestBytes"] // MIB), "guaranteed, whoever came first"
    assert env["NVIDIA_GPU_MEMORY_LIMIT"] == str(allocation["limitBytes"] // MIB)
    gpus = tuple(int(uuid[-2:]) for uuid in allocation["gpus"])
    return Got(gpus, allocation["requestBytes"] // MIB, allocation["limitBytes"] // MIB, allocation["mode"])


@pytest.mark.parametrize(
    ("name", "gpus"), [(name, gpus) for name, (fewest, _) in CASES.items() for gpus in sorted({fewest, 4})]
)
def test_what_a_scheduler_places_on_several_gpus_runs(name: str, gpus: int) -> None:
    done = gpufrac("sim", "run", "-o", "json", *NEW, "--gpus", str(gpus), "--schedule", str(FILES / f"{name}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    wanted = CASES[name][1]
    assert {shown["name"]: got(report, shown["name"]) for shown in report["pods"] if shown["name"] in wanted} == wanted


@pytest.mark.parametrize("names", [*itertools.permutations(("wide", "narrow"))], ids="-".join)
def test_shares_of_a_group_beside_shares_of_its_gpus(names: Sequence[str]) -> None:
    text = "".join(share(name, resource=f"gpufrac.dev/{name}") for name in names)
    code, report = run(*NEW, "--gpus", "4", "--config", str(FILES / "group-beside-one.yaml"), text=text)
    assert code == 0, report["pods"]
    wide, narrow = (main(report, name)["allocation"] for name in ("wide", "narrow"))
    assert (len(wide["gpus"]), wide["limitBytes"]) == (4, 56 * GIB)
    assert (len(narrow["gpus"]), narrow["limitBytes"]) == (1, 20 * GIB)


# --- a node that stays up


@pytest.fixture
def up(short_tmp: Path) -> Iterator[Up]:
    node = Up(short_tmp / "n", *NEW, "--gpus", "4", "--gpu-memory", "40Gi")
    try:
        assert "is up" in node.first_line, node.stop()[1]
        yield node
    finally:
        node.stop()


def admit(up: Up, text: str) -> dict[str, Any]:
    done = up.sim("admit", "-o", "json", "--schedule", "-", text=text)
    assert done.returncode == 0, done.stdout
    return dict(json.loads(done.stdout))


def allocate(up: Up, name: str, size: str, *options: str) -> str:
    return up.sim("client", f"{name}/main", "--allocate", size, *options).stdout.strip()


def gpus_of(up: Up) -> list[dict[str, Any]]:
    """Every GPU with its daemon and who uses it."""
    done = gpufrac("daemons", "-o", "json", "--run-root", f"{up.directory}/run")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def daemons(up: Up) -> list[int]:
    """How many GPUs each MPS daemon that is ready has, the largest first."""
    daemons = (shown["daemon"] for shown in gpus_of(up))
    return sorted(Counter(d["name"] for d in daemons if d["state"] == "ready").values(), reverse=True)


@pytest.mark.parametrize("mode", [SHARED, SLICED])
def test_each_container_sees_its_own_gpus_and_has_its_limit_on_each(up: Up, mode: str) -> None:
    one = pod("one", memory="8192", mode=mode)
    two = pod("two", request="4Gi", limit="6Gi", mode=mode, count="2")
    report = admit(up, one + two)
    assert (got(report, "one").gpus, got(report, "two").gpus) == ((0,), (0, 1))
    assert daemons(up) == [2, 1, 1]
    for name, gpus, limit_gib in (("one", 1, 8), ("two", 2, 6)):
        seen = json.loads(up.sim("client", f"{name}/main", "--info").stdout.splitlines()[0])
        assert seen["devices"] == [GPU.format(index) for index in range(gpus)]
        assert seen["mps"] == (mode == SHARED)
        for ordinal in map(str, range(gpus)):
            assert allocate(up, name, f"{limit_gib}Gi", "--device", ordinal) == str(limit_gib * GIB)
            assert allocate(up, name, f"{limit_gib * 1024 + 1}Mi", "--device", ordinal) == OUT_OF_MEMORY
    assert up.sim("delete", "two").returncode == 0
    until(lambda: daemons(up) == [1, 1, 1, 1], "a daemon for each GPU again")
    assert allocate(up, "one", "8Gi") == str(8 * GIB), "by the directory that it mounted before"


def test_who_waits_for_a_daemon_in_use_says_for_whom_and_runs_by_itself_when_that_is_gone(up: Up) -> None:
    admit(up, pod("one", memory="8192", mode=SHARED))
    with holding(up, "one/main", "--allocate", "1Gi"):
        until(lambda: gpus_of(up)[0]["clients"], "the client to be known")
        done = up.sim("admit", "-o", "json", "--schedule", "-", text=pod("two", memory="4096", mode=SHARED, count="2"))
        assert done.returncode == 1
        waiting = main(json.loads(done.stdout), "two")
        assert (waiting["state"], waiting["reason"]) == ("Waiting", "CreateContainerError")
        assert "its 2 GPUs (0, 1) have 2 MPS daemons, and it needs one for all of them" in waiting["message"]
        assert "default/one/main (since " in waiting["message"]
        assert allocate(up, "one", "1Gi") == str(GIB), "nobody is disturbed"
        assert up.sim("client", "two/main").returncode != 0
    until(lambda: allocate(up, "two", "4Gi") == str(4 * GIB), "the pod that waited to run")
    assert allocate(up, "one", "8Gi") == str(8 * GIB)
    assert daemons(up) == [2, 1, 1]


def test_the_scheduler_places_pods_of_several_gpus_over_those_that_others_use(up: Up) -> None:
    """It knows of memory, and of no groups."""
    first = pod("a", memory="30000", mode=SHARED) + pod("b", memory="30000", mode=SHARED, count="2")
    report = admit(up, first + pod("c", memory="8192", mode=SHARED, count="3"))
    assert got(report, "a").gpus == (0,)
    assert got(report, "b").gpus == (1, 2)
    spread = got(report, "c").gpus
    assert len(spread) == 3
    assert not set(spread).isdisjoint((0, 1, 2))
    for name, gpus in (("a", 1), ("b", 2), ("c", 3)):
        assert len(json.loads(up.sim("client", f"{name}/main", "--info").stdout.splitlines()[0])["devices"]) == gpus
