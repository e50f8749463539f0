"""`gpufrac terminate`: ends a pod's GPU use in the order that keeps its neighbours alive."""

import sys
from collections.abc import Mapping, Sequence

import click
import msgspec

from deviceplugin.cli.clients import COLUMNS, client_rows, find_clients, holding
from deviceplugin.cli.gpuname import complete_pod
from deviceplugin.cli.node import look, node_options, run_root_of
from deviceplugin.cli.output import complain, confirm, failures, print_json, print_table, some
from deviceplugin.clients import Target
from deviceplugin.status import PluginStatus
from mpsd.errors import ConfigError, GpufracError, NotReachableError
from mpsd.localapi.client import call
from mpsd.localapi.wire import MAX_BLOCK_S
from mpsd.snapshot import Outcome, Termination

TIMEOUT_S = MAX_BLOCK_S + 10.0


class Ended(msgspec.Struct, frozen=True):
    """What mpsd answers. `errors`: why the clients of some GPUs can't be told."""

    clients: tuple[Termination, ...]
    errors: tuple[str, ...]


@click.command(epilog="Example: gpufrac terminate prod/web-0/main --kill")
@click.argument("target", metavar="POD[/CONTAINER]", shell_complete=complete_pod)
@click.option("-n", "--namespace", metavar="NAMESPACE", help="The pod's. Default: found by the pod's name.")
@click.option("--kill", is_flag=True, help="Kill the processes, too, once MPS let go of them.")
@click.option("--force", is_flag=True, help="With --kill: even where MPS does not confirm. Neighbours may fail.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@node_options
@failures
def terminate(
    target: str,
    namespace: str | None,
    config_path: str | None,
    run_root: str | None,
    output: str,
    *,
    kill: bool,
    force: bool,
    yes: bool,
) -> None:
    """End the GPU use of a pod, or of one of its containers. [NAMESPACE/]POD[/CONTAINER] is understood, too.

    A process that is killed with GPU work in flight can take the other clients of its MPS server down, or wedge the
    next one. So each client is terminated through the MPS daemon first: its contexts are destroyed, its next CUDA call
    fails, its neighbours run on. With --kill its process is killed then; where MPS does not confirm, it is left alone,
    unless --force says that the neighbours don't matter.

    The container keeps its share, and starts again as its restart policy says: delete the pod to end that.

    Exit code 1 when anything uses the GPU on, or with --kill lives on.
    """
    if force and not kill:
        raise click.UsageError("--force needs --kill")
    root = run_root_of(config_path, run_root)
    node = look(config_path, run_root)
    index = {gpu.info.uuid: gpu.info.index for gpu in node.need_mpsd().gpus}
    plugin = node.need_plugin()
    targets = find_targets(f"{root}/plugin.sock", target, namespace)
    keys = {held.key for held in targets}
    if not yes:
        rows = client_rows(holding(find_clients(root, node)[0], keys))
        print_table(COLUMNS, rows, _nothing(targets), err=True)
        if others := neighbours(plugin, targets):
            click.echo(f"Neighbours on the same GPUs: {some(others)}", err=True)
        confirm(f"End the GPU use of {_names(targets)}{', and kill its processes' if kill else ''}?")
    params = {"keys": sorted(keys), "kill": kill, "force": force}
    ended = call(f"{root}/mpsd.sock", "terminate", params, Ended, TIMEOUT_S)
    if output == "json":
        print_json({"targets": targets, "clients": ended.clients, "errors": ended.errors})
    else:
        print_table(
            ("GPU", "PID", "COMMAND", "CONTAINER", "OUTCOME", "WHY"), _rows(ended, targets, index), _nothing(targets)
        )
        if not kill and any(client.outcome == Outcome.TERMINATED for client in ended.clients):
            click.echo("terminated: off the GPU, its process lives on; to end that, delete its pod or say --kill.")
    for error in ended.errors:
        complain(error)
    if ended.errors or any(client.error or client.outcome == Outcome.LEFT for client in ended.clients):
        sys.exit(1)


def find_targets(socket: str, target: str, namespace: str | None) -> tuple[Target, ...]:
    """The live allocations of a pod or container. POD/CONTAINER may be NAMESPACE/POD as well: what is there decides.

    Raises:
        ConfigError: no such form, or several pods could be meant.
        GpufracError: there is none.
    """
    found, error = [], GpufracError("")
    for pod, container in readings(target, namespace):
        params = {"pod": pod} if container is None else {"pod": pod, "container": container}
        try:
            found.append(call(socket, "targets", params, tuple[Target, ...]))
        except (ConfigError, NotReachableError):
            raise
        except GpufracError as absent:
            error = absent
    if not found:
        raise error
    if len(found) > 1:
        raise ConfigError(
            f"cannot tell what {target!r} is: there is {' and '.join(map(_names, found))}; "
            "write NAMESPACE/POD/CONTAINER, or name the namespace with -n"
        )
    return found[0]


def readings(target: str, namespace: str | None) -> list[tuple[str, str | None]]:
    """What a text can mean: (pod or namespace/pod, container) (pure). Raises ConfigError for what is no name."""
    parts = target.split("/")
    if not all(parts) or len(parts) > (3 if namespace is None else 2):
        raise ConfigError(f"cannot use {target[:300]!r}: write [NAMESPACE/]POD[/CONTAINER]")
    match parts:
        case [pod]:
            return [(pod if namespace is None else f"{namespace}/{pod}", None)]
        case [pod, container] if namespace is not None:
            return [(f"{namespace}/{pod}", container)]
        case [first, second]:
            return [(target, None), (first, second)]
        case _:
            return [("/".join(parts[:2]), parts[2])]


def neighbours(status: PluginStatus, targets: Sequence[Target]) -> list[str]:
    """Who else holds shares of the same GPUs (pure)."""
    keys, gpus = {target.key for target in targets}, {gpu for target in targets for gpu in target.gpus}
    return [
        f"{a.namespace}/{a.pod}/{a.container}" if a.pod else f"allocation {a.key}"
        for a in status.allocations
        if a.key not in keys and not gpus.isdisjoint(a.gpus)
    ]


def _names(targets: Sequence[Target]) -> str:
    return some(f"{target.namespace}/{target.pod}/{target.container}" for target in targets)


def _nothing(targets: Sequence[Target]) -> str:
    return f"No process of {_names(targets)} uses a GPU."


def _rows(ended: Ended, targets: Sequence[Target], index: Mapping[str, int]) -> list[tuple[object, ...]]:
    owners = {target.key: f"{target.namespace}/{target.pod}/{target.container}" for target in targets}
    return [
        (
            index.get(client.gpu, client.gpu),
            client.pid,
            client.command,
            owners.get(client.allocation_key),
            client.outcome,
            client.error or ("it is no MPS client: only --kill ends it" if client.outcome == Outcome.LEFT else ""),
        )
        for client in ended.clients
    ]
