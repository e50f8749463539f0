"""Where programs of the driver's are come by."""

import os

import pytest

from mpsd.host import launcher
from mpsd.host.place import HostPlace
from mpsd.host.survival import Survival

MOUNTS = "/proc/1/ns/mnt"
ELSEWHERE = Survival("", ("/sys/fs/cgroup/gpufrac",), ("/proc/1/ns/cgroup", MOUNTS), "/proc/1/root")
HERE = Survival("", ("/sys/fs/cgroup/gpufrac",))
VARIABLES = {"PATH": "/usr/bin:/bin", "A": "b"}


@pytest.mark.parametrize("survival", [HERE, ELSEWHERE])
def test_a_front_end_that_is_here_is_run_from_here(survival: Survival) -> None:
    place = HostPlace(survival)
    for program in ("sh", "/bin/sh"):
        assert place.reach([program, "-d"], VARIABLES) == ([program, "-d"], VARIABLES)


def test_one_that_is_on_the_host_only_is_run_in_its_mount_namespace() -> None:
    words, variables = HostPlace(ELSEWHERE).reach(["nvidia-cuda-mps-control", "server", "list"], VARIABLES)
    after = words.index("--")
    assert list(words[after + 1 :]) == ["nvidia-cuda-mps-control", "server", "list"]
    assert list(words[words.index(launcher.__file__) + 1 : after]) == [
        *("--enter", MOUNTS),
        *("--set", "PATH=/usr/bin:/bin"),
        *("--set", "A=b"),
    ]
    assert variables.keys() <= {"LD_LIBRARY_PATH"}


def test_where_the_host_is_not_reached_the_error_is_that_of_the_program() -> None:
    assert not os.path.exists("/nonexistent/control")
    assert HostPlace(HERE).reach(["/nonexistent/control"], VARIABLES) == (["/nonexistent/control"], VARIABLES)
