"""`gpufrac explain CODE`: what a reason code means, what to do about it, and where the node has it now."""

from collections.abc import Sequence

import click
import msgspec

from deviceplugin.cli.codes import Place, named, near, places, subjects
from deviceplugin.cli.node import look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import counted, failures, print_json, say, shortened
from mpsd.common.errors import ConfigError
from mpsd.common.reason import Code

SHOWN = 10
"""Places that are shown to people; JSON has all."""


@click.command(epilog="Example: gpufrac explain LessThanAsked")
@click.argument("code", metavar="CODE")
@node_options
@failures
def explain(code: str, config_path: str | None, run_root: str | None, output: str) -> None:
    """What a reason CODE means and what to do; and where this node has it now, as far as its processes answer.

    Codes are in JSON output, in logs, events and metrics. All of them are in docs/reasons.md.
    """
    enums = subjects()
    found = named(code, enums)
    if not found:
        raise ConfigError(unknown(code, near(code, enums)))
    node = look(run_root_of(config_path, run_root))
    whole = {
        name: msgspec.to_builtins(value)
        for name, value in (("mpsd", node.mpsd or node.mpsd_error), ("plugin", node.plugin or node.plugin_error))
        if value is not None
    }
    here = list(places(whole, found[0].value))
    down = [str(error) for error in (node.mpsd_error, node.plugin_error) if error is not None]
    if output == "json":
        shown = [place._asdict() for place in here]
        print_json({"code": found[0].value, "meanings": list(map(_document, found)), "now": shown, "notAsked": down})
        return
    for line in lines(found, here, down):
        say(line)


def unknown(code: str, like: Sequence[str]) -> str:
    """The error for a name that is no code (pure)."""
    meant = f"did you mean {' or '.join(like)}?" if like else "all codes are in docs/reasons.md"
    return f"cannot explain {code[:80]!r}: there is no such reason code: {meant}"


def lines(found: Sequence[Code], here: Sequence[Place], down: Sequence[str]) -> list[str]:
    """What people read (pure)."""
    text = [found[0].value]
    for code in found:
        text += [
            f"  of:          {type(code).__name__}: {_subject(code)}",
            f"  meaning:     {code.meaning}",
            f"  what to do:  {code.advice}",
        ]
    text.append("")
    if here:
        text.append(f"Now on this node ({counted(len(here), 'place')}):")
        text += [f"  {place.field}: {shortened(place.message)}" for place in here[:SHOWN]]
        if len(here) > SHOWN:
            text.append(f"  and {len(here) - SHOWN} more: see -o json")
    elif len(down) < 2:
        text.append("Nothing on this node has it now. What had it before is in `gpufrac events`.")
    text += [f"Not looked at: {error}" for error in down]
    return text


def _subject(code: Code) -> str:
    return " ".join((type(code).__doc__ or "").split())


def _document(code: Code) -> dict[str, str]:
    subject = type(code).__name__
    return {"subject": subject, "about": _subject(code), "meaning": code.meaning, "advice": code.advice}
