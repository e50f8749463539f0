"""The plugin's side against a runtime that sends what the test wants, on real sockets."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec, session
from deviceplugin.nri.link import Link
from deviceplugin.nri.model import Refused
from deviceplugin.nri.session import STARTING, NriSession, NriState
from deviceplugin.nri.ttrpc import Answer
from mpsd.common.errors import ConfigError
from tests.unit.deviceplugin.nri.peers import (
    RawLink,
    RawRuntime,
    Recorder,
    chunk,
    configure,
    created,
    state_change,
    synchronize,
    whole_frame,
)
from tests.waiting import NEVER_S, WAIT_S, until


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advanced(self, seconds: float) -> bool:
        self.now_s += seconds
        return True


class World:
    """A socket path, a session at it, and what goes with them."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "nri.sock")
        self.handler = Recorder()
        self.gate = threading.Event()
        """Front ends that hang wait for it."""
        self.clock = Clock()
        """Moved by the test. In use from `stop_time` on."""
        self.monotonic: Callable[[], float] = time.monotonic
        self._closing: list[Callable[[], None]] = []

    def stop_time(self) -> None:
        """For the session that is made next."""
        self.monotonic = self.clock

    def session(self, *, answer_s: float = NEVER_S, start: bool = True) -> NriSession:
        made = NriSession(self.path, "gpufrac", "90", self.handler, answer_s=answer_s, monotonic=self.monotonic)
        if start:
            made.start()
        self._closing.append(made.close)
        return made

    def runtime(self) -> RawRuntime:
        made = RawRuntime(self.path)
        self._closing.append(made.close)
        return made

    def joined(self, *, answer_s: float = NEVER_S) -> tuple[NriSession, RawRuntime, RawLink]:
        """A session that is registered."""
        runtime = self.runtime()
        made = self.session(answer_s=answer_s)
        link = runtime.accept()
        link.handshake()
        self.handler.expect("connected", "synchronize")
        return made, runtime, link

    def hang(self, *names: str) -> None:
        for name in names:
            self.handler.on[name] = lambda *_: self.gate.wait(WAIT_S)

    def close(self) -> None:
        self.gate.set()
        for close in reversed(self._closing):
            close()


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.close()


def test_the_handshake_is_byte_for_byte_as_the_reference_has_it(world: World) -> None:
    runtime = world.runtime()
    made = world.session()
    link = runtime.accept()
    asked = (
        b"\x0a\x1cnri.pkg.api.v1alpha1.Runtime"
        b"\x12\x0eRegisterPlugin"
        b"\x1a\x15" + b"\x0a\x07gpufrac" + b"\x12\x0290" + b"\x1a\x06v0.8.0" + b"\x20\x80\xd8\x8e\xe1\x6f"  # 30 s
    )
    expected = chunk(2, whole_frame(1, 1, asked))
    got = b""
    while len(got) < len(expected):
        got += link.connection.recv(len(expected) - len(got))
    assert got == expected
    link.send(chunk(2, whole_frame(1, 2)))
    service = b"\x0a\x1bnri.pkg.api.v1alpha1.Plugin"
    link.send(chunk(1, whole_frame(1, 1, service + b"\x12\x09Configure" + b"\x1a\x05" + b"\x12\x03abc")))
    expected = chunk(1, whole_frame(1, 2, b"\x12\x03" + b"\x10\xaf\x0c"))
    got = b""
    while len(got) < len(expected):
        got += link.connection.recv(len(expected) - len(got))
    assert got == expected
    ((_, (told,)),) = world.handler.expect("connected")
    assert (told.name, told.version, told.request_timeout_s) == ("abc", "", 2.0)
    assert made.state.connected


def test_a_link_from_registration_to_its_end(world: World) -> None:
    made, _, link = world.joined()
    state = made.state
    assert (state.connected, state.synchronized, state.error, state.registrations) == (True, True, None, 1)
    assert state.runtime is not None
    assert state.runtime.name == "test"
    answer = link.call("CreateContainer", created())
    adjust = codec.adjustment_of(codec.parse(pb.CreateContainerResponse, answer.payload).adjust)
    assert adjust.env == (("MADE", "container1"),)
    assert not link.call("StateChange", state_change(pb.START_CONTAINER)).code
    assert not link.call("StopPodSandbox", created()).code
    world.handler.expect("create_container", "start_container", "stop_pod")
    assert link.call("Dance").code == 12
    link.close()
    ((_, (reason,)),) = world.handler.expect("disconnected")
    assert reason == "the other side closed the connection"
    until(lambda: not made.state.connected)
    assert (str(made.state.error), made.state.runtime) == ("the other side closed the connection", None)
    assert set(made.state.slowest_s) == {"synchronize", "create container", "start container", "stop pod"}
    assert len(world.handler.threads) == 1, "the front end is called from one thread"


