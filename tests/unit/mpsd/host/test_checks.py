import resource
from pathlib import Path

import pytest

from mpsd.host import checks
from mpsd.host.survival import INITIAL_PID

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "warned"),
    [
        (1024, 1048576, 65536, False),
        (1024, 16384, 16384, False),
        (1024, 4096, 4096, True),
        (100000, 1048576, 100000, False),
        (1024, INFINITY, 65536, False),
        (INFINITY, INFINITY, INFINITY, False),
    ],
)
def test_the_soft_limit_of_open_files(soft: int, hard: int, wanted: int, warned: bool) -> None:
    assert checks.nofile_soft(soft, hard) == wanted
    objection = checks.nofile_objection(hard)
    assert bool(objection) == warned
    assert not warned or objection.startswith("cannot open the 16384 files that MPS may need: the hard limit is 4096: ")


def test_it_is_raised_for_this_process_and_its_children() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        objection = checks.raise_nofile()
        after = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert after == (checks.nofile_soft(256, before[1]), before[1])
    assert objection == checks.nofile_objection(before[1])


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (INITIAL_PID, ""),
        ("pid:[4026532999]", "cannot see the processes of other containers: "),
        ("", "cannot tell whether mpsd is in the host's PID namespace: No such file or directory: mount /proc"),
    ],
)
def test_the_pid_namespace(short_tmp: Path, link: str, text: str) -> None:
    (short_tmp / "self" / "ns").mkdir(parents=True)
    if link:
        (short_tmp / "self" / "ns" / "pid").symlink_to(link)
    objection = checks.pid_namespace_objection(str(short_tmp))
    assert objection.startswith(text)
    assert bool(objection) == bool(text)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("Name:\tx\nCapEff:\t000001ffffffffff\n", ""),
        (
            "CapEff:\t00000000a80425fb\n",
            "cannot read the environment of containers' processes, so it can't be told: mpsd",
        ),
        ("Name:\tx\n", "cannot tell the capabilities of mpsd: 'CapEff': mount /proc"),
    ],
)
def test_who_may_not_look_into_processes_says_so(short_tmp: Path, status: str, text: str) -> None:
    (short_tmp / "self").mkdir()
    (short_tmp / "self" / "status").write_text(status)
    objection = checks.environment_objection("mpsd", "it can't be told", str(short_tmp))
    assert objection.startswith(text)
    assert bool(objection) == bool(text)


def test_root_is_asked_for() -> None:
    assert checks.root_objection(0) == ""
    assert "mpsd runs as user 1000: run it as root" in checks.root_objection(1000)


def test_a_run_root_that_others_cannot_reach_is_named_with_the_directory_in_the_way(short_tmp: Path) -> None:
    host = short_tmp / "host"
    run_root = host / "private" / "open" / "gpufrac"
    run_root.mkdir(parents=True)
    assert checks.closed_objection("/private/open/gpufrac", str(host)) == ""
    (host / "private").chmod(0o700)
    said = checks.closed_objection("/private/open/gpufrac", str(host))
    assert "other users can't pass /private, above mps.runRoot /private/open/gpufrac: chmod o+x /private" in said
    (host / "private").chmod(0o711)
    assert checks.closed_objection("/private/open/not/there/yet", str(host)) == ""
