"""`gpufrac explain`: what a reason code means and where the node has it, or why a pod or GPU is as it is."""

from collections.abc import Sequence

import click
import msgspec

from deviceplugin.cli.codes import Place, named, near, places, subjects
from deviceplugin.cli.gpuname import choose, names_of_plugin
from deviceplugin.cli.node import look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import Failure, counted, failures, print_json, say, shortened
from deviceplugin.cli.whys import gpu_lines, named_pod, pod_lines
from mpsd.common.errors import ConfigError
from mpsd.common.reason import Code

SHOWN = 10
"""Places that are shown to people; JSON has all."""


@click.command(epilog="Example: gpufrac explain LessThanAsked")
@click.argument("what", nargs=-1, required=True, metavar="CODE|POD|gpu GPU")
@node_options
@failures
def explain(what: tuple[str, ...], config_path: str | None, run_root: str | None, output: str) -> None:
    """What a reason CODE means and what to do, and where this node has it now, as far as its processes answer; or why a
    POD ([NAMESPACE/]POD[/CONTAINER]) or a GPU (`gpu 0`) is as it is.

    Codes are in JSON output, in logs, events and metrics. All of them are in docs/reasons.md.
    """
    if len(what) == 2 and what[0] == "gpu":
        _gpu(what[1], run_root_of(config_path, run_root), output)
        return
    if len(what) > 1:
        raise ConfigError(f"cannot explain {' '.join(what)[:80]!r}: name a code, a pod, or `gpu` and a GPU")
    code = what[0]
    if "/" in code:
        _pod(code, run_root_of(config_path, run_root), output)
        return
    enums = subjects()
    found = named(code, enums)
    node = look(run_root_of(config_path, run_root))
    if not found:
        if node.plugin is not None and named_pod(code, node.plugin.allocations):
            _pod(code, run_root_of(config_path, run_root), output)
            return
        raise ConfigError(unknown(code, near(code, enums), pods_known=node.plugin is not None))
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


def _pod(name: str, root: str, output: str) -> None:
    plugin = look(root, ("plugin",)).need_plugin()
    found = named_pod(name, plugin.allocations)
    if not found:
        text = "it holds nothing of gpufrac; what was refused or has ended is in `gpufrac events --pod`"
        raise Failure(f"cannot explain pod {name[:80]!r}: {text}")
    if output == "json":
        print_json(found)
        return
    for allocation in found:
        for line in pod_lines(allocation, plugin):
            say(line)


def _gpu(name: str, root: str, output: str) -> None:
    plugin = look(root, ("plugin",)).need_plugin()
    uuids = {gpu.uuid for gpu in choose([name], names_of_plugin(plugin))}
    found = [gpu for gpu in plugin.gpus if gpu.uuid in uuids]
    if output == "json":
        print_json(found)
        return
    for gpu in found:
        for line in gpu_lines(gpu, plugin):
            say(line)


def unknown(code: str, like: Sequence[str], *, pods_known: bool) -> str:
    """The error for a name that is no code (pure)."""
    meant = f"did you mean {' or '.join(like)}?" if like else "all codes are in docs/reasons.md"
    pods = "nor a pod that holds something here" if pods_known else "and pods are not known while the plugin is down"
    return f"cannot explain {code[:80]!r}: it is no reason code, {pods}: {meant}"


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
