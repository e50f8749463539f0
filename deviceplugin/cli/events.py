"""`gpufrac events`: what happened on the node, from the files of both processes: they need not run for it."""

import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import click

from deviceplugin.cli.gpuname import complete_gpu, complete_pod
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import Failure, cell, failures, print_json, print_table, say, shortened
from mpsd.common.errors import NotReachableError
from mpsd.common.socketpath import RUN_ROOT, mpsd_socket, plugin_socket
from mpsd.config.model import STATE_ROOT
from mpsd.events.file import PROCESSES, Reader, directory_of, paths_of, read
from mpsd.events.kinds import EventKind
from mpsd.events.model import Event, Held
from mpsd.events.view import Filter, Names, about, document, merged, rfc3339, what

COLUMNS = ("TIME", "KIND", "OF", "WHAT")
FOLLOW_S, ASK_S = 0.5, 1.0
_WIDTHS = (20, 20, 30)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)


class Since(click.ParamType[float]):
    """A time: how long ago, or when; its value in seconds of Unix time."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if match := _SPAN.fullmatch(str(value)):
            return max(0.0, time.time() - int(match[1]) * _UNITS[match[2]])
        try:
            when = datetime.fromisoformat(str(value))
            return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
        except (ValueError, OverflowError):
            self.fail(
                f"cannot use {value!r}: write how long ago, such as 90s, 10m, 2h or 7d, or a time such as "
                "2026-11-29T17:00:00Z",
                param,
                ctx,
            )


@click.command(epilog="Example: gpufrac events --since 2h --pod default/trainer")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now on; Ctrl-C ends it.")
@click.option("--since", type=Since(), metavar="TIME", help="Not older: 90s, 10m, 2h, 7d, or a time (RFC 3339).")
@click.option(
    "--pod",
    "pods",
    multiple=True,
    metavar="POD",
    shell_complete=complete_pod,
    help="Only of this pod: [NAMESPACE/]POD[/CONTAINER], or its UID.",
)
@click.option(
    "--gpu", "gpus", multiple=True, metavar="GPU", shell_complete=complete_gpu, help="Only on this GPU, or group."
)
@click.option(
    "--state-root",
    envvar="GPUFRAC_STATE_ROOT",
    metavar="DIR",
    help="Where the events are (stateRoot). Default: of the config, or of the processes that run.",
)
@node_options
@failures
def events(
    pods: tuple[str, ...],
    gpus: tuple[str, ...],
    since: float | None,
    state_root: str | None,
    config_path: str | None,
    run_root: str | None,
    output: str,
    *,
    follow: bool,
) -> None:
    """What happened on this node, oldest first: grants and refusals, permissions to start, daemons, GPUs.

    Each once, also over restarts; what repeats fast is told together, as `Refused (12x)`. Times are UTC. They are read
    from files, so that it works while a process is down: run it as root. `-o json` is a list, with --follow a line for
    each. All kinds are in docs/reasons.md.
    """
    root = state_root or state_root_of(config_path, run_root)
    asked = Filter(pods=pods, gpus=gpus, since_unix_s=since or 0.0)
    if follow:
        _follow(root, asked, as_json=output == "json")
        return
    found = look(root, asked)
    if output == "json":
        print_json([document(event) for event in found])
    else:
        rows = [_row(event) for event in found if event.kind != EventKind.POD_KNOWN]
        print_table(COLUMNS, rows, f"No such event is in {directory_of(root)}.")


def state_root_of(config_path: str | None, run_root: str | None) -> str:
    """Where the node's state is: what the config says, or a process that runs. Raises Failure where nobody knows."""
    if config_path is not None:
        from mpsd.config.load import load_config

        return load_config(config_path).state_root
    from mpsd.localapi.call import call

    root = run_root_of(config_path, run_root)
    for socket in (plugin_socket(root), mpsd_socket(root)):
        try:
            return call(socket, "state_root", {}, str, ASK_S)
        except NotReachableError:
            continue
    if root == RUN_ROOT:
        return STATE_ROOT
    raise Failure(f"cannot tell where the events are: no process of gpufrac answers in {root}: name --state-root")


def look(root: str, asked: Filter) -> list[Event]:
    """The events that are asked for, of both processes by time. Raises Failure where they may not be read."""
    try:
        lines = [list(read(root, process)) for process in PROCESSES]
    except PermissionError as error:
        raise _not_allowed(root) from error
    names = Names()
    for of_one in lines:
        names.learn(of_one)
    return [event for event in map(names.name, merged(lines)) if asked.takes(event)]


def _not_allowed(root: str) -> Failure:
    return Failure(f"cannot read the events in {directory_of(root)}: they are root's alone: run it as root (sudo)")


def _follow(root: str, asked: Filter, *, as_json: bool) -> None:
    """Prints what is there and what comes until it is interrupted."""
    names = Names()
    readers = [Reader(path) for process in PROCESSES for path in paths_of(root, process)[1:]]
    show = look(root, asked)
    try:
        began = {(event.instance, event.number) for event in show}
        if not as_json:
            say(_line(COLUMNS))
        _print(show, as_json=as_json)
        while True:
            lines: list[list[Event | Held]] = [list(reader.lines()) for reader in readers]
            for of_one in lines:
                names.learn(of_one)
            news = [event for event in map(names.name, merged(lines)) if asked.takes(event)]
            _print([event for event in news if (event.instance, event.number) not in began], as_json=as_json)
            time.sleep(FOLLOW_S)
    except PermissionError as error:
        raise _not_allowed(root) from error
    except KeyboardInterrupt:
        return
    finally:
        for reader in readers:
            reader.close()


def _print(found: Iterable[Event], *, as_json: bool) -> None:
    for event in found:
        if as_json:
            import msgspec

            say(msgspec.json.encode(document(event)).decode())
        elif event.kind != EventKind.POD_KNOWN:
            say(_line(_row(event)))


def _row(event: Event) -> tuple[str, str, str, str]:
    times = f" ({event.count}x)" if event.count > 1 else ""
    return rfc3339(event.unix_s, digits=0), f"{event.kind}{times}", about(event), shortened(what(event))


def _line(row: tuple[str, ...]) -> str:
    """One row by itself: of those to come the widths are not known."""
    cells = [cell(value) for value in row]
    return "  ".join([*(text.ljust(width) for text, width in zip(cells, _WIDTHS, strict=False)), *cells[3:]])
