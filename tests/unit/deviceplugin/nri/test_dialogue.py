"""What a plugin answers, and what its front end is told of it; no socket, no clock."""

from typing import Any

import pytest

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec, dialogue
from deviceplugin.nri.dialogue import PLUGIN_SERVICE, Dialogue, perform
from deviceplugin.nri.model import Adjustment, Refused
from deviceplugin.nri.requests import RequestQueue
from deviceplugin.nri.ttrpc import Answer, Code, Request
from mpsd.common.errors import ProtocolError
from tests.unit.deviceplugin.nri.peers import (
    Recorder,
    configure,
    container,
    created,
    message,
    pod,
    state_change,
    synchronize,
)


class Talk:
    """A dialogue with a front end that is told when the test says so."""

    def __init__(self, *, configured: bool = True, request_timeout_ms: int = 2000, answer_s: float = 1.2) -> None:
        self.queue, self.handler = RequestQueue(), Recorder()
        self.dialogue = Dialogue(1, self.queue, self.handler, answer_s)
        self.stream = -1
        if configured:
            self.ask("Configure", configure(request_timeout_ms))
            self.work()
            self.handler.next()

    def ask(
        self,
        method: str,
        payload: bytes = b"",
        now_s: float = 0.0,
        timeout_s: float = 0.0,
        service: str = PLUGIN_SERVICE,
    ) -> Answer | None:
        self.stream += 2
        return self.dialogue.receive(Request(self.stream, service, method, payload, timeout_s), now_s)

    def work(self, now_s: float = 0.0) -> Answer | None:
        """The next thing is told; its answer where one is still wanted."""
        entry = self.queue.begin(now_s)
        assert entry is not None
        answer = perform(entry, self.handler)
        return answer if self.queue.finish(now_s) else None

    def told(self, method: str, payload: bytes) -> tuple[Answer | None, tuple[str, tuple[Any, ...]]]:
        assert self.ask(method, payload) is None
        return self.work(), self.handler.next()


def test_configure_is_answered_at_once_with_the_events_that_we_need() -> None:
    talk = Talk(configured=False)
    answer = talk.ask("Configure", configure(3000))
    # RUN_POD 1, STOP_POD 2, REMOVE_POD 3, CREATE 4, START 6, REMOVE 11: bit n-1 each
    assert answer == Answer(1, b"\x10" + b"\xaf\x0c")
    talk.work()
    name, (runtime,) = talk.handler.next()
    assert (name, runtime.name, runtime.version, runtime.request_timeout_s) == ("connected", "test", "1", 3.0)


def test_a_second_configure_is_not_told() -> None:
    talk = Talk()
    assert talk.ask("Configure", configure(1000)) == Answer(3, b"\x10\xaf\x0c")
    assert talk.queue.begin(0.0) is None
    assert talk.dialogue.budget_s == pytest.approx(0.6)


@pytest.mark.parametrize(("timeout_ms", "budget_s"), [(0, 1.2), (-5, 1.2), (2000, 1.2), (9000, 1.2), (1000, 0.6)])
def test_a_short_timeout_of_the_runtime_leaves_us_less_time(timeout_ms: int, budget_s: float) -> None:
    assert Talk(request_timeout_ms=timeout_ms).dialogue.budget_s == pytest.approx(budget_s)


@pytest.mark.parametrize(
    ("method", "event", "told"),
    [
        ("RunPodSandbox", pb.RUN_POD_SANDBOX, "run_pod"),
        ("StopPodSandbox", pb.STOP_POD_SANDBOX, "stop_pod"),
        ("RemovePodSandbox", pb.REMOVE_POD_SANDBOX, "remove_pod"),
        ("StartContainer", pb.START_CONTAINER, "start_container"),
        ("StopContainer", pb.STOP_CONTAINER, "stop_container"),
        ("RemoveContainer", pb.REMOVE_CONTAINER, "remove_container"),
    ],
)
def test_both_spellings_of_an_event_mean_the_same(method: str, event: pb.Event, told: str) -> None:
    arguments = (pod(),) if told.endswith("pod") else (pod(), container())
    assert Talk().told(method, created()) == (Answer(3), (told, arguments))
    assert Talk().told("StateChange", state_change(event)) == (Answer(3), (told, arguments))


