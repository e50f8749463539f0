"""`gpufrac drain` and `gpufrac undrain`: no new shares on a GPU, while what runs there goes on."""

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

import click

from deviceplugin.cli.gpuname import GONE, GpuName, choose, complete_gpu, gone_names, names_of_plugin
from deviceplugin.cli.options import Seconds, node_options, run_root_of
from deviceplugin.cli.output import Failure, complain, counted, failures, print_json, say, some
from deviceplugin.status.model import AllocationStatus, GpuAccount, PluginStatus
from mpsd.common.errors import NotReachableError
from mpsd.common.socketpath import plugin_socket
from mpsd.localapi.call import call

POLL_S = 1.0
"""How often the plugin is asked who is left: an allocation outlives its pod by seconds anyway."""

gpus_argument = click.argument("gpus", nargs=-1, metavar="GPU...", shell_complete=complete_gpu)
all_option = click.option("--all", "everything", is_flag=True, help="Every GPU of the node.")


@click.command(epilog="Example: gpufrac drain 0 --reason 'fan fault' --wait --timeout 600")
@gpus_argument
@all_option
@click.option("--reason", metavar="TEXT", help="Shown wherever the GPU is refused.")
@click.option("--wait", is_flag=True, help="Wait until no allocation is left on the GPUs.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    metavar="SECONDS",
    help="How long it waits. Default: forever.",
)
@node_options
@failures
def drain(
    gpus: tuple[str, ...],
    reason: str | None,
    timeout_s: float | None,
    config_path: str | None,
    run_root: str | None,
    output: str,
    *,
    everything: bool,
    wait: bool,
) -> None:
    """Give nothing new on GPUs. What holds a share keeps it, and runs on until its pod ends.

    GPU is an index, a UUID, a unique prefix of one, or a group (all its members). A drain outlives restarts and reboots
    until `gpufrac undrain`. Drained again, a GPU stays as it is, or has the new --reason. To end what runs, delete its
    pods, or see `gpufrac terminate`.

    Exit code 1 when --wait ends with allocations left: they are named.
    """
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    socket = plugin_socket(run_root_of(config_path, run_root))
    status, chosen = _chosen(socket, gpus, everything=everything, gone=False)
    drained = {gpu.uuid for gpu in status.gpus if gpu.drained}
    for gpu in chosen:
        if reason is not None or gpu.uuid not in drained:  # else the first one's reason would be lost
            call(socket, "drain", {"gpu": gpu.uuid, "reason": reason or ""}, object)
    status = _status(socket)
    tell: Callable[[str], None] = (lambda _: None) if output == "json" else say
    for line in drain_lines(status, chosen):
        tell(line)
    if wait:
        status = _wait(socket, status, chosen, timeout_s, tell)
    if output == "json":
        print_json(_document(status, chosen))
    if wait and (left := left_on(status, chosen)):
        complain(f"cannot finish the drain in {timeout_s:g} s: {_left_text(left)}")
        sys.exit(1)


@click.command(epilog="Example: gpufrac undrain 0")
@gpus_argument
@all_option
@node_options
@failures
def undrain(
    gpus: tuple[str, ...], config_path: str | None, run_root: str | None, output: str, *, everything: bool
) -> None:
    """End the drain of GPUs: they take new shares again. A GPU that is not drained stays as it is.

    GPU is an index, a UUID, a unique prefix of one, or a group (all its members). One that is gone from the node has
    its UUID only; `gpufrac status` names those that are drained.
    """
    socket = plugin_socket(run_root_of(config_path, run_root))
    _, chosen = _chosen(socket, gpus, everything=everything, gone=True)
    for gpu in chosen:
        call(socket, "undrain", {"gpu": gpu.uuid}, object)
    status = _status(socket)
    if output == "json":
        print_json(_document(status, [gpu for gpu in chosen if gpu.index != GONE]))
        return
    reasons = {account.uuid: account.reason for account in status.gpus}
    for gpu in chosen:
        reason = reasons.get(gpu.uuid, "")
        takes = f"it takes nothing new yet: {reason}" if reason else "it takes new shares"
        takes = "nothing waits for it" if gpu.index == GONE else takes
        say(f"{gpu} ({gpu.uuid}): not drained; {takes}")


