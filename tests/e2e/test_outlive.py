"""Real processes, cgroups and mount namespaces: what is started through `mpsd.host` outlives the pod of its parent.

A pod is a cgroup in every hierarchy with a supervisor in it, ended as a container runtime does: everybody is killed who
sits in the pod's cgroup of any hierarchy. A "daemon" answers each line it gets by starting programs.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpsd.host import cgroups, launch
from mpsd.host.mountinfo import parse
from mpsd.host.survival import INITIAL_CGROUP, INITIAL_PID
from tests.waiting import WAIT_S

ROOT = str(Path(__file__).resolve().parents[2])
PROBE = """
import json, subprocess, sys
from mpsd.host import cgroups, launch, sharedmemory, survival
class Ended:
    def __init__(self, arguments):
        done = subprocess.run(arguments, env={}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.returncode, self.output = done.returncode, done.stdout
init, name, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
found = survival.probe(Ended, [directory], init=init)
print(json.dumps([found.reason, found.places, found.namespaces]), flush=True)
"""
OWN_INIT = """
import os, sys
sys.argv[1] = str(os.getpid())  # so that it sees its own mounts as the host does
"""
SUPERVISE = """
files = cgroups.prepare(found.places, name)
program = ["sh", "-c", sys.argv[4], "daemon"]
arguments, environment = launch.command(program, [("PATH", "/usr/bin:/bin")], files, found.namespaces)
with open(f"{directory}/log", "wb") as log:
    daemon = subprocess.Popen(arguments, env=environment, cwd="/", umask=0o022, start_new_session=True,
                              stdin=subprocess.DEVNULL, stdout=log, stderr=log)
print(daemon.pid, flush=True)
daemon.wait()
"""
DAEMON = """
exec 3< {0}/ask 4> {0}/answer
while read -r line <&3; do
    {{ cat /proc/self/cgroup; readlink /proc/self/ns/mnt /proc/self/ns/cgroup; cat {0}/file; echo "end $line"; }} >&4
done
"""


def tops() -> tuple[str, ...]:
    """The top of every hierarchy as this test sees it."""
    own = cgroups.parse_memberships(Path("/proc/self/cgroup").read_text())
    places, _ = cgroups.locate(own, parse(Path("/proc/self/mountinfo").read_text()), host_view=True, private=False)
    return tuple(os.path.dirname(place) for place in places)


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if os.readlink("/proc/self/ns/pid") != INITIAL_PID or os.readlink("/proc/self/ns/cgroup") != INITIAL_CGROUP:
        return "needs the host's PID and cgroup namespaces"
    try:
        for top in tops():
            os.mkdir(f"{top}/gpufrac-may-i-{os.getpid()}")
            os.rmdir(f"{top}/gpufrac-may-i-{os.getpid()}")
    except OSError as error:
        return f"cannot make cgroups here: {error}"
    if subprocess.run(["unshare", "-m", "-C", "true"], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        return "cannot make namespaces here"
    return "" if tops() else "no cgroups are mounted"


WHY_NOT = why_not()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


class Pod:
    """A cgroup in every hierarchy, and what runs there. `mine` is the name of the cgroups of its daemon."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.places = tuple(f"{top}/test-{self.name}" for top in tops())
        self.files = cgroups.prepare(self.places, "pod")
        self.started: list[subprocess.Popen[str]] = []
        (directory / "file").write_text("of the host\n")

    def start(self, script: str, *more: str, prefix: Sequence[str] = (), init: int = 0) -> "subprocess.Popen[str]":
        """A supervisor in the pod; `prefix` is put before its command."""
        arguments, environment = launch.command(
            [*prefix, sys.executable, "-c", script, str(init or os.getpid()), self.name, str(self.directory), *more],
            [("PATH", os.environ["PATH"]), ("PYTHONPATH", ROOT)],
            self.files,
        )
        supervisor = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
        self.started.append(supervisor)
        return supervisor

    def kill(self) -> None:
        """As a runtime does: every process of every hierarchy, until nobody is left."""
        for place in self.places:
            while pids := cgroups.members((place,), "pod"):
                for pid in pids:
                    end(pid)
        for supervisor in self.started:
            supervisor.communicate(timeout=WAIT_S)

    def close(self) -> None:
        self.kill()
        own = tuple(f"{top}/{cgroups.OWN}" for top in tops())
        for pid in cgroups.members(own, self.name):
            end(pid)
        cgroups.remove(own, self.name)
        for place in self.places:
            for directory, _, _ in os.walk(place, topdown=False):
                os.rmdir(directory)
        for place in own:
            with contextlib.suppress(OSError):  # another mpsd's
                os.rmdir(place)


def end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], WAIT_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


@pytest.fixture
def pod(short_tmp: Path) -> Iterator[Pod]:
    pod = Pod(short_tmp)
    try:
        yield pod
    finally:
        pod.close()


@pytest.fixture
def ask(short_tmp: Path) -> Iterator[Callable[[str], list[str]]]:
    """Asks the daemon through pipes that are neither the pod's nor ours alone."""
    for name in ("ask", "answer"):
        os.mkfifo(short_tmp / name)
    question, answer = (os.open(short_tmp / name, os.O_RDWR | os.O_NONBLOCK) for name in ("ask", "answer"))

    def say(line: str) -> list[str]:
        os.write(question, f"{line}\n".encode())
        text = ""
        while not text.endswith(f"end {line}\n"):
            assert select.select([answer], [], [], WAIT_S)[0], (text, (short_tmp / "log").read_text())
            text += os.read(answer, 65536).decode()
        return text.splitlines()

    yield say
    os.close(question)
    os.close(answer)


