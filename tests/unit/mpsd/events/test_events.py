"""Events as values: lines of a file, what is news, how many may be told, and what is shown of them."""

import msgspec
import pytest
from msgspec import structs

from mpsd.common.reason import Reason
from mpsd.events import bound
from mpsd.events.bound import BURST, EVERY_S, KIND_BURST, KIND_EVERY_S, RateBound
from mpsd.events.kinds import STATE_OF, STATES, WARNINGS, EventKind
from mpsd.events.model import MAX_TEXT, Event, Held, Subject, event, line_of, parse_line
from mpsd.events.told import Told
from mpsd.events.view import Filter, Names, about, document, merged, rfc3339, what

UUID = "GPU-00000000-0000-0000-0000-000000000001"


def made(
    kind: str,
    number: int = 1,
    *,
    key: str = "",
    pod: str = "",
    code: str = "",
    gpu: str = "",
    resource: str = "",
    instance: str = "i",
    pid: int = 0,
    unix_s: float = 0.0,
    process: str = "plugin",
    count: int = 1,
) -> Event:
    subject = Subject(
        key=key,
        namespace="ns" if pod else "",
        pod=pod,
        container="c" if pod else "",
        pod_uid=f"uid-{pod}" if pod else "",
        resource=resource,
        gpus=(gpu,) if gpu else (),
        indices=(0,) if gpu else (),
    )
    return event(
        kind,
        subject,
        Reason(code, f"for {code}") if code else None,
        unix_s=unix_s,
        process=process,
        instance=instance,
        number=number,
        pid=pid,
        count=count,
    )


# --- lines -----------------------------------------------------------------------------------------------------------


def test_an_event_is_one_line_and_reads_back_whatever_its_texts_are() -> None:
    subject = Subject(pod="a\nb\x1b[31m", key="k" * 5000)
    hostile = event(
        "Refused", subject, Reason("X", "y\u2028" * MAX_TEXT), unix_s=1.5, process="p", instance="i", number=1
    )
    line = line_of(hostile)
    assert line.index(b"\n") == len(line) - 1
    assert parse_line(line) == hostile
    assert hostile.pod == "a\\nb\\u001b[31m"
    assert len(line) < 16 * MAX_TEXT
    assert hostile.subject.pod == hostile.pod
    assert (hostile.why or Reason("", "")).code == "X"


def test_what_is_held_is_a_line_too() -> None:
    held = Held((made("Granted", key="k"),))
    assert parse_line(line_of(held)) == held


@pytest.mark.parametrize("line", [b"", b"{", b'{"held":[{}]}', b'{"unixS":1}', b"[1]", b"\xff", b'{"a":' * 9999])
def test_a_line_that_is_none_is_nothing(line: bytes) -> None:
    assert parse_line(line) is None


def test_an_event_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    later = b'{"unixS":1.0,"kind":"Later","process":"p","instance":"i","number":1,"more":[1]}'
    assert parse_line(later) == made("Later", unix_s=1.0, process="p")


def test_every_kind_has_one_state_at_most_and_states_name_fields_of_subjects() -> None:
    kinds = [kind for state in STATES for kind in state.kinds]
    assert len(kinds) == len(set(kinds)) == len(STATE_OF)
    for state in STATES:
        assert set(state.rest) <= set(state.kinds)
        assert not state.field or state.field in Event.__struct_fields__
    assert set(EventKind) >= WARNINGS


# --- what is news ----------------------------------------------------------------------------------------------------


def tell(told: Told, *events: Event) -> list[str]:
    news = []
    for one in events:
        if told.news(one) is not None:
            told.note(one)
            news.append(one.kind)
    return news


def test_a_state_is_told_when_it_changes_and_an_event_each_time() -> None:
    told = Told()
    assert tell(told, made("Granted", 1, key="k"), made("Granted", 2, key="k"), made("Granted", 3, key="l")) == [
        "Granted",
        "Granted",
    ]
    assert tell(told, made("Refused", 4, resource="r"), made("Refused", 5, resource="r")) == ["Refused", "Refused"]
    withdrawn = [
        made("PermissionWithdrawn", 6, key="k", code="A"),
        made("PermissionWithdrawn", 7, key="k", code="A"),
        made("PermissionWithdrawn", 8, key="k", code="B"),
        made("PermissionGiven", 9, key="k"),
    ]
    assert tell(told, *withdrawn) == ["PermissionWithdrawn", "PermissionWithdrawn", "PermissionGiven"]
    assert told.last("Refused", Subject(resource="r")) is None


def test_a_state_at_rest_is_no_news_before_another_was() -> None:
    told = Told()
    assert tell(told, made("Released", 1, key="k")) == []
    assert tell(told, made("Granted", 2, key="k"), made("Released", 3, key="k"), made("Released", 4, key="k")) == [
        "Granted",
        "Released",
    ]


