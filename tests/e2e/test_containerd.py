"""Our NRI session at a real containerd, with a front end that only records.

What a runtime does is pinned here where our design leans on it; the rest of what was seen is in the session's tests.
Debian's containerd 2.1.9 with runc, in a directory that GPUFRAC_CONTAINERD names (bin/containerd, its shim, bin/ctr).
"""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cdi.model import ContainerEdits, Device, Spec
from cdi.writer import SpecDirectory
from deviceplugin.nri.model import Adjustment, Container, ContainerState, Inventory, Mount, Pod, Refused, Runtime
from deviceplugin.nri.session import NriSession
from tests.e2e.containerd.cri import CriError
from tests.e2e.containerd.node import Containerd, why_not
from tests.waiting import WAIT_S, until

VENDOR, CLASS = "gpufrac.dev", "allocation"
KIND = f"{VENDOR}/{CLASS}"
DISK = ("rbind", "nosuid", "nodev")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(_reason := why_not()), reason=f"containerd: {_reason}"),
]


class Recorder:
    """A front end that answers what a test tells it to and remembers what it was told."""

    def __init__(self) -> None:
        self.told = threading.Condition()
        self.events: list[tuple[str, str]] = []
        self.states: list[tuple[dict[str, Pod], dict[str, Container]]] = []
        self.runtimes: list[Runtime] = []
        self.created: dict[str, Container] = {}
        self.unconcerned: set[str] = set()
        """Names of containers that are not ours to judge."""
        self.on_create: Callable[[Pod, Container], Adjustment] = lambda _pod, _container: Adjustment()
        self.on_start: Callable[[Pod, Container], None] = lambda _pod, _container: None

    def concerns(self, pod: Pod, container: Container) -> bool:
        return container.name not in self.unconcerned

    def brief(self, pods: Sequence[Pod], containers: Sequence[Container]) -> Inventory:
        return pods, containers

    def connected(self, runtime: Runtime) -> None:
        self.runtimes.append(runtime)
        self._tell("connected", runtime.name)

    def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> None:
        self.states.append(({pod.id: pod for pod in pods}, {one.id: one for one in containers}))
        self._tell("synchronize", "")

    def run_pod(self, pod: Pod) -> None:
        self._tell("run_pod", pod.name)

    def stop_pod(self, pod: Pod) -> None:
        self._tell("stop_pod", pod.name)

    def remove_pod(self, pod: Pod) -> None:
        self._tell("remove_pod", pod.name)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        self.created[container.id] = container
        self._tell("create", container.name)
        return self.on_create(pod, container)

    def start_container(self, pod: Pod, container: Container) -> None:
        self._tell("start", container.name)
        self.on_start(pod, container)

    def stop_container(self, pod: Pod, container: Container) -> None:
        self._tell("stop", container.name)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._tell("remove", container.name)

    def disconnected(self, reason: str) -> None:
        self._tell("disconnected", reason)

    def wait(self, kind: str, times: int = 1) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.kinds().count(kind) >= times, WAIT_S), f"no {kind}: {self.events}"

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def _tell(self, kind: str, what: str) -> None:
        with self.told:
            self.events.append((kind, what))
            self.told.notify_all()


@pytest.fixture(scope="module")
def node() -> Iterator[Containerd]:
    directory = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    try:
        with Containerd(directory, directory / "cdi") as containerd:
            yield containerd
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def session(node: Containerd, recorder: Recorder) -> Iterator[NriSession]:
    session = NriSession(node.nri_socket, "gpufrac", "15", recorder)
    session.start()
    recorder.wait("synchronize")
    yield session
    session.close()


@pytest.fixture
def pod(node: Containerd, request: pytest.FixtureRequest) -> Iterator[str]:
    pod = node.cri.run_pod(request.node.name.replace("_", "-"), annotations={"example.com/note": "hello"})
    yield pod
    node.cri.stop_pod(pod)
    node.cri.remove_pod(pod)