def answer_of(supervisor: "subprocess.Popen[str]") -> tuple[str, list[str], list[str]]:
    assert supervisor.stdout is not None
    reason, places, namespaces = json.loads(supervisor.stdout.readline())
    return reason, places, namespaces


def memberships(lines: Sequence[str]) -> list[str]:
    """The cgroups among what the daemon said, one per hierarchy."""
    return [found.path for found in cgroups.parse_memberships("\n".join(lines))]


@pytest.mark.parametrize("prefix", [(), ("unshare", "-m"), ("unshare", "-m", "-C")])
def test_a_daemon_outlives_its_pod_and_goes_on_starting_programs(
    pod: Pod, ask: Callable[[str], list[str]], prefix: tuple[str, ...]
) -> None:
    supervisor = pod.start(PROBE + SUPERVISE, DAEMON.format(pod.directory), prefix=prefix)
    reason, places, namespaces = answer_of(supervisor)
    assert (reason, len(places), len(namespaces)) == ("", len(tops()), max(0, len(prefix) - 1))
    assert supervisor.stdout is not None
    daemon = int(supervisor.stdout.readline())

    before = ask("before")
    assert memberships(before).count(f"/{cgroups.OWN}/{pod.name}") == len(tops())
    assert f"/test-{pod.name}/pod" not in memberships(before)
    assert before[-4:-1] == [*(os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "cgroup")), "of the host"]
    assert cgroups.members(tuple(f"{top}/{cgroups.OWN}" for top in tops()), pod.name) == (daemon,)

    pod.kill()
    assert supervisor.returncode == -signal.SIGKILL
    assert ask("after")[:-1] == before[:-1]


def test_without_it_the_daemon_ends_with_the_pod(pod: Pod, ask: Callable[[str], list[str]]) -> None:
    supervisor = pod.start(PROBE + "found = survival.Survival('no')" + SUPERVISE, DAEMON.format(pod.directory))
    answer_of(supervisor)
    assert supervisor.stdout is not None
    daemon = os.pidfd_open(int(supervisor.stdout.readline()))
    try:
        assert memberships(ask("x")).count(f"/test-{pod.name}/pod") == len(tops())
        pod.kill()
        assert select.select([daemon], [], [], WAIT_S)[0]
    finally:
        os.close(daemon)


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        ("mount -o remount,bind,ro {point}", "cannot create the cgroup {point}/gpufrac"),
        ("umount {point}", "cannot create cgroups outside of mpsd's own: the cgroup hierarchy "),
        (
            "mount --bind {point}/test-{name}/pod {point}",
            "cannot create cgroups outside of mpsd's own: {point} ",
        ),
    ],
)
def test_a_tree_that_does_not_allow_it_is_named(pod: Pod, break_it: str, text: str) -> None:
    for point in (tops()[0], tops()[-1]):
        script = f'{break_it.format(point=point, name=pod.name)} && exec "$@"'
        supervisor = pod.start(OWN_INIT + PROBE, prefix=("unshare", "-m", "sh", "-c", script, "x"))
        reason, places, namespaces = answer_of(supervisor)
        assert reason.startswith(text.format(point=point))
        assert reason.endswith("; until then its daemons end with it")
        assert (places, namespaces) == ([], [])


def test_a_pid_namespace_of_its_own_is_named(pod: Pod) -> None:
    supervisor = pod.start(PROBE, prefix=("unshare", "-m", "-p", "--fork", "--mount-proc"), init=1)
    reason, _, _ = answer_of(supervisor)
    assert reason.startswith("cannot reach the host from mpsd's container: it has a PID namespace of its own: ")


def test_a_directory_that_is_only_the_pods_is_named(pod: Pod) -> None:
    script = f'mount -t tmpfs none {pod.directory} && exec "$@"'
    supervisor = pod.start(PROBE, prefix=("unshare", "-m", "sh", "-c", script, "x"))
    reason, _, _ = answer_of(supervisor)
    assert reason.startswith(f"cannot start daemons on the host: {pod.directory} in mpsd's container is not the host's")


SHARED_MEMORY = """
import os, subprocess, sys
from mpsd.common.errors import TransientError
from mpsd.host import launch, sharedmemory
directory = sys.argv[1] + "/mps/GPU-1/shm"
def sees(*arguments):
    command, environment = launch.command(arguments, [("PATH", "/usr/bin:/bin")], shared_memory=directory)
    return subprocess.check_output(command, env=environment, text=True).split()
sharedmemory.mount(directory)
open(directory + "/region", "w").close()
sharedmemory.mount(directory)
print(sees("ls", "/dev/shm"), sees("stat", "-c", "%a", "/dev/shm"))
status = os.statvfs(directory)
print(bool(status.f_flag & os.ST_NOSUID), bool(status.f_flag & os.ST_NOEXEC), os.path.exists("/dev/shm/region"))
sharedmemory.unmount(directory)
sharedmemory.unmount(directory)
print(os.path.exists(directory))
try:
    sharedmemory.mount(directory, f"/proc/{sys.argv[2]}/root")
except TransientError as error:
    print(error)
print(os.path.exists(directory))
"""


def test_the_daemon_sees_the_shared_memory_at_dev_shm_and_nobody_else(short_tmp: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", SHARED_MEMORY, str(short_tmp), str(os.getpid())],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ROOT},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
    )
    hidden = f"cannot show the host the shared memory of MPS at {short_tmp}/mps/GPU-1/shm: mount the volume of"
    said = done.stdout.splitlines()
    assert said.pop(3) == f"{hidden} mps.runRoot with mountPropagation: Bidirectional"
    assert said == ["['region'] ['1777']", "True True False", "False", "False"]
