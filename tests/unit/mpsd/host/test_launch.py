"""Real children: the launcher is a program."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpsd.host import launch, launcher

ENVIRONMENT = (("PATH", "/usr/bin:/bin"), ("NAME", "a=b c"))


def run(
    program: Sequence[str], procs_files: Sequence[str] = (), namespaces: Sequence[str] = (), shared_memory: str = ""
) -> "subprocess.CompletedProcess[str]":
    arguments, environment = launch.command(program, ENVIRONMENT, procs_files, namespaces, shared_memory)
    return subprocess.run(
        arguments,
        env=environment,
        cwd="/usr",
        umask=0o027,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_without_anything_to_do_nothing_is_put_before_the_program() -> None:
    assert launch.command(["daemon", "-d"], ENVIRONMENT) == (["daemon", "-d"], dict(ENVIRONMENT))


def test_cgroups_are_joined_between_the_namespaces_that_show_and_hide_them() -> None:
    namespaces = ("/proc/1/ns/mnt", "/proc/1/ns/cgroup")
    arguments, environment = launch.command(["d", "-d"], (("LD_LIBRARY_PATH", "/x"),), ("/a", "/b"), namespaces, "/shm")
    assert arguments[arguments.index(launcher.__file__) + 1 :] == [
        *("--enter", "/proc/1/ns/cgroup", "--join", "/a", "--join", "/b", "--enter", "/proc/1/ns/mnt", "--shm", "/shm"),
        *("--set", "LD_LIBRARY_PATH=/x", "--", "d", "-d"),
    ]
    assert environment.get("LD_LIBRARY_PATH") == os.environ.get("LD_LIBRARY_PATH")


def test_the_program_gets_exactly_its_environment_and_keeps_the_rest(short_tmp: Path) -> None:
    procs = short_tmp / "a; touch b $(c)"
    procs.touch()
    script = "tr '\\0' '\\n' < /proc/$$/environ; pwd; umask; echo \"$@\""
    done = run(["sh", "-c", script, "x", "--join", "--"], [str(procs)])
    assert done.stdout.split("\n") == ["PATH=/usr/bin:/bin", "NAME=a=b c", "/usr", "0027", "--join --", ""]
    assert procs.read_text() == "0"
    assert [path.name for path in short_tmp.iterdir()] == [procs.name]


def ignored(status: str) -> set[int]:
    """Signals that a process ignores, of its line in /proc."""
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
    return {number for number in signal.valid_signals() if mask & 1 << (number - 1)}


@pytest.mark.parametrize("nohup", [False, True])
def test_no_signal_is_left_ignored(short_tmp: Path, nohup: bool) -> None:
    """But those that we were started with: what a shell starts in the background or under nohup, its user wants so."""
    (short_tmp / "procs").touch()
    program = ["grep", "SigIgn", "/proc/self/status"]
    arguments, environment = launch.command(program, ENVIRONMENT, [f"{short_tmp}/procs"])
    if nohup:
        arguments = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *arguments]
    done = subprocess.run(arguments, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    pythons_own = {signal.SIGPIPE, signal.SIGXFSZ}
    inherited = ignored(Path("/proc/self/status").read_text()) - pythons_own
    assert ignored(done.stdout) == inherited | ({signal.SIGHUP} if nohup else set())


def test_it_stays_the_process_that_was_started(short_tmp: Path) -> None:
    (short_tmp / "procs").touch()
    arguments, environment = launch.command(["sh", "-c", "echo $$"], ENVIRONMENT, [f"{short_tmp}/procs"])
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert int(child.stdout.read()) == child.pid


@pytest.mark.parametrize(
    ("procs_file", "namespace", "text"),
    [
        ("/none/x/cgroup.procs", "", "cannot join the cgroup /none/x: No such file or directory: run mpsd as root"),
        ("", "/none/mnt", "cannot enter the namespace /none/mnt: No such file or directory: run mpsd as root"),
        ("", "/dev/null", "cannot enter the namespace /dev/null: Invalid argument: run mpsd as root"),
        ("/dev/null", "", "cannot run no-such: No such file or directory: is the driver's MPS package installed"),
    ],
)
def test_what_goes_wrong_is_explained(procs_file: str, namespace: str, text: str) -> None:
    done = run(["no-such"], [procs_file] * bool(procs_file), [namespace] * bool(namespace))
    assert launch.explain(done.returncode, done.stdout).startswith(text)


def test_without_a_program_it_only_tries() -> None:
    assert run([], ["/dev/null"]).returncode == 0
    assert run([], ["/none/x"]).returncode == launcher.JOIN


@pytest.mark.parametrize(("returncode", "output"), [(0, "cannot x"), (1, "cannot x"), (97, "Killed"), (97, "")])
def test_the_words_of_the_program_are_not_explained(returncode: int, output: str) -> None:
    assert launch.explain(returncode, output) == ""