def test_with_a_share_goes_all_that_was_told_of_it() -> None:
    told = Told()
    of_one = (made("Granted", 1, key="k"), made("PodKnown", 2, key="k", pod="p"), made("PermissionGiven", 3, key="k"))
    tell(told, *of_one, made("Granted", 4, key="l"))
    tell(told, made("Released", 5, key="k"))
    assert [one.key for one in told.held.held] == ["l"]


def test_the_start_of_a_process_is_always_news() -> None:
    told = Told()
    assert tell(told, made("Started", 1), made("Started", 1, instance="j")) == ["Started", "Started"]


def test_what_a_file_says_is_not_told_again_and_a_new_file_says_it_again() -> None:
    granted, given = made("Granted", 1, key="k"), made("PermissionGiven", 2, key="k", instance="j")
    told = Told()
    told.replay([made("Granted", 1, key="old"), None, Held((granted,)), given])
    assert told.held == Held((granted, given))
    assert not told.news(made("Granted", 9, key="k", instance="new"))
    assert told.news(made("Granted", 9, key="old", instance="new"))


def test_what_is_told_together_comes_late_and_is_not_the_last_word() -> None:
    told = Told()
    told.replay([made("PermissionGiven", 5, key="k"), made("PermissionWithdrawn", 4, key="k", code="A", count=9)])
    assert told.last("PermissionGiven", Subject(key="k")) == made("PermissionGiven", 5, key="k")


def test_things_that_went_unseen_are_found() -> None:
    told = Told()
    tell(told, made("Granted", 1, key="k"), made("Granted", 2, key="l"), made("PermissionGiven", 3, key="m"))
    assert [one.key for one in told.missing(EventKind.RELEASED, {"l"})] == ["k"]


def test_an_event_gets_the_pod_that_its_allocation_is_known_to_be_of() -> None:
    told = Told()
    tell(told, made("PodKnown", 1, key="k", pod="p", gpu=UUID))
    named = told.named(Subject(key="k", daemon="d"))
    assert (named.pod, named.container, named.gpus, named.daemon) == ("p", "c", (UUID,), "d")
    for unknown in (Subject(key="l"), Subject(key="k", pod="q"), Subject()):
        assert told.named(unknown) == unknown


def test_a_total_is_told_by_what_it_grew() -> None:
    told = Told()
    grown = []
    for total, pid in ((2, 1), (2, 1), (5, 1), (1, 2), (0, 3)):
        one = structs.replace(made("Evicted", gpu=UUID, pid=pid), total=total)
        if (news := told.news(one)) is not None:
            told.note(news)
            grown.append(news.count)
    assert grown == [2, 3, 1]


def test_a_daemon_that_went_while_nobody_looked_is_told_before_the_one_in_its_place() -> None:
    first = structs.replace(made("DaemonReady", pid=1), daemon="d", boot="b")
    second = structs.replace(first, pid=2, instance="j")
    told = Told()
    assert told.unseen(first) is None
    told.note(first)
    assert told.unseen(first) is None
    crashed = told.unseen(second)
    assert crashed is not None
    assert (crashed.kind, crashed.pid, crashed.reason_code) == ("DaemonCrashed", 1, "EndedUnseen")
    assert told.unseen(structs.replace(second, boot="c")) is None, "the node was restarted"
    told.note(structs.replace(first, kind="DaemonWedged"))
    assert told.unseen(second) is None, "it was told of"


# --- how many --------------------------------------------------------------------------------------------------------


def test_what_repeats_is_told_together_and_counted() -> None:
    bounded = RateBound()
    told = [bounded.admit(made("Refused", n, resource="r", code="A"), 0.0) for n in range(BURST + 10)]
    assert [one is not None for one in told] == [True] * BURST + [False] * 10
    assert bounded.wait_s(0.0) == pytest.approx(EVERY_S)
    assert list(bounded.due(EVERY_S - 1.0)) == []
    (together,) = bounded.due(EVERY_S)
    assert (together.count, together.number) == (10, BURST + 9)
    assert bounded.wait_s(EVERY_S) is None
    assert bounded.rest() == []


def test_the_next_of_its_kind_takes_those_that_wait_along() -> None:
    bounded = RateBound()
    for number in range(BURST + 3):
        bounded.admit(made("Refused", number, resource="r"), 0.0)
    told = bounded.admit(made("Refused", 99, resource="r"), EVERY_S)
    assert told is not None
    assert (told.count, told.number) == (4, 99)


def test_other_things_reasons_and_kinds_are_not_held_up() -> None:
    bounded = RateBound()
    for number in range(BURST + 1):
        bounded.admit(made("Refused", number, resource="r", code="A"), 0.0)
    others = (
        made("Refused", resource="s", code="A"),
        made("Refused", resource="r", code="B"),
        made("Granted", resource="r", code="A"),
    )
    assert all(bounded.admit(other, 0.0) is not None for other in others)


