"""What a reason code means, and where a node has it."""

from pathlib import Path

import msgspec
from click.testing import CliRunner

from deviceplugin.cli.codes import Place, named, near, places
from deviceplugin.cli.explain import explain, lines, unknown
from deviceplugin.status.model import ResourceStatus
from mpsd.common.reason import Code
from mpsd.localapi.snapshot import HardLimits, Snapshot


class Fruit(Code):
    """Why there is
    no fruit."""

    TOO_GREEN = "TooGreen", "It is green.", "Wait."
    EATEN = "Eaten", "It was eaten.", "Buy more."


class Bread(Code):
    """Why there is no bread."""

    EATEN = "Eaten", "It was eaten, too.", "Bake."


def test_a_code_is_found_in_each_subject_that_has_it_in_any_case() -> None:
    assert named("eaten", [Fruit, Bread]) == [Fruit.EATEN, Bread.EATEN]
    assert [type(code) for code in named("Eaten", [Fruit, Bread])] == [Fruit, Bread]
    assert named("Eat", [Fruit, Bread]) == []


def test_a_typo_gets_what_was_meant() -> None:
    assert near("togreen", [Fruit, Bread]) == ["TooGreen"]
    assert unknown("togreen", ["TooGreen"], pods_known=True).endswith("did you mean TooGreen?")
    assert "docs/reasons.md" in unknown("x", [], pods_known=False)


def test_places_of_a_code_are_found_in_every_form_that_a_reason_has() -> None:
    document = {
        "gpus": [{"reason": "green", "reason_code": "TooGreen"}, {"reason": "gone", "reason_code": "Eaten"}],
        "problems": ["a", "b"],
        "problem_codes": ["Eaten", "TooGreen"],
        "last": {"code": "TooGreen", "message": "c"},
        "whyNot": "d",
        "whyNotCode": "TooGreen",
        "missing": ["e"],
        "missingCodes": ["TooGreen"],
        "reasons": {"GPU-0": "f"},
        "reasonCodes": {"GPU-0": "TooGreen"},
    }
    assert list(places(document, "TooGreen")) == [
        Place("gpus[0].reason", "green"),
        Place("problems[1]", "b"),
        Place("last", "c"),
        Place("whyNot", "d"),
        Place("missing[0]", "e"),
        Place("reasons[GPU-0]", "f"),
    ]


def test_what_a_process_says_is_searched_as_it_is_written() -> None:
    limits = HardLimits(missing=("no cgroup v2",), missing_codes=("NoCgroup",))
    assert list(places(msgspec.to_builtins(Snapshot(instance="i", generation=1, hard_limits=limits)), "NoCgroup")) == [
        Place("hard_limits.missing[0]", "no cgroup v2")
    ]
    resource = ResourceStatus(
        name="r",
        mode="mps",
        enforcement="soft",
        minimum="soft",
        registration="",
        registration_error="",
        listed=0,
        healthy=0,
        held=0,
        free=0,
        reason="full",
        reasons={"GPU-0": "full"},
        reason_code="NoRoom",
        reason_codes={"GPU-0": "NoRoom"},
    )
    found = list(places(msgspec.to_builtins(resource), "NoRoom"))
    assert sorted(found) == [Place("reason", "full"), Place("reasons[GPU-0]", "full")]


def test_people_read_meaning_advice_and_places() -> None:
    text = lines([Fruit.TOO_GREEN], [Place("gpus[0].reason", "green")], [])
    assert text[1:4] == [
        "  of:          Fruit: Why there is no fruit.",
        "  meaning:     It is green.",
        "  what to do:  Wait.",
    ]
    assert text[-2:] == ["Now on this node (1 place):", "  gpus[0].reason: green"]


def test_a_node_that_was_not_looked_at_is_not_said_to_be_well() -> None:
    text = "\n".join(lines([Fruit.EATEN], [], ["mpsd is down", "plugin is down"]))
    assert "Nothing on this node" not in text
    assert "Not looked at: mpsd is down" in text


def test_of_many_places_some_are_shown_and_the_rest_is_counted() -> None:
    assert lines([Fruit.EATEN], [Place("a", "b")] * 13, [])[-1] == "  and 3 more: see -o json"


def test_the_command_works_while_both_processes_are_down(tmp_path: Path) -> None:
    arguments = ["--run-root", str(tmp_path), "-o", "json"]
    shown = CliRunner().invoke(explain, ["processnotreachable", *arguments])
    assert shown.exit_code == 0, shown.output
    document = msgspec.json.decode(shown.stdout)
    assert document["code"] == "ProcessNotReachable"
    assert document["meanings"][0]["advice"]
    assert [place["field"] for place in document["now"]] == ["mpsd", "plugin"]
    assert len(document["notAsked"]) == 2
    wrong = CliRunner().invoke(explain, ["ProcessNotReachabel", *arguments])
    assert wrong.exit_code == 2
    assert "did you mean ProcessNotReachable" in wrong.output