def test_what_runs_already_is_told_when_we_register(node: Containerd, pod: str, recorder: Recorder) -> None:
    running = node.cri.create(pod, "running", [("A", "1")])
    node.cri.start(running)
    created = node.cri.create(pod, "created")
    ended = node.cri.create(pod, "ended", command=("/bin/sh", "-c", "exit 3"))
    node.cri.start(ended)
    stopped = node.cri.run_pod("stopped")
    node.cri.stop_pod(stopped)
    until(lambda: node.cri.status(ended).state == "EXITED")

    session = NriSession(node.nri_socket, "gpufrac", "15", recorder)
    session.start()
    recorder.wait("synchronize")
    state = session.state
    session.close()
    node.cri.remove_pod(stopped)

    pods, containers = recorder.states[0]
    assert (pods[pod].full_name, pods[pod].annotations["example.com/note"]) == (
        "default/test-what-runs-already-is-told-when-we-register",
        "hello",
    )
    assert pods[pod].pid == node.cri.pod_pid(pod)
    assert pods[stopped].pid == 0  # listed until it is removed
    assert ended not in containers
    assert (containers[created].state, containers[created].pid) == (ContainerState.CREATED, 0)
    known = containers[running]
    assert (known.state, known.pid, known.variable("A")) == (
        ContainerState.RUNNING,
        node.cri.status(running).pid,
        "1",
    )
    assert known.cgroups_path == f"{pods[pod].cgroup_parent}/{running}"
    assert state.synchronized
    assert (recorder.runtimes[0].name, recorder.runtimes[0].request_timeout_s) == ("containerd", 2.0)
    assert recorder.kinds() == ["connected", "synchronize", "disconnected"]


def test_a_pods_life(node: Containerd, session: NriSession, recorder: Recorder) -> None:
    pod = node.cri.run_pod("life")
    container = node.cri.create(pod, "main")
    node.cri.start(container)
    node.cri.stop(container)
    node.cri.remove(container)
    node.cri.stop_pod(pod)
    node.cri.remove_pod(pod)
    recorder.wait("remove_pod")
    assert recorder.events[2:] == [
        ("run_pod", "life"),
        ("create", "main"),
        ("start", "main"),
        ("stop", "main"),
        ("remove", "main"),
        ("stop_pod", "life"),
        ("remove_pod", "life"),
    ]


def test_an_adjustment_arrives(
    node: Containerd, pod: str, session: NriSession, recorder: Recorder, short_tmp: Path, specs: SpecDirectory
) -> None:
    (short_tmp / "ours").mkdir()
    (short_tmp / "ours" / "file").write_text("ours")
    (short_tmp / "theirs").mkdir()
    specs.put("one", _spec(DEVICE="cdi", SHARED="cdi"))
    recorder.on_create = lambda _pod, _container: Adjustment(
        removed_env=("ASKED",),
        env=(("ASKED", "given"), ("NEW", ""), ("SHARED", "env")),
        removed_mounts=("/over",),
        mounts=(
            Mount("/tmp/mps", str(short_tmp / "ours"), options=(*DISK, "ro")),
            Mount("/over", str(short_tmp / "ours"), options=(*DISK, "rw")),
        ),
        cdi_devices=(f"{KIND}=one",),
        annotations=(("gpufrac.dev/applied", "yes"),),
    )
    started: list[tuple[int, bool, str]] = []
    final: list[tuple[str | None, str | None]] = []

    def on_start(_pod: Pod, container: Container) -> None:
        cgroups = Path(f"/proc/{container.pid}/cgroup").read_text()
        command = Path(f"/proc/{container.pid}/cmdline").read_text()
        started.append((container.pid, container.cgroups_path in cgroups, command))
        final.append((container.annotations.get("gpufrac.dev/applied"), container.variable("DEVICE")))

    recorder.on_start = on_start

    container = node.cri.create(
        pod, "main", [("ASKED", "asked"), ("SHARED", "pod")], mounts=[("/over", str(short_tmp / "theirs"), False)]
    )
    node.cri.start(container)

    env = node.exec_env(container)
    assert {name: env.get(name) for name in ("ASKED", "NEW", "DEVICE", "SHARED")} == {
        "ASKED": "given",
        "NEW": "",
        "DEVICE": "cdi",
        "SHARED": "cdi",  # a CDI device of ours comes after everything else
    }
    assert (node.inside(container, "/tmp/mps/file")).read_text() == "ours"
    assert (node.inside(container, "/over/file")).read_text() == "ours"
    with pytest.raises(OSError, match="Read-only"):
        node.inside(container, "/tmp/mps/new").touch()
    pid = node.cri.status(container).pid
    assert started == [(pid, True, "runc\0init\0")]
    assert final == [("yes", "cdi")]  # what is missing at the start was not applied
    assert recorder.created[container].variable("ASKED") == "asked"


