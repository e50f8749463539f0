"""What a self-test showed: results, the verdict on each level, and the file that keeps them."""

import time
from collections.abc import Iterable, Mapping

import msgspec

from cdi.atomic import replace_file
from deviceplugin.selftest.plan import GRANTED, GpuFacts, Trial
from mpsd.common import records
from mpsd.common.errors import GpufracError
from mpsd.common.ranges import Count, Line, Name, UnixSeconds

RENAME = "camel"
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
MAX_FOUND = 300


class Result(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """Of one trial. `ok` None: it was not made, `found` says why."""

    gpu: Name
    index: Count
    mode: Line
    level: Line
    what: Line
    expected: Line
    found: Line
    ok: bool | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """On one mode and level: indices of the GPUs. A GPU is proven when something was tried there and all of that came
    out as expected."""

    mode: str
    level: str
    proven: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    unproven: tuple[int, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """The last self-test of a node. `version` is gpufrac's."""

    unix_s: UnixSeconds
    driver: Line
    version: Line
    results: tuple[Result, ...]


def judge(gpu: GpuFacts, trial: Trial, found: str) -> Result:
    """What one trial shows (pure). `found` is what the CUDA program printed, or why there is nothing."""
    ok = None if trial.why else found == (str(trial.size_bytes) if trial.expected == GRANTED else OUT_OF_MEMORY)
    return Result(
        gpu=gpu.uuid,
        index=gpu.index,
        mode=trial.mode,
        level=trial.level,
        what=trial.what,
        expected=trial.expected,
        found=trial.why or (GRANTED if found == str(trial.size_bytes) else found[:MAX_FOUND]),
        ok=ok,
    )


def verdicts(results: Iterable[Result]) -> tuple[Verdict, ...]:
    """One for each mode and level, in the order they were tried (pure)."""
    found: dict[tuple[str, str], dict[int, list[bool | None]]] = {}
    for result in results:
        found.setdefault((result.mode, result.level), {}).setdefault(result.index, []).append(result.ok)
    return tuple(
        Verdict(
            mode=mode,
            level=level,
            proven=tuple(index for index, ok in gpus.items() if True in ok and False not in ok),
            failed=tuple(index for index, ok in gpus.items() if False in ok),
            unproven=tuple(index for index, ok in gpus.items() if True not in ok and False not in ok),
        )
        for (mode, level), gpus in found.items()
    )


def failures_of(record: Record) -> str:
    """Which limits did not hold, empty when none failed (pure)."""
    return "; ".join(
        f"{v.mode} {v.level} on GPU {', '.join(map(str, v.failed))}" for v in verdicts(record.results) if v.failed
    )


def alarm(record: Record | None, driver: str | None) -> str:
    """What an operator must know of the last self-test, empty when nothing (pure)."""
    failed = failures_of(record) if record is not None and driver in (None, record.driver) else ""
    return f"the self-test found limits that do not hold: {failed}: see `gpufrac selftest`" if failed else ""


def line(record: Record | None, driver: str | None, version: str) -> str:
    """The last self-test in one line (pure)."""
    if record is None:
        return "never run"
    day = time.strftime("%Y-%m-%d", time.gmtime(record.unix_s))
    if driver is not None and record.driver != driver:
        return f"of another driver ({record.driver}, {day}): run `gpufrac selftest`"
    if failed := failures_of(record):
        text = f"FAILED: {failed}"
    else:
        proven = [v for v in verdicts(record.results) if v.proven]
        shown = (f"{v.mode} {v.level} on {len(v.proven)} GPU{'' if len(v.proven) == 1 else 's'}" for v in proven)
        text = f"proven: {', '.join(shown)}" if proven else "nothing proven"
    by = "" if record.version == version else f", by gpufrac {record.version}"
    return f"{text}; {day}, driver {record.driver}{by}"


def path_of(state_root: str) -> str:
    """The file of what the last self-test showed."""
    return f"{state_root}/selftest.json"


def load(state_root: str) -> Record | None:
    """The last one, None where there is none. Raises GpufracError for one that can't be used: that is not none."""
    path = path_of(state_root)
    try:
        return records.read(path, Record)
    except records.RecordError as error:
        raise GpufracError(f"cannot use the last self-test's result {path}: {error}: run `gpufrac selftest`") from error


def store(state_root: str, record: Record) -> None:
    """Replaces the last one; readable for all. Raises GpufracError."""
    try:
        replace_file(path_of(state_root), msgspec.json.format(msgspec.json.encode(record)), 0o644)
    except OSError as error:
        raise GpufracError(f"cannot keep the result: {path_of(state_root)}: {error.strerror}: run as root") from error


def document(record: Record) -> Mapping[str, object]:
    """For programs (pure)."""
    return {**msgspec.to_builtins(record), "verdicts": msgspec.to_builtins(verdicts(record.results))}
