"""`gpufrac clients`: which processes are on the GPUs, and whose they are."""

import time
from collections.abc import Collection, Iterable, Sequence

import click
from msgspec import structs

from deviceplugin.cli.gpuname import choose, complete_gpu, names_of_mpsd, names_of_plugin
from deviceplugin.cli.node import Node, look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import complain, failures, print_json, print_table, rounded, say, span
from deviceplugin.status.clients import ClientStatus, GpuClientsStatus
from deviceplugin.status.clients import clients as clients_of
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.errors import GpufracError
from mpsd.common.reason import Reason
from mpsd.common.socketpath import mpsd_socket, plugin_socket
from mpsd.localapi.call import call
from mpsd.localapi.client import MpsdClient

COLUMNS = ("GPU", "PID", "COMMAND", "KIND", "POD", "ALLOCATION", "MEMORY")


@click.command(epilog="Example: gpufrac clients --gpu 0")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="GPU", shell_complete=complete_gpu, help="Only on this GPU, or group."
)
@node_options
@failures
def clients(gpus: tuple[str, ...], config_path: str | None, run_root: str | None, output: str) -> None:
    """Processes on the GPUs: MPS clients, plain ones, and foreign ones, which hold no allocation of ours.

    POD is the real one, whatever allocation a process claims; its UID where its name is not known, as of a pod without
    an allocation. `gpufrac terminate` takes both.

    They are looked up now. While mpsd is down, those that it knew last are shown, with their age; while the plugin is,
    pods are not known.
    """
    root = run_root_of(config_path, run_root)
    node = look(root)
    node.need_any()
    found, errors = find_clients(root, node)
    if gpus:
        known = names_of_mpsd(node.mpsd) if node.mpsd else names_of_plugin(node.need_plugin())
        chosen = {gpu.uuid for gpu in choose(gpus, known)}
        found = [gpu for gpu in found if gpu.uuid in chosen]
    if output == "json":
        print_json(found)
    else:
        current = not any(gpu.outdated for gpu in found)
        print_table(COLUMNS, client_rows(found), "No process uses a GPU." if current else "No process is known.")
        for line in age_lines(found, time.time()):
            say(line)
        if any(client.foreign for gpu in found for client in gpu.clients):
            say("foreign: without an allocation and a limit. An idle GPU with such a process is not shared.")
    for error in errors:
        complain(error)
    node.note_down()


def find_clients(root: str, node: Node) -> tuple[Sequence[GpuClientsStatus], list[str]]:
    """The processes on each GPU by index, and why those of some GPUs may be out of date."""
    if node.mpsd is None:
        return call(plugin_socket(root), "clients", {}, tuple[GpuClientsStatus, ...]), []
    try:
        looked_up = MpsdClient(mpsd_socket(root)).clients([gpu.info.uuid for gpu in node.mpsd.gpus])
    except GpufracError as error:
        looked_up, outdated, errors = {}, Reason(ProcessCode.NOT_REACHABLE, str(error)), [str(error)]
    else:
        outdated = Reason(ProcessCode.NOT_UNDERSTOOD, "mpsd did not say who uses it")
        errors = [answer.error for answer in looked_up.values() if answer.error]
    allocations = node.plugin.allocations if node.plugin else ()
    return clients_of(node.mpsd.gpus, allocations, looked_up, outdated=outdated), errors


def age_lines(found: Iterable[GpuClientsStatus], now_unix_s: float) -> list[str]:
    """Of which GPUs the processes may be others by now, since when, and why (pure)."""
    where: dict[str, list[str]] = {}
    for gpu in found:
        if gpu.outdated:
            if gpu.known_unix_s:
                what = f"as known {span(now_unix_s - gpu.known_unix_s)} ago"
            else:
                what = "as known at an earlier time" if gpu.clients else "not known"
            where.setdefault(f"{what}: {gpu.outdated}", []).append(str(gpu.index))
    return [f"GPU {', '.join(indices)}: {what}" for what, indices in where.items()]


def holding(
    found: Iterable[GpuClientsStatus], keys: Collection[str], pod_uids: Collection[str]
) -> list[GpuClientsStatus]:
    """The same GPUs with the clients only that name these allocations or are of these pods (pure)."""
    return [
        structs.replace(gpu, clients=tuple(c for c in gpu.clients if c.allocation_key in keys or c.pod_uid in pod_uids))
        for gpu in found
    ]


def client_rows(found: Iterable[GpuClientsStatus]) -> list[tuple[object, ...]]:
    """Rows of COLUMNS (pure)."""
    return [
        (
            gpu.index,
            client.pid,
            client.command,
            kind(client),
            owner(client),
            client.allocation_key,
            rounded(client.used_bytes),
        )
        for gpu in found
        for client in gpu.clients
    ]


def owner(client: ClientStatus) -> str:
    """Its container, or as much as is known of it: its pod, or that one's UID."""
    if not client.pod:
        return f"pod {client.pod_uid}" if client.pod_uid else ""
    return "/".join(filter(None, (client.namespace, client.pod, client.container)))


def kind(client: ClientStatus) -> str:
    """How it uses the GPU, and whether it may."""
    how = "MPS client" if client.mps else "plain"
    return f"foreign, {how}" if client.foreign else how