def test_only_a_cdi_device_forces_a_variable_that_is_there_twice(
    node: Containerd, pod: str, session: NriSession, recorder: Recorder, specs: SpecDirectory
) -> None:
    """containerd's NRI 0.8 replaces the first of two entries, so that the last one still wins, and a removal alone is
    forgotten. A runtime that does better would be welcome here."""
    twice = [("TWICE", "first"), ("OTHER", "x"), ("TWICE", "second")]
    recorder.on_create = lambda _pod, _container: Adjustment(removed_env=("TWICE",), env=(("TWICE", "ours"),))
    plain = node.cri.create(pod, "plain", twice)
    node.cri.start(plain)
    assert node.exec_env(plain)["TWICE"] in ("second", "ours")

    specs.put("one", _spec(TWICE="ours"))
    recorder.on_create = lambda _pod, _container: Adjustment(cdi_devices=(f"{KIND}=one",))
    forced = node.cri.create(pod, "forced", twice)
    node.cri.start(forced)
    assert node.exec_env(forced)["TWICE"] == "ours"


def test_a_refused_creation_is_told_and_can_be_tried_again(
    node: Containerd, pod: str, session: NriSession, recorder: Recorder
) -> None:
    refusal = "no GPU has 8 GiB free: " + "wait, " * 2000  # larger than a runtime reads at once

    def refuse(_pod: Pod, _container: Container) -> Adjustment:
        raise Refused(refusal)

    recorder.on_create = refuse
    with pytest.raises(CriError, match="no GPU has 8 GiB free"):
        node.cri.create(pod, "main")
    recorder.wait("remove")  # the runtime takes back what it began
    assert session.state.connected

    recorder.on_create = lambda _pod, _container: Adjustment(env=(("GIVEN", "1"),))
    container = node.cri.create(pod, "main")
    node.cri.start(container)
    assert node.exec_env(container)["GIVEN"] == "1"


def test_a_refused_start_ends_that_container_only(
    node: Containerd, pod: str, session: NriSession, recorder: Recorder
) -> None:
    def refuse(_pod: Pod, _container: Container) -> None:
        raise Refused("the memory limit is not in force")

    container = node.cri.create(pod, "main")
    recorder.on_start = refuse
    with pytest.raises(CriError, match="the memory limit is not in force"):
        node.cri.start(container)
    status = node.cri.status(container)
    assert (status.state, status.exit_code, status.reason) == ("EXITED", 128, "StartError")
    assert "the memory limit is not in force" in status.message
    node.cri.remove(container)

    recorder.on_start = lambda _pod, _container: None
    again = node.cri.create(pod, "main")
    node.cri.start(again)
    assert node.cri.status(again).state == "RUNNING"


def test_a_large_answer_arrives(node: Containerd, pod: str, session: NriSession, recorder: Recorder) -> None:
    """Its bytes are cut as the runtime can read them: one byte more in the first chunk, and the runtime drops us and
    makes the container without us."""
    for size in (4000, 4080, 4096, 5000, 9000, 100_000):
        recorder.on_create = lambda _pod, _container, size=size: Adjustment(  # type: ignore[misc]
            env=(("LARGE", "x" * size),)
        )
        container = node.cri.create(pod, f"n{size}")
        assert f"LARGE={'x' * size}" in node.cri.status(container).spec["process"]["env"]
    assert recorder.kinds().count("disconnected") == 0


