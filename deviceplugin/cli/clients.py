"""`gpufrac clients`: which processes are on the GPUs, and whose they are."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import click
from msgspec import structs

from deviceplugin.cli.gpuname import choose, complete_gpu, names_of_mpsd, names_of_plugin
from deviceplugin.cli.node import Node, look, node_options, run_root_of
from deviceplugin.cli.output import complain, failures, print_json, print_table, rounded
from deviceplugin.clients import ClientStatus, GpuClientsStatus
from deviceplugin.status import AllocationStatus
from mpsd.errors import GpufracError
from mpsd.localapi.client import MpsdClient, call
from mpsd.snapshot import GpuClient, GpuClients, Snapshot

COLUMNS = ("GPU", "PID", "COMMAND", "KIND", "POD", "ALLOCATION", "MEMORY")


@click.command(epilog="Example: gpufrac clients --gpu 0")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="GPU", shell_complete=complete_gpu, help="Only on this GPU, or group."
)
@node_options
@failures
def clients(gpus: tuple[str, ...], config_path: str | None, run_root: str | None, output: str) -> None:
    """Processes on the GPUs: MPS clients, plain ones, and foreign ones, which hold no allocation of ours.

    They are looked up now. While mpsd is down, those that it knew last are shown; while the plugin is, pods are not
    known.
    """
    root = run_root_of(config_path, run_root)
    node = look(config_path, run_root)
    node.need_any()
    found, errors = find_clients(root, node)
    if gpus:
        known = names_of_mpsd(node.mpsd) if node.mpsd else names_of_plugin(node.need_plugin())
        chosen = {gpu.uuid for gpu in choose(gpus, known)}
        found = [gpu for gpu in found if gpu.uuid in chosen]
    if output == "json":
        print_json(found)
    else:
        print_table(COLUMNS, client_rows(found), "No process uses a GPU.")
        if any(client.allocation_key is None for gpu in found for client in gpu.clients):
            click.echo("foreign: without an allocation and a limit. An idle GPU with such a process is not shared.")
    for error in errors:
        complain(error)
    node.note_down()


def find_clients(root: str, node: Node) -> tuple[Sequence[GpuClientsStatus], list[str]]:
    """The processes on each GPU by index, and why those of some GPUs may be out of date."""
    if node.mpsd is None:
        return call(f"{root}/plugin.sock", "clients", {}, tuple[GpuClientsStatus, ...]), []
    try:
        looked_up = MpsdClient(f"{root}/mpsd.sock").clients([gpu.info.uuid for gpu in node.mpsd.gpus])
    except GpufracError as error:
        looked_up, errors = {}, [str(error)]
    else:
        errors = [answer.error for answer in looked_up.values() if answer.error]
    return named(node.mpsd, looked_up, node.plugin.allocations if node.plugin else ()), errors


def named(
    snapshot: Snapshot, looked_up: Mapping[str, GpuClients], allocations: Iterable[AllocationStatus]
) -> list[GpuClientsStatus]:
    """The clients of each GPU with the pods they belong to; where the look-up failed, those known before (pure)."""
    owners = {allocation.key: allocation for allocation in allocations}
    found = []
    for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.info.index):
        answer = looked_up.get(gpu.info.uuid)
        known = gpu.clients if answer is None or answer.error else answer.clients
        group = gpu.group if gpu.group != gpu.info.uuid else ""
        clients = tuple(_named(client, owners) for client in sorted(known, key=lambda client: client.pid))
        found.append(GpuClientsStatus(uuid=gpu.info.uuid, index=gpu.info.index, group=group, clients=clients))
    return found


def _named(client: GpuClient, owners: Mapping[str, AllocationStatus]) -> ClientStatus:
    owner = owners.get(client.allocation_key or "")
    return ClientStatus(
        pid=client.pid,
        command=client.command,
        used_bytes=client.used_bytes,
        mps=client.mps,
        allocation_key=client.allocation_key,
        resource=owner.resource if owner else "",
        namespace=owner.namespace if owner else "",
        pod=owner.pod if owner else "",
        container=owner.container if owner else "",
    )


def holding(found: Iterable[GpuClientsStatus], keys: Collection[str]) -> list[GpuClientsStatus]:
    """The same GPUs with the clients of these allocations only (pure)."""
    return [
        structs.replace(gpu, clients=tuple(client for client in gpu.clients if client.allocation_key in keys))
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
            f"{client.namespace}/{client.pod}/{client.container}" if client.pod else None,
            client.allocation_key,
            rounded(client.used_bytes),
        )
        for gpu in found
        for client in gpu.clients
    ]


def kind(client: ClientStatus) -> str:
    """How it uses the GPU, and whether it may."""
    how = "MPS client" if client.mps else "plain"
    return how if client.allocation_key is not None else f"foreign, {how}"
