"""`gpufrac terminate`: ends a pod's GPU use in the order that keeps its neighbours alive."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import msgspec

from deviceplugin.cli.clients import COLUMNS, client_rows, find_clients, holding, owner
from deviceplugin.cli.gpuname import complete_pod
from deviceplugin.cli.node import look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import complain, confirm, failures, print_json, print_table, say, some
from deviceplugin.status.clients import GpuClientsStatus, Target
from deviceplugin.status.model import PluginStatus
from mpsd.common.errors import ConfigError, GpufracError, NotReachableError
from mpsd.common.reason import Reason, reasons_of
from mpsd.common.socketpath import mpsd_socket, plugin_socket
from mpsd.localapi.call import call
from mpsd.localapi.snapshot import Outcome, Termination
from mpsd.localapi.wire import MAX_BLOCK_S

TIMEOUT_S = MAX_BLOCK_S + 10.0


class Ended(msgspec.Struct, frozen=True):
    """What mpsd answers. `errors`: why the clients of some GPUs can't be told."""

    clients: tuple[Termination, ...]
    errors: tuple[str, ...]
    error_codes: tuple[str, ...] = ()

    @property
    def why_untold(self) -> tuple[Reason, ...]:
        """The errors, by `ClientsCode`."""
        return reasons_of(self.errors, self.error_codes)


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

    For a pod, all of its processes on GPUs are ended, whatever allocation they claim. A pod without an allocation is
    named as `gpufrac clients` shows it, by its UID where its name is not known.

    The container keeps its share, and starts again as its restart policy says: delete the pod to end that.

    Exit code 1 when anything uses the GPU on, or with --kill lives on.
    """
    if force and not kill:
        raise click.UsageError("--force needs --kill")
    meant = readings(target, namespace)
    root = run_root_of(config_path, run_root)
    node = look(root)
    index = {gpu.info.uuid: gpu.info.index for gpu in node.need_mpsd().gpus}
    plugin = node.need_plugin()
    found = find_clients(root, node)[0]
    aim = find_aim(plugin_socket(root), target, meant, found)
    before = aim.of(found)
    if not yes:
        print_table(COLUMNS, client_rows(before), aim.nothing, err=True)
        if others := neighbours(plugin, aim, before):
            say(f"Neighbours on the same GPUs: {some(others)}", err=True)
        confirm(f"End the GPU use of {aim}{', and kill its processes' if kill else ''}?")
    params = {"keys": aim.keys, "pod_uids": aim.pod_uids, "kill": kill, "force": force}
    ended = call(mpsd_socket(root), "terminate", params, Ended, TIMEOUT_S)
    missed = _missed(ended, before, aim.of(find_clients(root, node)[0]))
    if output == "json":
        untold = ended.why_untold
        print_json(
            {
                "targets": aim.targets,
                "clients": ended.clients,
                "errors": [error.message for error in untold],
                "errorCodes": [error.code for error in untold],
                "missed": missed,
            }
        )
    else:
        print_table(("GPU", "PID", "COMMAND", "OF", "OUTCOME", "WHY"), _rows(ended, aim, before, index), aim.nothing)
        if not kill and any(client.outcome == Outcome.TERMINATED for client in ended.clients):
            say("terminated: off the GPU, its process lives on; to end that, delete its pod or say --kill.")
    for error in ended.errors:
        complain(error)
    for pid in missed:
        complain(f"cannot end pid {pid} of {aim}: it uses a GPU on, and mpsd did not find it")
    left = any(client.error or client.outcome == Outcome.LEFT for client in ended.clients)
    if ended.errors or left or missed:
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Aim:
    """Whose GPU use is to end: allocations of a pod, or of one of its containers, and for a pod its UIDs, so that what
    its processes say of themselves does not matter."""

    name: str
    targets: tuple[Target, ...]
    pod_uids: tuple[str, ...]

    @property
    def keys(self) -> list[str]:
        return sorted({target.key for target in self.targets})

    @property
    def nothing(self) -> str:
        """What is said where nothing is to be ended."""
        return f"No process of {self} uses a GPU."

    def of(self, found: Sequence[GpuClientsStatus]) -> list[GpuClientsStatus]:
        """The GPUs with its processes only."""
        return holding(found, self.keys, self.pod_uids)

    def __str__(self) -> str:
        return some(map(_target_name, self.targets)) or self.name


def find_aim(
    socket: str, target: str, meant: Sequence[tuple[str, str | None]], found: Sequence[GpuClientsStatus]
) -> Aim:
    """What is meant. POD/CONTAINER may be NAMESPACE/POD as well: what is there decides. A pod without an allocation is
    known by its processes on GPUs.

    Raises:
        ConfigError: several pods could be meant.
        GpufracError: there is none.
    """
    aims, errors = [], []
    for pod, container in meant:
        params = {"pod": pod} if container is None else {"pod": pod, "container": container}
        try:
            targets = call(socket, "targets", params, tuple[Target, ...])
        except (ConfigError, NotReachableError):
            raise
        except GpufracError as absent:
            errors.append(str(absent))
            if container is None and (uids := _uids_of(pod, found)):
                aims.append(Aim(f"pod {pod}", (), uids))
        else:
            uids = tuple(dict.fromkeys(uid for t in targets for uid in t.pod_uids)) if container is None else ()
            aims.append(Aim(target, targets, uids))
    if not aims:
        *others, last = (error.removeprefix("cannot find ") for error in errors)
        also = "".join(f"there is no {error.removeprefix('a ').partition(':')[0]}, and " for error in others)
        raise GpufracError(f"cannot find {target[:300]!r}: {also}there is no {last.removeprefix('a ')}")
    if len(aims) > 1:
        raise ConfigError(
            f"cannot tell what {target!r} is: there is {' and '.join(map(str, aims))}; "
            "write NAMESPACE/POD/CONTAINER, or name the namespace with -n"
        )
    return aims[0]


def _uids_of(pod: str, found: Sequence[GpuClientsStatus]) -> tuple[str, ...]:
    """The pods that `gpufrac clients` shows under this name or UID."""
    clients = [client for gpu in found for client in gpu.clients if client.pod_uid]
    uids = [c.pod_uid for c in clients if pod in (c.pod_uid, f"{c.namespace}/{c.pod}")]
    return tuple(dict.fromkeys(uids))


def _missed(ended: Ended, before: Sequence[GpuClientsStatus], after: Sequence[GpuClientsStatus]) -> list[int]:
    """The PIDs that were to be ended, are not said to be, and use a GPU on (pure)."""
    told = {client.pid for client in ended.clients}
    known = {client.pid for gpu in before for client in gpu.clients}
    return sorted({c.pid for gpu in after for c in gpu.clients if c.pid in known and c.pid not in told})


def readings(target: str, namespace: str | None) -> list[tuple[str, str | None]]:
    """What a text can mean: (pod or namespace/pod, container) (pure). Raises ConfigError for what is no name."""
    if namespace is not None and (not namespace or "/" in namespace):
        raise ConfigError(f"cannot use namespace {namespace[:300]!r}: write its name")
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


def neighbours(status: PluginStatus, aim: Aim, used: Sequence[GpuClientsStatus]) -> list[str]:
    """Who else holds shares of the same GPUs (pure)."""
    gpus = {gpu for target in aim.targets for gpu in target.gpus} | {gpu.uuid for gpu in used if gpu.clients}
    return [
        f"{a.namespace}/{a.pod}/{a.container}" if a.pod else f"allocation {a.key}"
        for a in status.allocations
        if a.key not in aim.keys and not gpus.isdisjoint(a.gpus)
    ]


def _target_name(target: Target) -> str:
    return f"{target.namespace}/{target.pod}/{target.container}" if target.pod else f"allocation {target.key}"


def _rows(
    ended: Ended, aim: Aim, before: Sequence[GpuClientsStatus], index: Mapping[str, int]
) -> list[tuple[object, ...]]:
    owners = {target.key: _target_name(target) for target in aim.targets}
    seen = {client.pid: owner(client) for gpu in before for client in gpu.clients}
    return [
        (
            index.get(client.gpu, client.gpu),
            client.pid,
            client.command,
            seen.get(client.pid) or owners.get(client.allocation_key),
            client.outcome,
            client.error or ("it is no MPS client: only --kill ends it" if client.outcome == Outcome.LEFT else ""),
        )
        for client in ended.clients
    ]