@pytest.fixture
def hanging(node: Containerd, recorder: Recorder) -> Iterator[tuple[NriSession, threading.Event]]:
    """A session whose front end hangs in every creation until the event is set."""
    go_on = threading.Event()

    def hang(_pod: Pod, _container: Container) -> Adjustment:
        go_on.wait(WAIT_S)
        return Adjustment(env=(("GIVEN", "1"),))

    recorder.on_create = hang
    session = NriSession(node.nri_socket, "gpufrac", "15", recorder, answer_s=0.5)
    session.start()
    recorder.wait("synchronize")
    yield session, go_on
    go_on.set()
    session.close()


def test_a_front_end_that_is_too_slow_refuses_in_time(
    node: Containerd, pod: str, hanging: tuple[NriSession, threading.Event]
) -> None:
    """Left to itself the runtime would make the container without us after 2 s, and ask us no more."""
    session, go_on = hanging
    with pytest.raises(CriError):
        node.cri.create(pod, "main")
    go_on.set()
    until(lambda: session.state.stuck_s == 0)
    container = node.cri.create(pod, "main")
    assert "GIVEN=1" in node.cri.status(container).spec["process"]["env"]
    assert session.state.registrations == 1  # never dropped
    assert session.state.late >= 1


def test_who_does_not_concern_us_does_not_wait_for_a_front_end_that_hangs(
    node: Containerd, pod: str, recorder: Recorder, hanging: tuple[NriSession, threading.Event]
) -> None:
    with pytest.raises(CriError):
        node.cri.create(pod, "main")
    recorder.unconcerned.add("plain")
    plain = node.cri.create(pod, "plain")  # one that waited would be refused
    node.cri.start(plain)
    assert "GIVEN=1" not in node.cri.status(plain).spec["process"]["env"]


def test_a_large_state_comes_in_parts(node: Containerd, recorder: Recorder) -> None:
    annotations = {"example.com/large": "x" * 250_000}
    pods = [node.cri.run_pod(f"large-{number}", annotations=annotations) for number in range(20)]
    session = NriSession(node.nri_socket, "gpufrac", "15", recorder)
    session.start()
    recorder.wait("synchronize")
    session.close()
    for pod in pods:
        node.cri.stop_pod(pod)
        node.cri.remove_pod(pod)
    assert set(pods) <= set(recorder.states[0][0])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_containerd_restarts_under_running_pods(short_tmp: Path, recorder: Recorder, how: signal.Signals) -> None:
    with Containerd(short_tmp, short_tmp / "cdi") as node:
        session = NriSession(node.nri_socket, "gpufrac", "15", recorder)
        session.start()
        try:
            recorder.wait("synchronize")
            pod = node.cri.run_pod("stays")
            container, dies = (node.cri.create(pod, name) for name in ("main", "dies"))
            for one in (container, dies):
                node.cri.start(one)
            pids = [node.cri.status(one).pid for one in (container, dies)]

            node.stop(how)
            recorder.wait("disconnected")
            os.kill(pids[1], signal.SIGKILL)
            node.start()
            recorder.wait("synchronize", 2)

            containers = recorder.states[1][1]
            assert set(recorder.states[1][0]) == {pod}
            assert (containers[container].state, containers[container].pid) == (ContainerState.RUNNING, pids[0])
            recorder.on_create = lambda _pod, _container: Adjustment(env=(("GIVEN", "1"),))
            late = node.cri.create(pod, "late")
            assert "GIVEN=1" in node.cri.status(late).spec["process"]["env"]
        finally:
            session.close()


@pytest.fixture
def specs(node: Containerd) -> Iterator[SpecDirectory]:
    with SpecDirectory(str(node.cdi_directory), VENDOR, CLASS) as directory:
        yield directory


def _spec(**variables: str) -> Spec:
    env = tuple(f"{name}={value}" for name, value in variables.items())
    return Spec(KIND, (Device("one", ContainerEdits(env=env)),))