def test_a_creation_is_answered_with_what_the_front_end_wants_changed() -> None:
    talk = Talk()
    talk.handler.on["create_container"] = lambda *_: Adjustment(removed_env=("A",), env=(("A", "9"),))
    answer, (name, arguments) = talk.told("CreateContainer", created())
    assert (name, arguments) == ("create_container", (pod(), container()))
    assert answer is not None
    adjust = codec.parse(pb.CreateContainerResponse, answer.payload).adjust
    assert codec.adjustment_of(adjust) == Adjustment(removed_env=("A",), env=(("A", "9"),))


def test_a_state_in_parts_is_told_as_one() -> None:
    talk = Talk()
    more = pb.SynchronizeResponse(more=True).SerializeToString()
    assert talk.ask("Synchronize", synchronize([1, 2], more=True)) == Answer(3, more)
    assert talk.ask("Synchronize", synchronize([3], more=True)) == Answer(5, more)
    answer, (name, (pods, containers)) = talk.told("Synchronize", synchronize([4]))
    assert (answer, name) == (Answer(7), "synchronize")
    assert [p.name for p in pods] == ["name1", "name2", "name3", "name4"]
    assert [c.id for c in containers] == ["container1", "container2", "container3", "container4"]
    assert talk.dialogue.synchronized
    _, (_, (pods, _)) = talk.told("Synchronize", synchronize([5]))
    assert [p.name for p in pods] == ["name5"]


def test_a_state_that_never_ends_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "MAX_STATE_PARTS", 3)
    talk = Talk()
    for _ in range(3):
        talk.ask("Synchronize", synchronize([1], more=True))
    with pytest.raises(ProtocolError, match="cannot take a state of more than 3 parts"):
        talk.ask("Synchronize", synchronize([1], more=True))


@pytest.mark.parametrize("method", ["Configure", "Synchronize"])
def test_what_can_not_be_read_of_the_handshake_ends_the_link(method: str) -> None:
    with pytest.raises(ProtocolError, match="cannot read a"):
        Talk().ask(method, b"\xff")


@pytest.mark.parametrize("method", ["CreateContainer", "StateChange", "RunPodSandbox"])
def test_an_event_that_can_not_be_read_is_answered_so(method: str) -> None:
    answer = Talk().ask(method, b"\xff")
    assert answer is not None
    assert answer.code == Code.INVALID_ARGUMENT


def test_events_before_configure_are_refused() -> None:
    talk = Talk(configured=False)
    for method in ("CreateContainer", "StateChange", "Synchronize"):
        answer = talk.ask(method, state_change(pb.RUN_POD_SANDBOX) if method == "StateChange" else b"")
        assert answer is not None
        assert answer.code == Code.FAILED_PRECONDITION
    assert talk.queue.begin(0.0) is None


def test_what_we_did_not_ask_for_is_answered_with_nothing() -> None:
    talk = Talk()
    for method in ("Shutdown", "UpdateContainer", "PostStartContainer", "ValidateContainerAdjustment"):
        assert talk.ask(method, created()) == Answer(talk.stream)
    for event in (pb.POST_START_CONTAINER, pb.CREATE_CONTAINER, pb.UNKNOWN):
        assert talk.ask("StateChange", state_change(event)) == Answer(talk.stream)
    assert talk.ask("StateChange", b"\x08\xe7\x07") == Answer(talk.stream)
    assert talk.queue.begin(0.0) is None


def test_what_we_do_not_know_is_unimplemented() -> None:
    talk = Talk()
    unknown = (talk.ask("Dance"), talk.ask("Configure", service="nri.pkg.api.v1beta1.Plugin"))
    assert [answer.code for answer in unknown if answer] == [12, 12]


def test_a_refusal_reaches_the_runtime_in_its_own_words() -> None:
    def refuse(*_: object) -> None:
        raise Refused("no GPU has 4 GiB left")

    for method in ("CreateContainer", "StartContainer"):
        talk = Talk()
        talk.handler.on = {"create_container": refuse, "start_container": refuse}
        answer, _ = talk.told(method, created())
        assert answer == Answer(3, code=9, text="no GPU has 4 GiB left")