def test_a_socket_that_appears_is_found_soon(world: World) -> None:
    world.stop_time()
    made = world.session()
    until(lambda: "is not there" in str(made.state.error))
    world.runtime().accept().handshake()  # the time of a retry never comes
    world.handler.expect("connected", "synchronize")


def test_a_socket_that_refuses_is_tried_again(world: World) -> None:
    world.runtime().close()  # its file stays
    made = world.session()
    until(lambda: "refuses connections" in str(made.state.error))
    os.unlink(world.path)
    world.runtime().accept().handshake()
    world.handler.expect("connected", "synchronize")


def test_a_runtime_that_restarts_is_joined_again(world: World) -> None:
    made, runtime, _ = world.joined()
    for restarts in range(1, 4):
        runtime.close()
        os.unlink(world.path)
        runtime = world.runtime()
        link = runtime.accept()
        link.handshake([1])
        calls = world.handler.expect("disconnected", "connected", "synchronize")
        assert [p.id for p in calls[2][1][0]] == ["pod1"]
        assert not link.call("CreateContainer", created()).code
        world.handler.expect("create_container")
        assert made.state.registrations == restarts + 1


def test_a_registration_that_is_refused_is_tried_again(world: World) -> None:
    runtime = world.runtime()
    made = world.session()
    link = runtime.accept()
    request = link.request()
    link.reply(request, Answer(request.stream, code=2, text="invalid plugin index"))
    until(lambda: str(made.state.error) == "the container runtime refused our registration: invalid plugin index")
    assert link.ended()
    runtime.accept().handshake()
    world.handler.expect("connected", "synchronize")


@pytest.mark.parametrize(
    "rubbish",
    [
        chunk(1, b"", length=2**32 - 1),
        chunk(1, b"", length=4 * 1024 * 1024 + 11),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10,
    ],
)
def test_a_runtime_that_can_not_be_understood_is_left_and_tried_again(world: World, rubbish: bytes) -> None:
    made, runtime, link = world.joined()
    link.send(rubbish)
    assert link.ended()
    world.handler.expect("disconnected")
    until(lambda: "cannot take a chunk of" in str(made.state.error))
    runtime.accept().handshake()
    world.handler.expect("connected", "synchronize")


def test_a_half_closed_socket_is_left(world: World) -> None:
    _, runtime, link = world.joined()
    link.connection.shutdown(1)
    assert link.ended()
    world.handler.expect("disconnected")
    runtime.accept().handshake()
    world.handler.expect("connected", "synchronize")


def test_a_runtime_killed_in_the_middle_of_a_request(world: World) -> None:
    _, runtime, link = world.joined()
    world.hang("create_container")
    link.ask("CreateContainer", created(1))
    world.handler.expect("create_container")
    link.ask("RunPodSandbox", created(2))
    link.close()
    link = runtime.accept()
    world.gate.set()
    link.handshake([1])
    # What the dead runtime said while we were busy is void: the new one's state has it all.
    world.handler.expect("disconnected", "connected", "synchronize")
    assert not link.call("CreateContainer", created(3)).code
    assert not link.stray


def test_a_runtime_killed_in_the_middle_of_a_message(world: World) -> None:
    _, runtime, link = world.joined()
    _, data = link.encoded("CreateContainer", created())
    link.send(data[:-3])
    link.close()
    world.handler.expect("disconnected")
    runtime.accept().handshake()
    world.handler.expect("connected", "synchronize")


def test_a_slow_front_end_is_answered_for_in_time(world: World) -> None:
    world.stop_time()
    made, _, link = world.joined(answer_s=0.5)
    world.hang("create_container")
    asked = link.ask("CreateContainer", created(1))
    world.handler.expect("create_container")
    world.clock.now_s += 0.49
    assert link.call("Dance").code == 12
    assert asked not in link.answers
    world.clock.now_s += 0.02
    late = link.answer(asked)
    assert (late.code, "could not decide in time" in late.text) == (9, True)
    # The clock stands: not even one of these waits.
    at_once = [
        link.call("CreateContainer", created(2)),
        link.call("StartContainer", created(2)),
        link.call("StateChange", state_change(pb.REMOVE_CONTAINER, 2)),
        link.call("RunPodSandbox", created(3)),
    ]
    assert [answer.code for answer in at_once] == [9, 9, 0, 0]
    assert made.state.late == 5
    assert made.state.stuck_s > 0
    world.gate.set()
    world.handler.expect("remove_container", "run_pod")
    until(lambda: made.state.stuck_s == 0)
    assert not link.call("StartContainer", created(4)).code
    assert not link.stray


