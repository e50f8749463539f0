"""Commands of the install guide are commands that there are: of gpufrac with its options, of manifests by name."""

import re
import shlex
from pathlib import Path

import click
import pytest

from deviceplugin.cli.main import cli
from tests.unit.deploy.manifests import DEPLOY, installed

PAGES = (DEPLOY.parent / "docs" / "install.md", DEPLOY / "chart" / "gpufrac" / "README.md")
TEXT = "\n".join(page.read_text() for page in PAGES)
LINES = [line.partition("  #")[0].strip() for line in TEXT.splitlines()]
CALLS = sorted({
    call.rstrip("`);").partition("; done")[0]
    for text in [*LINES, *re.findall(r"`([^`\n]+)`", TEXT)]
    for call in re.findall(r"(?:^|&& |-- )(gpufrac (?:[a-z-]+)(?: [^|;&]*)?)", text)
})  # fmt: skip


def test_there_are_commands() -> None:
    assert len(CALLS) >= 8, CALLS


@pytest.mark.parametrize("call", CALLS)
def test_a_command_of_gpufrac_is_one(call: str) -> None:
    command: click.Command = cli
    words = shlex.split(call)[1:]
    parent = click.Context(cli, info_name="gpufrac")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(parent, words.pop(0))
        assert found is not None, call
        command, parent = found, click.Context(found, parent=parent)
    command.make_context("gpufrac", [word.replace("FILE", "config.yaml") for word in words], resilient_parsing=False)


def test_what_kubectl_is_told_of_is_in_the_manifest() -> None:
    names = {(one["kind"].lower(), one["metadata"]["name"]) for one in installed()}
    for kind, name in re.findall(r"\b(ds)/(gpufrac-[a-z]+)", TEXT):
        assert ({"ds": "daemonset"}[kind], name) in names
    components = set(re.findall(r"app\.kubernetes\.io/component=([a-z]+)", TEXT))
    assert components == {"plugin", "mpsd"}
    accounts = set(re.findall(r"-z (\S+)", TEXT))
    assert accounts == {name for kind, name in names if kind == "serviceaccount"}


def test_files_that_are_named_are_there() -> None:
    root = DEPLOY.parent
    for path in re.findall(r"(?<![\w/.])((?:deploy|examples|hack)/[\w./-]+[\w])", TEXT):
        assert Path(root, path).exists(), path
