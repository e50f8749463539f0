"""The self-test: what is tried where, what results mean, and that nothing is left behind."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from deviceplugin.cli import selftest
from deviceplugin.cli.output import Failure
from deviceplugin.selftest import record, run
from deviceplugin.selftest.plan import (
    HALF_BYTES,
    LIMIT_BYTES,
    NOTHING_RUNS,
    REFUSED,
    ROOM_BYTES,
    GpuFacts,
    Trial,
    Way,
    claims,
    facts,
    trials,
)
from deviceplugin.status.model import GpuAccount, ResourceStatus
from mpsd.common.errors import GpufracError, TransientError
from mpsd.config.model import GIB, Enforcement
from mpsd.gpu.model import MIB, ComputeMode, GpuHealth, Mode
from mpsd.localapi.snapshot import Attached, DaemonState, DaemonStatus, GpuClient, LimitReading
from tests.builders import info, status

SHARING, SLICING = Mode.SM_SHARING, Mode.TIME_SLICING
HARD, COOPERATIVE, NONE = Enforcement.HARD, Enforcement.COOPERATIVE, Enforcement.NONE
OLD = GpuFacts("GPU-a", 0, free_bytes=79 * GIB, protocol=2, ways=(Way("/p", 40 * GIB),))
NEW = replace(OLD, protocol=3, ways=(Way("/p/s/big_0", 40 * GIB), Way("/p/s/small_1", 8 * GIB)))
BOTH = {SHARING: HARD, SLICING: HARD}


def tried(gpu: GpuFacts, claimed: Mapping[Mode, Enforcement]) -> list[str]:
    return [f"{t.mode} {t.level}: {t.what}" for t in trials(gpu, claimed) if not t.why]


def test_what_is_tried_on_an_idle_gpu() -> None:
    assert tried(OLD, {SHARING: COOPERATIVE}) == [
        "sm-sharing cooperative: below its limit",
        "sm-sharing cooperative: above the limit in its environment",
        "sm-sharing cooperative: above the daemon's default limit",
    ]
    hard = ("below the cgroup's limit", "above the cgroup's limit", "above it in two processes")
    assert tried(NEW, BOTH) == [
        "sm-sharing cooperative: below its namespace's limit",
        "sm-sharing cooperative: above its namespace's limit",
        *(f"sm-sharing hard: {what}" for what in (*hard, "above it in an empty environment")),
        *(f"time-slicing hard: {what}" for what in (*hard, "above it in an empty environment")),
    ]


def test_the_smallest_namespace_is_overrun_and_the_largest_lets_the_cgroup_refuse() -> None:
    found = {(t.level, t.what): t for t in trials(NEW, {SHARING: HARD})}
    over = found[COOPERATIVE, "above its namespace's limit"]
    assert (over.pipe_directory, over.size_bytes) == ("/p/s/small_1", 8 * GIB + MIB)
    hard = found[HARD, "above it in two processes"]
    assert (hard.pipe_directory, hard.holding_bytes, hard.size_bytes) == ("/p/s/big_0", HALF_BYTES, HALF_BYTES)
    assert HALF_BYTES < LIMIT_BYTES < 2 * HALF_BYTES
    assert found[HARD, "above it in an empty environment"].pipe_directory == NOTHING_RUNS


@pytest.mark.parametrize(
    ("gpu", "claimed", "whys"),
    [
        (replace(OLD, trouble="it is lost: XID 79"), {SHARING: COOPERATIVE}, ["it is lost: XID 79"]),
        (replace(OLD, mode=SLICING), {SHARING: COOPERATIVE}, ["it is bound to time-slicing"]),
        (replace(NEW, mode=SHARING), {SLICING: HARD}, ["it is bound to sm-sharing"]),
        (replace(OLD, free_bytes=ROOM_BYTES - 1), {SHARING: COOPERATIVE}, ["are not granted, and 4Gi are needed"]),
        (replace(OLD, free_bytes=-GIB), {SHARING: COOPERATIVE}, ["0 of it are not granted"]),
        (replace(OLD, free_bytes=None), {SHARING: COOPERATIVE}, ["can't be told"]),
        (replace(OLD, ways=()), {SHARING: COOPERATIVE}, ["its MPS daemon is not ready"]),
        (replace(NEW, ways=()), {SHARING: COOPERATIVE}, ["no MPS namespace is free"]),
        (replace(OLD, free_bytes=40 * GIB), {SHARING: COOPERATIVE}, ["its limit of 40Gi is too near"]),
        (replace(NEW, ways=NEW.ways[1:], free_bytes=9 * GIB), {SHARING: COOPERATIVE}, ["8Gi is too near"]),
        (replace(NEW, ways=(Way("/p/s/tiny_0", 2 * GIB),)), {SHARING: HARD}, ["no way to MPS with a limit of 4Gi"]),
        (replace(NEW, mode=SHARING), {SHARING: HARD}, ["bound to sm-sharing: try when it is idle"]),
        (replace(NEW, shared_by_default=False), {SLICING: HARD}, ["compute mode lets no process in"] * 2),
    ],
)
def test_what_cant_be_tried_now_is_named(gpu: GpuFacts, claimed: Mapping[Mode, Enforcement], whys: list[str]) -> None:
    found = [trial.why for trial in trials(gpu, claimed) if trial.why]
    assert len(found) == len(whys)
    assert all(why in text for why, text in zip(whys, found, strict=True)), found


def test_containers_on_several_gpus_of_an_old_driver_have_the_daemons_default_only() -> None:
    found = list(trials(replace(OLD, alone=False), {SHARING: COOPERATIVE}))
    assert [t.what for t in found] == ["below its limit", "above the daemon's default limit"]
    assert not any(t.client_limit for t in found)


def resource(mode: str, enforcement: str, listed: int = 1) -> ResourceStatus:
    return ResourceStatus(
        name="a", mode=mode, enforcement=enforcement, minimum="none", registration="registered", registration_error="",
        listed=listed, healthy=0, held=0, free=0, reason="", reasons={},
    )  # fmt: skip


def test_the_node_promises_what_its_offers_do() -> None:
    offers = [
        resource(SHARING, COOPERATIVE),
        resource(SHARING, HARD),
        resource(SLICING, NONE),
        resource(SLICING, HARD, 0),
    ]
    assert claims(offers) == {SHARING: HARD}


def account(granted_gib: int) -> GpuAccount:
    return GpuAccount(
        uuid="", index=0, group="", drained="", usable_bytes=0, granted_bytes=granted_gib * GIB, free_bytes=0,
        allocations=0, mode=None, reason="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("granted_gib", "clients", "free_gib"),
    [
        (0, (), 80),
        (8, (), 72),
        (8, (GpuClient(pid=1, allocation_key="k", used_bytes=4 * GIB),), 72),
        (8, (GpuClient(pid=1, allocation_key="k", used_bytes=10 * GIB),), 70),
        (8, (GpuClient(pid=1, allocation_key="k"),), 72),
        (8, (GpuClient(pid=1, used_bytes=4 * GIB),), 68),
        (8, (GpuClient(pid=1),), None),
    ],
)
def test_nothing_that_is_granted_or_used_counts_as_free(
    granted_gib: int, clients: tuple[GpuClient, ...], free_gib: int | None
) -> None:
    found = facts(status(info(), clients=clients), account(granted_gib), ())
    assert found.free_bytes == (None if free_gib is None else free_gib * GIB)


def test_facts_of_a_gpu_that_is_not_to_be_touched() -> None:
    assert facts(status(info(), health=GpuHealth.SICK, reason="XID 48"), None, ()).trouble == "it is sick: XID 48"
    assert facts(status(info(), not_shared="MIG is on"), None, ()).trouble == "MIG is on"
    assert not facts(status(info(), driver_compute_mode=ComputeMode.PROHIBITED), None, ()).shared_by_default
    assert not facts(status(info(), group="pair"), None, ()).alone


# --- results


def judged(expected: str, found: str, why: str = "", index: int = 0) -> record.Result:
    trial = Trial(SLICING, HARD, "x", expected, 512, why=why)
    return record.judge(replace(NEW, index=index), trial, found)


@pytest.mark.parametrize(
    ("expected", "found", "why", "shown", "ok"),
    [
        ("granted", "512", "", "granted", True),
        ("granted", "511", "", "511", False),
        ("granted", "CUDA_ERROR_OUT_OF_MEMORY", "", "CUDA_ERROR_OUT_OF_MEMORY", False),
        ("refused", "CUDA_ERROR_OUT_OF_MEMORY", "", "CUDA_ERROR_OUT_OF_MEMORY", True),
        ("refused", "512", "", "granted", False),
        ("refused", "CUDA_ERROR_NO_DEVICE", "", "CUDA_ERROR_NO_DEVICE", False),
        ("refused", "no answer in 20 s", "", "no answer in 20 s", False),
        ("refused", "", "it is full", "it is full", None),
    ],
)
def test_only_the_right_answer_counts(expected: str, found: str, why: str, shown: str, ok: bool | None) -> None:
    result = judged(expected, found, why)
    assert (result.found, result.ok) == (shown, ok)


def test_one_failure_fails_a_gpu_and_what_was_not_tried_proves_nothing() -> None:
    good, bad, untried = (record.OUT_OF_MEMORY, ""), ("512", ""), ("", "full")
    rows = {0: (good, untried), 1: (good, bad), 2: (untried, untried), 3: (bad, untried)}
    (verdict,) = record.verdicts(judged("refused", *row, index=index) for index, each in rows.items() for row in each)
    assert (verdict.proven, verdict.failed, verdict.unproven) == ((0,), (1, 3), (2,))


def kept(*results: record.Result, **changes: Any) -> record.Record:
    made = record.Record(unix_s=1_795_953_600.0, driver="615.71.09", version="0.1.0", results=results)
    return structs.replace(made, **changes)


PROVEN, FAILED, UNTRIED = judged("refused", record.OUT_OF_MEMORY), judged("refused", "512"), judged("refused", "", "x")


@pytest.mark.parametrize(
    ("found", "driver", "line", "alarm"),
    [
        (None, "615.71.09", "never run", False),
        (kept(PROVEN), "615.71.09", "proven: time-slicing hard on 1 GPU; 2026-11-29, driver 615.71.09", False),
        (kept(PROVEN), None, "proven: time-slicing hard on 1 GPU; 2026-11-29, driver 615.71.09", False),
        (kept(UNTRIED), "615.71.09", "nothing proven; 2026-11-29, driver 615.71.09", False),
        (kept(PROVEN, FAILED), "615.71.09", "FAILED: time-slicing hard on GPU 0; 2026-11-29, driver 615.71.09", True),
        (kept(FAILED), "620.1", "of another driver (615.71.09, 2026-11-29): run `gpufrac selftest`", False),
        (kept(version="0.0.9"), "615.71.09", "nothing proven; 2026-11-29, driver 615.71.09, by gpufrac 0.0.9", False),
    ],
)
def test_the_last_one_in_a_line(found: record.Record | None, driver: str | None, line: str, alarm: bool) -> None:
    assert record.line(found, driver, "0.1.0") == line
    assert bool(record.alarm(found, driver)) == alarm


def test_the_file_is_readable_for_all_and_a_bad_one_is_not_none(short_tmp: Path) -> None:
    assert record.load(str(short_tmp)) is None
    record.store(str(short_tmp), kept(PROVEN))
    assert record.load(str(short_tmp)) == kept(PROVEN)
    path = Path(record.path_of(str(short_tmp)))
    assert path.stat().st_mode & 0o777 == 0o644
    for bad in ("{", '{"unixS": 1e300, "driver": "", "version": "", "results": []}'):
        path.write_text(bad)
        with pytest.raises(GpufracError, match=r"cannot use the last self-test's result .*: run `gpufrac selftest`"):
            record.load(str(short_tmp))
    with pytest.raises(GpufracError, match="cannot keep the result"):
        record.store(f"{short_tmp}/absent", kept())


# --- trying


class FakeMpsd:
    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.calls: list[tuple[int, int | None]] = []

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading:
        self.calls.append((soft_bytes, hard_bytes))
        if self.refusal:
            raise TransientError(self.refusal)
        return LimitReading(hard_bytes=hard_bytes)


class BusyCgroup(run.RealCgroup):
    """Processes of it end a little later."""

    busy = 0

    def remove(self) -> None:
        if self.busy:
            self.busy -= 1
            raise OSError(errno.EBUSY, "Device or resource busy")
        super().remove()


def test_the_limit_goes_before_the_cgroup_also_when_interrupted(short_tmp: Path) -> None:
    mpsd, cgroup = FakeMpsd(), BusyCgroup(str(short_tmp))
    cgroup.busy = 2
    scope = run.limited(mpsd, cgroup, NEW)
    assert scope.__enter__() == ""
    assert Path(cgroup.directory).is_dir()
    assert not scope.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert mpsd.calls == [(0, LIMIT_BYTES), (0, None)]
    assert not Path(cgroup.directory).exists()


def test_what_a_killed_one_left_goes_and_what_cant_go_is_named(short_tmp: Path) -> None:
    mpsd, cgroup = FakeMpsd(), BusyCgroup(str(short_tmp))
    run.clean_up(mpsd, cgroup, ["GPU-a"])
    assert not mpsd.calls
    cgroup.make()
    run.clean_up(mpsd, cgroup, ["GPU-a", "GPU-b"])
    assert mpsd.calls == [(0, None)] * 2
    cgroup.make()
    (Path(cgroup.directory) / "child").mkdir()
    with pytest.raises(GpufracError, match="remove it yourself"):
        run.clean_up(mpsd, cgroup, ["GPU-a"])


def test_a_limit_that_cant_be_set_is_told_and_nothing_stays(short_tmp: Path) -> None:
    cgroup = run.RealCgroup(str(short_tmp))
    with run.limited(FakeMpsd("it reads back as none"), cgroup, NEW) as trouble:
        assert trouble == "it reads back as none"
    assert not Path(cgroup.directory).exists()
    with run.limited(FakeMpsd(), run.RealCgroup("/proc"), NEW) as trouble:
        assert "run as root on the host" in trouble


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("echo 512; read -r _", "512"),
        ("echo CUDA_ERROR_OUT_OF_MEMORY; exit 1", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("exit 7", "it ended without a word, exit status 7"),
        ('echo "$CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"', "GPU-a /p 0=2048M"),
        ('echo "$1 $2 $3"', "--allocate 512 --hold"),
    ],
)
def test_how_a_program_is_run(short_tmp: Path, program: str, found: str) -> None:
    trial = Trial(SHARING, COOPERATIVE, "x", REFUSED, 512, "/p", client_limit=True)
    client = run.Client(("/bin/sh", "-c", program, "sh"), {})
    assert run.attempt(client, run.RealCgroup(str(short_tmp)), "GPU-a", trial) == found


def test_a_real_gpu_without_a_cuda_program_is_told_what_to_do() -> None:
    with pytest.raises(Failure, match="name one with --cuda-client or GPUFRAC_CUDA_CLIENT"):
        selftest._real_client(None)


def test_two_at_once_are_one_too_many(short_tmp: Path) -> None:
    first = selftest._alone(str(short_tmp))
    with first, pytest.raises(Failure, match="another self-test runs"), selftest._alone(str(short_tmp)):
        pass
    with selftest._alone(str(short_tmp)):
        pass


def test_an_empty_environment_names_the_gpu_only() -> None:
    trial = Trial(SLICING, HARD, "x", bare=True, client_limit=True)
    assert run.Client.environment(trial, "GPU-a") == {"CUDA_VISIBLE_DEVICES": "GPU-a"}


def test_a_process_enters_its_cgroup_before_the_program_begins(short_tmp: Path) -> None:
    cgroup = run.RealCgroup(str(short_tmp))
    cgroup.make()
    code = f'cat {cgroup.directory}/cgroup.procs; echo " $$"'
    trial = Trial(SLICING, HARD, "x", in_cgroup=True)
    client = run.Client(("/bin/sh", "-c", code), {"PATH": "/bin:/usr/bin"})
    listed, pid = run.attempt(client, cgroup, "g", trial).split()
    assert listed == pid
    gone = run.attempt(run.Client(("/bin/true",), {}), run.RealCgroup(f"{short_tmp}/none"), "g", trial)
    assert gone.startswith(f"cannot put the process into {short_tmp}/none/gpufrac-selftest: No such file")


@pytest.mark.parametrize(
    ("protocol", "text", "expected"),
    [
        (2, None, [("", 8)]),
        (3, None, []),
        (3, "nonsense = [", []),
        (3, '[servers.s]\npinned_memory_limit = "64M"\n', []),
        (
            3,
            "".join(f'[servers.s.namespaces.{n}]\npinned_memory_limit = "{g}G"\n' for n, g in
                    (("a_0", 8), ("a_1", 8), ("a_2", 16), ("gone_0", 4))),
            [("/s/a_2", 16), ("/s/a_1", 8)],
        ),
    ],
)  # fmt: skip
def test_ways_to_mps_that_no_container_has(
    short_tmp: Path, protocol: int, text: str | None, expected: list[tuple[str, int]]
) -> None:
    pipe = f"{short_tmp}/pipe"
    for name in ("a_0", "a_1", "a_2"):
        directory = Path(pipe, "s", name)
        directory.mkdir(parents=True)
        (directory / "control").touch()
    if text is not None:
        Path(f"{pipe}.toml").write_text(text)
    daemon = DaemonStatus(
        state=DaemonState.READY,
        protocol=protocol,
        pipe_directory=pipe,
        pinned_limit_bytes=8 * GIB,
        attached=(Attached("k", f"{pipe}.ns/a_0", 8 * GIB),),
    )
    assert run.ways(status(info(), daemon=daemon)) == tuple(Way(f"{pipe}{path}", gib * GIB) for path, gib in expected)
    assert run.ways(status(info(), daemon=structs.replace(daemon, state=DaemonState.BACKOFF))) == ()
    assert run.ways(status(info(), daemon=structs.replace(daemon, wedged=True))) == ()