def test_who_does_not_concern_a_slow_front_end_does_not_wait_for_it(world: World) -> None:
    _, _, link = world.joined(answer_s=5.0)
    world.handler.on["concerns"] = lambda pod, _: pod.name != "name2"
    world.hang("create_container")
    slow = link.ask("CreateContainer", created(1))
    world.handler.expect("create_container")
    assert link.call("CreateContainer", created(2)) == Answer(7)
    assert link.call("StartContainer", created(2)) == Answer(9)
    world.gate.set()
    assert not link.answer(slow).code


def test_a_slow_front_end_does_not_keep_a_new_runtime_waiting(world: World) -> None:
    world.stop_time()
    _, runtime, link = world.joined(answer_s=0.5)
    world.hang("run_pod")
    asked = link.ask("RunPodSandbox", created())
    world.handler.expect("run_pod")
    world.clock.now_s += 0.51
    assert not link.answer(asked).code
    link.close()
    until(lambda: world.clock.advanced(0.1) and runtime.is_asked())
    link = runtime.accept()
    link.handshake([1, 2])  # time stands: it does not wait
    assert link.call("CreateContainer", created()).code == 9
    world.gate.set()
    calls = world.handler.expect("disconnected", "connected", "synchronize")
    assert len(calls[2][1][0]) == 2
    assert not link.call("CreateContainer", created()).code


def test_a_slow_synchronize_is_answered_in_time(world: World) -> None:
    runtime = world.runtime()
    world.stop_time()
    world.session(answer_s=0.2)
    world.hang("synchronize")
    link = runtime.accept()
    link.reply(link.request())
    assert not link.call("Configure", configure()).code
    asked = link.ask("Synchronize", synchronize([1]))
    world.handler.expect("connected", "synchronize")
    assert link.call("Dance").code == 12
    assert asked not in link.answers
    world.clock.now_s += 0.21
    assert not link.answer(asked).code
    world.gate.set()


def test_the_runtimes_own_timeout_may_be_shorter(world: World) -> None:
    world.stop_time()
    runtime = world.runtime()
    made = world.session()
    link = runtime.accept()
    link.handshake(request_timeout_ms=400)
    world.hang("create_container")
    asked = link.ask("CreateContainer", created())
    world.handler.expect("connected", "synchronize", "create_container")
    world.clock.now_s += 0.25
    assert link.answer(asked).code == 9
    assert made.state.answer_s == pytest.approx(0.24)


def test_refusals_and_faults_of_the_front_end(world: World, caplog: pytest.LogCaptureFixture) -> None:
    _, _, link = world.joined()

    def refuse(*_: object) -> None:
        raise Refused("not enough memory")

    def fail(*_: object) -> None:
        raise ZeroDivisionError("oops")

    world.handler.on = {"create_container": refuse, "start_container": fail, "run_pod": fail}
    assert link.call("CreateContainer", created()) == Answer(5, code=9, text="not enough memory")
    assert link.call("StartContainer", created()).code == 13
    assert not link.call("RunPodSandbox", created()).code
    assert sum(record.exc_info is not None for record in caplog.records) == 2
    world.handler.on.clear()
    assert not link.call("CreateContainer", created()).code


def test_a_state_in_50_parts(world: World) -> None:
    runtime = world.runtime()
    world.session()
    link = runtime.accept()
    link.reply(link.request())
    link.call("Configure", configure())
    for part in range(50):
        answer = link.call("Synchronize", synchronize(range(part * 20, part * 20 + 20), more=part < 49))
        assert codec.parse(pb.SynchronizeResponse, answer.payload).more == (part < 49)
    calls = world.handler.expect("connected", "synchronize")
    pods, containers = calls[1][1]
    assert [p.id for p in pods] == [f"pod{number}" for number in range(1000)]
    assert len(containers) == 1000


def test_messages_cut_and_joined_at_will(world: World) -> None:
    _, _, link = world.joined()
    first, one = link.encoded("CreateContainer", created(1))
    second, two = link.encoded("StartContainer", created(2))
    frames = one[8:] + two[8:]
    cut = len(one) - 8 + 3
    link.send(chunk(77, b"nobody listens") + chunk(1, frames[:5]))
    link.send(chunk(1, frames[5:cut]) + chunk(0, b"") + chunk(1, frames[cut:]))
    assert not link.answer(first).code
    assert not link.answer(second).code
    world.handler.expect("create_container", "start_container")


