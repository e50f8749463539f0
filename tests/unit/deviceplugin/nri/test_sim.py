"""The simulated runtime, with our own plugin and with plugins that send what the test wants."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec, mux
from deviceplugin.nri.dialogue import EVENT_MASK, RUNTIME_SERVICE
from deviceplugin.nri.link import CallError, Link, LinkError
from deviceplugin.nri.model import Adjustment, Container, Pod, Refused
from deviceplugin.nri.session import NriSession
from deviceplugin.nri.ttrpc import Answer, Request
from deviceplugin.sim.runtime.nri import NriError, NriRuntime
from tests.unit.deviceplugin.nri.peers import Recorder, container, message, pod
from tests.waiting import NEVER_S, WAIT_S, until


def nothing(request: Request) -> Answer:
    return Answer(request.stream)


class OtherPlugin:
    """A plugin of somebody else. It answers as `answers` say, by method; None is no answer at all."""

    def __init__(
        self, path: str, name: str = "other", index: str = "10", **answers: Callable[[Request], Answer | None]
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        self.link = Link(connection, serves=mux.PLUGIN_SERVICE, calls=mux.RUNTIME_SERVICE)
        self.asked: list[str] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()
        registration = message(pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index))
        self.registration = self.link.begin(RUNTIME_SERVICE, "RegisterPlugin", registration, WAIT_S)

    def _pump(self) -> None:
        with contextlib.suppress(LinkError):
            while True:
                for request in self.link.pump(WAIT_S):
                    self.asked.append(request.method)
                    make = self._answers.get(request.method, nothing)
                    answer = make(request)
                    if answer is not None:
                        self.link.answer(answer)
        self.link.release()

    def close(self) -> None:
        self.link.end("test over")
        self._thread.join()


class World:
    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "nri.sock")
        self.handler = Recorder()
        self.inventory: tuple[list[Pod], list[Container]] = ([], [])
        self._closing: list[Callable[[], None]] = []

    def runtime(
        self,
        *,
        required: bool = False,
        state_change: bool = True,
        part_bytes: int = 3 << 20,
    ) -> NriRuntime:
        made = NriRuntime(
            self.path,
            request_timeout_s=NEVER_S,
            inventory=lambda: self.inventory,
            required=required,
            state_change=state_change,
            part_bytes=part_bytes,
        )
        made.start()
        self._closing.append(made.close)
        return made

    def session(self, name: str = "gpufrac", index: str = "90") -> NriSession:
        made = NriSession(self.path, name, index, self.handler, answer_s=NEVER_S)
        made.start()
        self._closing.append(made.close)
        return made

    def other(
        self, name: str = "other", index: str = "10", **answers: Callable[[Request], Answer | None]
    ) -> OtherPlugin:
        made = OtherPlugin(self.path, name, index, **answers)
        self._closing.append(made.close)
        return made

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    made = World(short_tmp)
    yield made
    made.close()


@pytest.mark.parametrize("state_change", [True, False])
def test_the_life_of_a_pod(world: World, state_change: bool) -> None:
    runtime = world.runtime(state_change=state_change)
    assert not runtime.wait_plugin(0.0)
    world.session()
    assert runtime.wait_plugin(WAIT_S)
    assert runtime.plugins == ("90-gpufrac",)
    runtime.run_pod(pod())
    assert runtime.create_container(pod(), container()) == Adjustment(env=(("MADE", "container1"),))
    runtime.start_container(pod(), container())
    runtime.stop_container(pod(), container())
    runtime.remove_container(pod(), container())
    runtime.stop_pod(pod())
    runtime.remove_pod(pod())
    calls = world.handler.expect(
        "connected",
        "synchronize",
        "run_pod",
        "create_container",
        "start_container",
        "stop_container",
        "remove_container",
        "stop_pod",
        "remove_pod",
    )
    assert calls[0][1][0].name == "containerd"
    assert [arguments for _, arguments in calls[2:]] == [
        (pod(),),
        (pod(), container()),
        (pod(), container()),
        (pod(), container()),
        (pod(), container()),
        (pod(),),
        (pod(),),
    ]


def test_everything_that_is_there_is_told_in_parts(world: World) -> None:
    world.inventory = (
        [pod(number) for number in range(1000)],
        [container(number) for number in range(1500)],
    )
    runtime = world.runtime(part_bytes=10_000)
    world.session()
    assert runtime.wait_plugin(WAIT_S)
    calls = world.handler.expect("connected", "synchronize")
    assert calls[1][1] == world.inventory


def test_a_refusal_is_raised_and_creates_nothing(world: World) -> None:
    def refuse(*_: object) -> None:
        raise Refused("no room on any GPU")

    runtime = world.runtime()
    world.handler.on = {"create_container": refuse, "start_container": refuse}
    world.session()
    runtime.wait_plugin(WAIT_S)
    with pytest.raises(NriError, match="no room on any GPU"):
        runtime.create_container(pod(), container())
    with pytest.raises(NriError, match="no room on any GPU"):
        runtime.start_container(pod(), container())
    runtime.run_pod(pod())
    assert runtime.plugins == ("90-gpufrac",)


def test_a_plugin_that_is_late_is_dropped_and_the_container_is_made_without_it(world: World) -> None:
    runtime = world.runtime()
    other = world.other(CreateContainer=lambda _: None)
    assert runtime.wait_plugin(WAIT_S)
    runtime.request_timeout_s = 0.2
    assert runtime.create_container(pod(), container()) == Adjustment()
    assert runtime.plugins == ()
    runtime.run_pod(pod())
    assert other.asked == ["Configure", "Synchronize", "CreateContainer"]
    other.close()
    runtime.request_timeout_s = NEVER_S
    world.other()
    assert runtime.wait_plugin(WAIT_S), "it may come back"


def test_a_plugin_that_is_required_is_missed(world: World) -> None:
    runtime = world.runtime(required=True)
    with pytest.raises(NriError, match="a required NRI plugin is not there"):
        runtime.create_container(pod(), container())
    runtime.run_pod(pod())
    world.other(CreateContainer=lambda _: None)
    assert runtime.wait_plugin(WAIT_S)
    runtime.request_timeout_s = 0.2
    with pytest.raises(NriError, match="a required NRI plugin is not there"):
        runtime.create_container(pod(), container())


def test_plugins_are_asked_in_the_order_of_their_indices_and_only_for_their_events(world: World) -> None:
    runtime = world.runtime()

    def adjust(request: Request) -> Answer:
        adjustment = codec.adjustment_message(Adjustment(env=(("OTHER", "1"),)))
        return Answer(request.stream, message(pb.CreateContainerResponse(adjust=adjustment)))

    def events(mask: int) -> Callable[[Request], Answer]:
        return lambda request: Answer(request.stream, message(pb.ConfigureResponse(events=mask)))

    late = world.other("late", "95", Configure=events(EVENT_MASK), CreateContainer=adjust)
    until(lambda: len(runtime.plugins) == 1)
    world.session()
    until(lambda: len(runtime.plugins) == 2)
    early = world.other("early", "05", Configure=events(1 << 0))
    until(lambda: len(runtime.plugins) == 3)
    assert runtime.plugins == ("05-early", "90-gpufrac", "95-late")
    made = runtime.create_container(pod(), container())
    assert made.env == (("MADE", "container1"), ("OTHER", "1"))
    runtime.run_pod(pod())
    assert early.asked[2:] == ["StateChange"]
    assert late.asked[2:] == ["CreateContainer", "StateChange"]


def test_newer_spellings_fall_back_for_a_plugin_that_does_not_know_them(world: World) -> None:
    runtime = world.runtime(state_change=False)
    other = world.other(RunPodSandbox=lambda request: Answer(request.stream, code=12, text="method RunPodSandbox"))
    runtime.wait_plugin(WAIT_S)
    runtime.run_pod(pod())
    runtime.stop_pod(pod())
    assert other.asked[2:] == ["RunPodSandbox", "StateChange", "StateChange"]


@pytest.mark.parametrize(
    "broken",
    [
        {"Configure": lambda request: Answer(request.stream, code=13, text="no")},
        {"Configure": lambda request: Answer(request.stream, b"\xff")},
        {"Configure": lambda request: Answer(request.stream, message(pb.ConfigureResponse(events=1 << 20)))},
        {"Synchronize": lambda request: Answer(request.stream, message(pb.SynchronizeResponse(more=True)))},
        {"Synchronize": lambda request: Answer(request.stream, code=13, text="no")},
    ],
)
def test_a_plugin_that_fails_the_handshake_is_not_taken(world: World, broken: dict[str, Any]) -> None:
    runtime = world.runtime()
    other = world.other(**broken)
    until(lambda: bool(other.link.ended))
    assert runtime.plugins == ()
    world.session()
    assert runtime.wait_plugin(WAIT_S)


@pytest.mark.parametrize(("name", "index"), [("x", "9"), ("x", "ab"), ("", "90")])
def test_a_registration_that_is_wrong_is_refused(world: World, name: str, index: str) -> None:
    runtime = world.runtime()
    with pytest.raises(CallError, match="invalid plugin index"):
        world.other(name, index).registration.result(WAIT_S)
    assert runtime.plugins == ()


def test_what_a_plugin_asks_for_is_answered_and_not_done(world: World) -> None:
    runtime = world.runtime()
    other = world.other()
    assert runtime.wait_plugin(WAIT_S)
    eviction = b"\x12\x04\x0a\x02c1"
    assert other.link.call(RUNTIME_SERVICE, "UpdateContainers", eviction, WAIT_S) == b""
    with pytest.raises(CallError, match="method Dance"):
        other.link.call(RUNTIME_SERVICE, "Dance", b"", WAIT_S)
    assert runtime.plugins == ("10-other",)


def test_a_runtime_restarts_and_its_plugin_comes_back(world: World) -> None:
    runtime = world.runtime()
    session = world.session()
    for restarts in range(3):
        assert runtime.wait_plugin(WAIT_S)
        assert runtime.create_container(pod(), container()).env
        runtime.close()
        assert not os.path.exists(world.path)
        runtime.close()
        runtime = world.runtime()
        until(lambda: session.state.registrations == restarts + 2)  # noqa: B023 - asked at once


def test_calls_from_many_threads_go_one_by_one(world: World) -> None:
    runtime = world.runtime()
    busy = threading.Lock()

    def alone(*_: object) -> None:
        assert busy.acquire(blocking=False)
        busy.release()

    world.handler.on = {"create_container": alone, "run_pod": alone}
    world.session()
    runtime.wait_plugin(WAIT_S)
    made: list[Adjustment] = []

    def create() -> None:
        for number in range(20):
            runtime.run_pod(pod(number))
            made.append(runtime.create_container(pod(number), container(number)))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(adjustment.env != () for adjustment in made) == 80


def test_closing_while_a_plugin_hangs(world: World) -> None:
    runtime = world.runtime()
    world.other(Configure=lambda _: None)
    other = world.other()
    runtime.close()
    until(lambda: bool(other.link.ended))