def drain_lines(status: PluginStatus, chosen: Sequence[GpuName]) -> list[str]:
    """What a drain did and what goes on, a line for each GPU (pure)."""
    accounts = {account.uuid: account for account in status.gpus}
    lines = []
    for gpu in chosen:
        drained = accounts[gpu.uuid].drained if gpu.uuid in accounts else "gone from the node"
        lines.append(f"{gpu} ({gpu.uuid}): {drained}; {_left_text(left_on(status, [gpu]))}")
    groups = {gpu.group for gpu in chosen if gpu.group}
    others = [gpu for gpu in names_of_plugin(status) if gpu.group in groups and gpu not in chosen]
    return lines + [f"{gpu} ({gpu.uuid}): {_taken_along(gpu, accounts[gpu.uuid])}" for gpu in others]


def _taken_along(gpu: GpuName, account: GpuAccount) -> str:
    if account.reason:
        return f"takes nothing new either: it is in group {gpu.group}"
    return f"takes nothing of group {gpu.group} either, which needs all of its GPUs; whatever needs less it takes"


def left_on(status: PluginStatus, chosen: Collection[GpuName]) -> list[AllocationStatus]:
    """The allocations on these GPUs (pure)."""
    uuids = {gpu.uuid for gpu in chosen}
    return [allocation for allocation in status.allocations if not uuids.isdisjoint(allocation.gpus)]


def _left_text(left: Sequence[AllocationStatus]) -> str:
    if not left:
        return "no allocation is left on it"
    owners = (f"{a.namespace}/{a.pod}" if a.pod else f"allocation {a.key}" for a in left)
    return f"{counted(len(left), 'allocation')} on it until the pod ends: {some(owners)}"


def _chosen(
    socket: str, texts: Sequence[str], *, everything: bool, gone: bool
) -> tuple[PluginStatus, tuple[GpuName, ...]]:
    """`gone`: drained GPUs that are no longer there can be named, too."""
    if everything == bool(texts):
        raise click.UsageError("name GPUs, or --all, not both" if everything else "name GPUs, or --all")
    status = _status(socket)
    known = names_of_plugin(status) + (gone_names(status) if gone else ())
    return status, tuple(sorted(known)) if everything else choose(texts, known)


def _wait(
    socket: str, status: PluginStatus, chosen: Sequence[GpuName], timeout_s: float | None, say: Callable[[str], None]
) -> PluginStatus:
    """The status when no allocation is left on the GPUs, or the last one in time. A plugin that restarts meanwhile is
    waited for. Raises Failure when a GPU is drained no longer."""
    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    pause = threading.Event()
    said, trouble = _left_text(left_on(status, chosen)), ""
    while left := left_on(status, chosen):
        if (text := _left_text(left)) != said:
            said = text
            say(text)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        pause.wait(min(POLL_S, left_s))
        try:
            status = _status(socket)
        except NotReachableError as error:
            if str(error) != trouble:
                trouble = str(error)
                complain(trouble)
            continue
        ended = [str(gpu) for gpu in chosen if any(a.uuid == gpu.uuid and not a.drained for a in status.gpus)]
        if ended:
            raise Failure(f"cannot finish the drain: somebody undrained {some(ended)} meanwhile")
    else:
        say(f"No allocation is left on {some(map(str, chosen))}.")
    return status


def _document(status: PluginStatus, chosen: Sequence[GpuName]) -> list[dict[str, object]]:
    return [
        {"gpu": account, "allocations": left_on(status, [gpu])}
        for gpu in chosen
        for account in status.gpus
        if account.uuid == gpu.uuid
    ]


def _status(socket: str) -> PluginStatus:
    return call(socket, "status", {}, PluginStatus)