def test_a_flood_about_many_things_is_one_line_of_its_kind() -> None:
    bounded = RateBound()
    told = [bounded.admit(made("Granted", n, key=f"k{n}"), 0.0) for n in range(KIND_BURST + 500)]
    assert sum(one is not None for one in told) == KIND_BURST
    (together,) = bounded.due(KIND_EVERY_S)
    assert (together.count, together.key, together.reason) == (500, "", "")
    assert list(bounded.due(KIND_EVERY_S)) == []


def test_more_things_than_are_kept_apart_count_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "MOST", 3)
    bounded = RateBound()
    for number in range(20):
        for _ in range(BURST + 1):
            bounded.admit(made("Refused", number, resource=f"r{number % 5}"), 0.0)
    waiting = bounded.rest()
    assert len(waiting) <= 4
    assert sum(one.count for one in waiting) + KIND_BURST >= 20 * (BURST + 1)


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (Filter(), True),
        (Filter(since_unix_s=6.0), False),
        (Filter(pods=("p",)), True),
        (Filter(pods=("ns/p",)), True),
        (Filter(pods=("ns/p/c",)), True),
        (Filter(pods=("uid-p",)), True),
        (Filter(pods=("q", "p")), True),
        (Filter(pods=("ns/p/d",)), False),
        (Filter(pods=("ns/p/c/x",)), False),
        (Filter(pods=("ns",)), False),
        (Filter(pods=("",)), False),
        (Filter(gpus=("0",)), True),
        (Filter(gpus=(UUID,)), True),
        (Filter(gpus=("GPU-0",)), True),
        (Filter(gpus=("GPU",)), False),
        (Filter(gpus=("",)), False),
        (Filter(gpus=("1",)), False),
        (Filter(pods=("p",), gpus=("1",)), False),
    ],
)
def test_only_what_is_asked_for_is_shown(asked: Filter, taken: bool) -> None:
    assert asked.takes(made("Granted", key="k", pod="p", gpu=UUID, unix_s=5.0)) is taken


def test_an_event_of_no_known_pod_is_of_none() -> None:
    assert not Filter(pods=("p",)).takes(made("Granted", key="k"))
    assert not Filter(pods=("",)).takes(made("Granted", key="k"))


def test_events_of_one_process_are_named_by_those_of_the_other() -> None:
    names = Names()
    names.learn([made("PodKnown", key="k", pod="p", gpu=UUID), Held((made("PodKnown", key="l", pod="q"),))])
    assert [names.name(made("Evicted", key=key, process="mpsd")).pod for key in ("k", "l", "m", "")] == [
        "p",
        "q",
        "",
        "",
    ]
    assert names.name(structs.replace(made("Xid"), gpus=(UUID,))).indices == (0,)
    assert names.name(structs.replace(made("Xid"), gpus=(UUID, "other"))).indices == ()


def test_events_are_shown_by_time() -> None:
    plugin: list[Event | Held] = [
        Held(()),
        made("A", 1, unix_s=1.0),
        made("C", 2, unix_s=3.0),
        made("B", 3, unix_s=2.0),
    ]
    mpsd = [made("X", 1, unix_s=2.0), made("Y", 2, unix_s=4.0)]
    assert [one.kind for one in merged([plugin, mpsd])] == ["A", "B", "X", "C", "Y"]


def test_times_are_rfc_3339() -> None:
    assert rfc3339(0.25) == "1970-01-01T00:00:00.250000Z"
    assert rfc3339(1764435600.9, digits=0) == "2025-11-29T17:00:00Z"


def test_a_program_gets_every_field_by_its_name_in_files() -> None:
    shown = document(made("Granted", 7, key="k", pod="p", gpu=UUID, unix_s=1.0))
    assert shown["time"] == "1970-01-01T00:00:01.000000Z"
    assert (shown["podUID"], shown["reasonCode"], shown["count"]) == ("uid-p", "", 1)
    assert set(shown) == {"time", *Event.__struct_encode_fields__} - {"unixS"}
    msgspec.json.encode(shown)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (made("Granted", pod="p", gpu=UUID), "ns/p/c on GPU 0"),
        (made("Granted", resource="r"), "r"),
        (Event(unix_s=0, kind="X", process="mpsd", instance="i", number=1, gpus=("GPU-1",)), "GPU-1"),
        (Event(unix_s=0, kind="X", process="mpsd", instance="i", number=1, pod_uid="u"), "pod u"),
        (made("Started", process="mpsd"), "mpsd"),
    ],
)
def test_who_an_event_is_about_is_said_as_well_as_it_is_known(one: Event, said: str) -> None:
    assert about(one) == said


def test_detail_and_reason_are_said_together() -> None:
    one = Event(unix_s=0, kind="X", process="p", instance="i", number=1, detail="8Gi", reason="full", reason_code="F")
    assert what(one) == "8Gi; full"
