"""Each thing that can be missing, one by one: one reason, with what to do."""

import pytest

from mpsd.limits.judge import Answer, Facts, Hierarchy, Verdict, is_new_enough, judge

GOOD = Facts("615.71.09", "/c", Hierarchy.UNIFIED, dmem=True, answers=(Answer(Verdict.OFFERED),))
REFUSED, SILENT = Answer(Verdict.REFUSED, "cannot read: Not Supported"), Answer(Verdict.SILENT, "cannot read: lost")


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "dmem"),
        ({"dmem": False}, "misc"),
        ({"dmem": False, "answers": (Answer(Verdict.IN_DRIVER),)}, "misc"),
        ({"answers": (Answer(Verdict.IN_DRIVER),), "gap": "/c/kubepods"}, "misc"),  # the kernel's files don't matter
        ({"answers": (Answer(Verdict.UNTOLD, "x"),)}, "dmem"),
        ({"answers": (SILENT, Answer(Verdict.OFFERED))}, "dmem"),
    ],
)
def test_nothing_is_missing(changes: dict[str, object], backend: str) -> None:
    found = judge(GOOD._replace(**changes))  # type: ignore[arg-type]
    assert (found.backend, found.missing) == (backend, ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver_version": "580.95.05"}, ("driver 580.95.05", "install 615")),
        ({"driver_version": "nonsense"}, ("driver nonsense", "install 615")),
        ({"hierarchy": Hierarchy.HYBRID}, ("beside v1", "unified_cgroup_hierarchy=1")),
        ({"hierarchy": Hierarchy.MISSING}, ("/c is no cgroup v2", "unified_cgroup_hierarchy=1")),
        ({"hierarchy": Hierarchy.PART}, ("not the top", "mount the host's /sys/fs/cgroup")),
        ({"gap": "/c/kubepods"}, ("below /c/kubepods", "set enforcement.enableDmem: true or enable it yourself")),
        ({"gap": "/c", "gap_error": "cannot write x: no"}, ("below /c", "cannot write x: no", "run mpsd as root")),
        ({"answers": (Answer(Verdict.OFFERED), REFUSED)}, ("cannot read: Not Supported",)),
        ({"answers": (SILENT, SILENT)}, ("no GPU can be asked", "lost")),
        ({"answers": ()}, ("no GPU can be asked", "without MIG")),
    ],
)
def test_one_thing_is_missing(changes: dict[str, object], words: tuple[str, ...]) -> None:
    (reason,) = judge(GOOD._replace(**changes)).missing  # type: ignore[arg-type]
    assert all(word in reason for word in words)


def test_all_that_is_missing_is_told() -> None:
    assert len(judge(GOOD._replace(gap="/c", answers=(REFUSED,))).missing) == 2
    found = judge(Facts("580.95.05", "/c", Hierarchy.MISSING))
    assert (len(found.missing), found.backend) == (2, "")


@pytest.mark.parametrize(
    ("version", "enough"),
    [("615.71.09", True), ("615", True), ("620.1", True), ("1000.1", True), ("614.99", False), ("", False),
     ("6150x.1", False), (" 615", False), ("9" * 5000, False)],
)  # fmt: skip
def test_driver_branches(version: str, enough: bool) -> None:
    assert is_new_enough(version) is enough
