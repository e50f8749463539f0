"""Codes are stable names with advice, and nothing in the product reads a message."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.plan.reasons import FINAL, EnforcementCode, OfferCode, RefusalCode
from hack.reasons_doc import subjects
from mpsd.common.reason import Code

ROOT = Path(__file__).parents[2]
MESSAGES = {"message", "reason", "not_shared", "objection", "config_error", "mpsd_error"}
"""Names of fields with a message."""
READERS = {"startswith", "endswith", "partition", "rpartition", "split", "find", "index"}
"""To leave out a word that stands there twice (`removeprefix`) decides nothing."""
FOREIGN = ("mpsd/daemon/logs/", "mpsd/daemon/controller3.py", "deviceplugin/kubernetes/")
"""Where what a daemon says is understood, which has no codes; and where `reason` is a code, as Kubernetes has it."""


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.__name__)
def test_codes_are_named_and_explained(subject: type[Code]) -> None:
    assert subject.__doc__
    for code in subject:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", code.value), code
        assert code.meaning.endswith("."), code
        assert code.advice.endswith((".", "?")), code
        assert max(len(text.split()) for text in (code.meaning, code.advice)) <= 30, code


def test_what_no_waiting_helps_is_the_request_or_the_node() -> None:
    assert not FINAL & set(OfferCode), "what is in the way now may go"
    assert set(EnforcementCode) <= FINAL
    assert RefusalCode.UNKNOWN_RESOURCE in FINAL


def readings(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that look into a message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            if _is_message(node.func.value):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("match", "search", "fullmatch") and any(_is_message(a) for a in node.args):
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = [s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str) and s.value]
            held_in = isinstance(node.ops[0], ast.In | ast.NotIn) and _is_message(node.comparators[0])
            if held_in or (texts and any(_is_message(side) for side in sides)):
                yield node


def _is_message(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return _is_message(node.args[0])
    return isinstance(node, ast.Attribute) and node.attr in MESSAGES


def test_what_looks_into_a_message_is_found() -> None:
    found = [
        'status.reason.startswith("it is replaced")',
        'str(gpu.reason).partition(":")',
        '"wedged" in daemon.reason',
        "ITS_DAEMON in gpu.reason",
        'refusal.message == "no room"',
        're.match("x", reason.message)',
    ]
    for text in found:
        assert list(readings(ast.parse(text))), text
    assert not list(readings(ast.parse('reason.code == "x"; f"{gpu.reason}"; status.reason == ""')))


def test_no_code_of_ours_looks_into_a_message() -> None:
    found = []
    for package in ("mpsd", "deviceplugin"):
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT).as_posix()
            if "/sim/" in inside or inside.startswith(FOREIGN):
                continue
            tree = ast.parse(path.read_text())
            found += [f"{inside}:{node.lineno}: {ast.unparse(node)}" for node in readings(tree)]
    assert found == []