def test_a_fault_of_the_front_end_refuses_creations_and_starts_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("oops")

    for method in ("CreateContainer", "StartContainer", "RunPodSandbox", "RemoveContainer", "Synchronize"):
        talk = Talk()
        talk.handler.on = dict.fromkeys(
            ("create_container", "start_container", "run_pod", "remove_container", "synchronize"), fail
        )
        answer, _ = talk.told(method, synchronize([1]) if method == "Synchronize" else created())
        assert answer is not None
        refused = method in ("CreateContainer", "StartContainer")
        assert (answer.code == Code.INTERNAL, "KeyError" in answer.text) == (refused, refused)
    assert [record.exc_info is not None for record in caplog.records] == [True] * 5


def test_an_adjustment_that_can_not_be_encoded_is_a_fault_too() -> None:
    talk = Talk()
    talk.handler.on["create_container"] = lambda *_: Adjustment(env=(("A", "\ud800"),))
    answer, _ = talk.told("CreateContainer", created())
    assert answer is not None
    assert answer.code == Code.INTERNAL


def test_a_late_decision_is_a_refusal_and_a_late_event_is_none() -> None:
    talk = Talk()
    assert talk.ask("RunPodSandbox", created(1), now_s=10.0) is None
    assert talk.queue.begin(10.0) is not None
    assert talk.ask("CreateContainer", created(2), now_s=10.5) is None
    assert talk.dialogue.overdue(11.0) == []
    assert talk.dialogue.overdue(11.25) == [Answer(3)]
    (late,) = talk.dialogue.overdue(11.8)
    assert (late.stream, late.code) == (5, 9)
    assert late.text == (
        "gpufrac could not decide in time (1.2 s) whether to create container main of pod team/name2; try again"
    )
    stuck = [talk.ask(method, created(3), now_s=12.0) for method in ("StartContainer", "StopPodSandbox")]
    assert [answer.code for answer in stuck if answer] == [9, 0]
    assert talk.ask("Synchronize", synchronize([1]), now_s=12.0) == Answer(talk.stream)
    assert talk.queue.late == 5
    assert not talk.queue.finish(13.0)
    told = [talk.work(13.0), talk.work(13.0)]
    assert told == [None, None]
    assert [name for name, _ in (talk.handler.next(), talk.handler.next())] == ["stop_pod", "synchronize"]


def test_what_does_not_concern_us_is_answered_at_once_and_not_told() -> None:
    talk = Talk()
    talk.handler.on["concerns"] = lambda pod, container: pod.name == "name2" and container.name == "main"
    for method in ("CreateContainer", "StartContainer"):
        assert talk.ask(method, created(1)) == Answer(talk.stream)
    assert talk.ask("StateChange", state_change(pb.START_CONTAINER, 1)) == Answer(talk.stream)
    assert talk.queue.begin(0.0) is None
    _, (name, _) = talk.told("RemoveContainer", created(1))
    assert name == "remove_container", "events are told all the same"
    assert talk.ask("CreateContainer", created(2)) is None


def test_a_fault_in_saying_so_counts_as_concern(caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk()
    talk.handler.on["concerns"] = lambda *_: 1 / 0
    _, (name, _) = talk.told("CreateContainer", created())
    assert name == "create_container"
    assert len(caplog.records) == 1


def test_the_patience_that_a_request_tells_counts() -> None:
    talk = Talk()
    assert talk.ask("Synchronize", synchronize([1]), now_s=0.0, timeout_s=0.5) is None
    assert talk.queue.due_s() == pytest.approx(0.3)
    assert talk.ask("StartContainer", created(), now_s=0.0, timeout_s=100) is None
    talk.work()
    assert talk.queue.due_s() == pytest.approx(1.2)


def test_missing_pods_and_containers_do_no_harm() -> None:
    talk = Talk()
    for method in ("CreateContainer", "StartContainer", "RunPodSandbox"):
        answer, _ = talk.told(method, b"")
        assert answer is not None
        assert not answer.code
    talk.told("StateChange", message(pb.StateChangeEvent(event=pb.START_CONTAINER)))


def test_the_end_is_told_once() -> None:
    talk = Talk()
    talk.queue.drop(1, "it broke", 1.2)
    talk.queue.drop(1, "again", 1.2)
    talk.work()
    assert talk.handler.next() == ("disconnected", ("it broke",))
    assert talk.queue.begin(0.0) is None