def test_frames_that_are_no_calls(world: World) -> None:
    made, _, link = world.joined()
    link.send(chunk(1, whole_frame(1, 1) + whole_frame(6, 1) + whole_frame(9, 3) + whole_frame(9, 8)))
    link.send(chunk(2, whole_frame(99, 2) + whole_frame(1, 3)))
    assert not link.call("RunPodSandbox", created()).code
    assert [(answer.stream, answer.code) for answer in link.stray] == [(6, 3), (9, 3)]
    assert link.answers.pop(1).code == 3, "its number was used before"
    size = 4 * 1024 * 1024 + 100
    link.send(chunk(1, whole_frame(101, 1, length=size)))
    link.send(chunk(1, bytes(size // 2)) + chunk(1, bytes(size // 2)))
    assert not link.call("RunPodSandbox", created()).code
    assert [(answer.stream, answer.code) for answer in link.stray[2:]] == [(101, 8)]
    assert made.state.registrations == 1


def test_requests_that_come_all_at_once_are_all_answered(world: World) -> None:
    _, _, link = world.joined()
    asked = [link.encoded("RunPodSandbox", created(number)) for number in range(500)]
    link.send(b"".join(data for _, data in asked))
    assert all(not link.answer(stream).code for stream, _ in asked)
    world.handler.expect(*["run_pod"] * 500)


def test_another_socket_at_the_path_is_another_runtime(world: World) -> None:
    made, _, link = world.joined()
    os.chmod(world.path, 0o640)
    os.rename(world.path, f"{world.path}.old")
    runtime = world.runtime()
    assert link.ended()
    runtime.accept().handshake()
    world.handler.expect("disconnected", "connected", "synchronize")
    os.unlink(f"{world.path}.old")
    assert made.state.registrations == 2


def test_a_runtime_that_never_configures_us_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CONFIGURED_WITHIN_S", 0.1)
    monkeypatch.setattr(session, "SYNCHRONIZED_WITHIN_S", 0.1)
    runtime = world.runtime()
    made = world.session()
    assert runtime.accept().ended()
    until(lambda: "did not configure us" in str(made.state.error))
    link = runtime.accept()
    link.call("Configure", configure())
    assert link.ended()
    until(lambda: "did not tell its pods" in str(made.state.error))


def test_closing_leaves_the_runtime_and_tells_the_front_end(world: World) -> None:
    made, _, link = world.joined()
    made.close()
    made.close()
    assert link.ended()
    ((_, (reason,)),) = world.handler.expect("disconnected")
    assert reason == "closed by us"
    assert not made.state.connected


def test_closing_does_not_wait_for_a_front_end_that_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    made, _, link = world.joined()
    world.hang("run_pod")
    link.ask("RunPodSandbox", created())
    world.handler.expect("run_pod")
    made.close()
    assert not world.gate.is_set(), "it hangs still"


def test_closing_one_that_never_started_or_waits_to_retry(world: World) -> None:
    world.session(start=False).close()
    world.stop_time()
    made = world.session()
    until(lambda: "is not there" in str(made.state.error))
    made.close()  # the time of a retry never comes


def test_a_fault_of_the_session_itself_begins_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = world.runtime()
    broken = threading.Event()
    pump = Link.pump

    def fail_once(link: Link, timeout_s: float) -> object:
        if not broken.is_set():
            broken.set()
            raise ZeroDivisionError("oops")
        return pump(link, timeout_s)

    monkeypatch.setattr(Link, "pump", fail_once)
    world.session()
    assert runtime.accept().ended()
    runtime.accept().handshake()
    world.handler.expect("connected", "synchronize")


@pytest.mark.parametrize(
    ("path", "name", "index", "text"),
    [
        ("/run/" + "x" * 110, "gpufrac", "90", "a socket path holds 1 to 107 bytes"),
        ("", "gpufrac", "90", "a socket path holds"),
        ("/run/nri.sock", "gpu frac", "90", "letters, digits and _.+- only"),
        ("/run/nri.sock", "gpufrac", "9", "it has two digits"),
    ],
)
def test_what_no_runtime_would_take_is_said_at_once(path: str, name: str, index: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NriSession(path, name, index, Recorder())


def test_a_state_before_anything_happened() -> None:
    state = NriSession("/nowhere/nri.sock", "gpufrac", "90", Recorder()).state
    assert (state.connected, state.error, state.registrations) == (False, STARTING, 0)
    assert isinstance(state, NriState)
