"""Codes are stable names with advice, and nothing in the product reads a message."""

import ast
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from deviceplugin.cli.codes import subjects
from deviceplugin.plan.reasons import FINAL, EnforcementCode, OfferCode, RefusalCode
from deviceplugin.status.clients import GpuClientsStatus
from deviceplugin.status.model import PluginStatus
from mpsd.common.reason import Code, Reason
from mpsd.localapi.snapshot import GpuClients, LimitReading, Snapshot, Termination

ROOT = Path(__file__).parents[2]
PACKAGES = ("mpsd", "deviceplugin")
READERS = {"startswith", "endswith", "partition", "rpartition", "split", "find", "index"}
"""To leave out a word that stands there twice (`removeprefix`) decides nothing."""
FOREIGN = (
    "mpsd/daemon/logs/",
    "mpsd/daemon/controller3.py",
    "deviceplugin/kubernetes/",
    "mpsd/config/document.py",
)
"""Where what others say is understood, which has no codes: a daemon, a parser of YAML; and where `reason` is a code, as
Kubernetes has it."""


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


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """The product's files: path and content."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    inside = ((path, path.relative_to(ROOT).as_posix()) for path in paths)
    return tuple((name, ast.parse(path.read_text())) for path, name in inside if "/sim/" not in name)


@cache
def message_fields() -> frozenset[str]:
    """Names of fields with a message: those that have a code beside them, and what holds a message on its way there.
    Not one that is a collection elsewhere: what is looked for in that is its members."""
    annotated = [
        (node.target.id, ast.unparse(node.annotation))
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    fields = {name.removesuffix("_code") for name, _ in annotated if name.endswith("_code")}
    collections = {name for name, of in annotated if of.startswith(("Mapping[", "dict[", "tuple[", "frozenset["))}
    return frozenset((fields - collections) | {"message", "reason", "error"})


def readings(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that look into a message."""
    other_names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.NamedExpr) and _is_message(node.value, message_fields())
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    names = message_fields() | other_names
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            if _is_message(node.func.value, names):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("match", "search", "fullmatch") and any(_is_message(a, names) for a in node.args):
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = [s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str) and s.value]
            held_in = isinstance(node.ops[0], ast.In | ast.NotIn) and _is_message(node.comparators[0], names)
            if held_in or (texts and any(_is_message(side, names) for side in sides)):
                yield node


def _is_message(node: ast.expr, names: Set[str]) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in ("str", "message_of") and bool(node.args) and _is_message(node.args[0], names)
        strips = isinstance(node.func, ast.Attribute) and node.func.attr in ("lower", "casefold", "strip")
        return strips and _is_message(node.func.value, names)  # type: ignore[attr-defined]
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Attribute) and node.attr in message_fields()


def test_what_looks_into_a_message_is_found() -> None:
    found = [
        'status.reason.startswith("it is replaced")',
        'str(gpu.reason).partition(":")',
        '"wedged" in daemon.reason',
        '"gone" in answer.error',
        "ITS_DAEMON in gpu.reason",
        'refusal.message == "no room"',
        're.match("x", reason.message)',
        'reason != "not registered"',
        'text = gpu.reason; text.startswith("lost")',
        'if (found := answer.error): found.find("gone")',
        '"gone" in answer.error.lower()',
        'message_of(reason) == "gone"',
    ]
    for text in found:
        assert list(readings(ast.parse(text))), text
    assert not list(readings(ast.parse('reason.code == "x"; f"{gpu.reason}"; status.reason == ""')))


def test_no_code_of_ours_looks_into_a_message() -> None:
    found = [
        f"{inside}:{node.lineno}: {ast.unparse(node)}"
        for inside, tree in sources()
        if not inside.startswith(FOREIGN)
        for node in readings(tree)
    ]
    assert found == []


def test_codes_that_are_spoken_of_are_there() -> None:
    known = {subject.__name__ for subject in subjects()} | {"Code"}
    named = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in re.findall(r"`([A-Z][A-Za-z]*Code)`", path.read_text())
        if name not in known
    }
    assert not named


def test_a_code_says_by_itself_whether_waiting_helps() -> None:
    """Codes of several subjects meet in one map by their text."""
    others = {str(code) for subject in subjects() for code in subject if code not in FINAL}
    assert not {str(code) for code in FINAL} & others


def shown_structs() -> list[type[msgspec.Struct]]:
    """All values that the local APIs and JSON output are made of."""
    found: list[type[msgspec.Struct]] = []
    waiting: list[object] = [Snapshot, PluginStatus, GpuClientsStatus, GpuClients, LimitReading, Termination]
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            if one not in found and one is not Reason:
                found.append(one)
                waiting += get_type_hints(one).values()
        else:
            waiting += get_args(one)
    return found


@pytest.mark.parametrize("struct", shown_structs(), ids=lambda struct: struct.__name__)
def test_a_message_has_its_code_beside_it(struct: type[msgspec.Struct]) -> None:
    fields = get_type_hints(struct)
    texts = {name for name, kind in fields.items() if kind is str}
    said = {name for name in texts if name.endswith(("reason", "error", "message", "objection", *SAID))}
    plural = {name for name in fields if name.endswith(("reasons", "objections", "problems", "warnings", "missing"))}
    codes = {f"{name.removesuffix('_message')}_code" for name in said}
    codes |= {f"{name.removesuffix('s')}_codes" for name in plural}
    assert codes <= fields.keys()


SAID = (
    "not_shared",
    "unheld",
    "not_hard",
    "kept",
    "reduced",
    "over_limit",
    "outdated",
    "unguarded",
    "uncompared",
    "hard_limits",
)
"""Names of messages that are named for what they say."""


def test_who_gives_a_message_gives_its_code() -> None:
    """A value without one would be read as what an earlier version sends."""
    with_codes = {
        (struct.__name__, name.removesuffix("_code"))
        for struct in shown_structs()
        for name in get_type_hints(struct)
        if name.endswith("_code")
    }
    found = []
    for inside, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                lacking = {name for name in given if (node.func.id, name) in with_codes and f"{name}_code" not in given}
                found += [f"{inside}:{node.lineno}: {node.func.id}({name}=...)" for name in sorted(lacking)]
    assert found == []
