"""`gpufrac mpsd` and `gpufrac plugin`: the two long-lived processes."""

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import click

from deviceplugin.cli.gpuname import choose, complete_gpu, names_of_mpsd
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import Failure, complain, confirm, counted, failures, print_json, say, some
from mpsd.common.errors import ConfigError, GpufracError, NotReachableError
from mpsd.common.socketpath import mpsd_socket, plugin_socket

if TYPE_CHECKING:
    from mpsd.localapi.snapshot import GpuStatus, Places

MAX_REASON = 200
"""As long as mpsd takes it."""

PLUGIN_RUNS = "gpufrac plugin runs, so its CDI files and records stay: stop it, and clean up again"

config_option = click.option(
    "--config", "config_path", type=click.Path(), required=True, help="The node's config file.", metavar="FILE"
)
log_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Log lines on stderr."
)


@click.group(
    invoke_without_command=True, epilog="Example: gpufrac mpsd --config /etc/gpufrac/config.yaml", no_args_is_help=True
)
@click.option("--config", "config_path", type=click.Path(), help="The node's config file.", metavar="FILE")
@log_option
@click.pass_context
def mpsd(context: click.Context, config_path: str | None, log_format: Literal["text", "json"]) -> None:
    """Run mpsd: it owns NVML, the GPUs' compute modes and one MPS control daemon per domain of GPUs.

    Daemons outlive it: SIGTERM stops those without clients and leaves the others to the next mpsd.
    """
    if context.invoked_subcommand is not None:
        context.default_map = {name: {"config_path": config_path} for name in mpsd.commands}
        return
    if config_path is None:
        raise click.MissingParameter(ctx=context, param_hint="'--config'", param_type="option")
    from mpsd.app import run

    sys.exit(run(config_path, log_format=log_format))


@mpsd.command(short_help="End every MPS daemon, before an uninstall.", epilog="Example: gpufrac mpsd cleanup --yes")
@click.option("--yes", is_flag=True, help="Don't ask.")
@node_options
@failures
def cleanup(config_path: str | None, run_root: str | None, output: str, *, yes: bool) -> None:
    """Before an uninstall: end every MPS daemon of a running mpsd, clients or not, restore the compute modes, and
    remove CDI files and records.

    Stop the plugin first, and delete the pods that hold shares. Nothing starts again until mpsd is restarted. Exit code
    1 names what could not be undone, and what is still there.
    """
    places = clean_up(run_root_of(config_path, run_root), yes=yes)
    ours = sorted({places.run_root, places.log_root, places.state_root})
    if output == "json":
        print_json({"left": [], "directories": ours})
    else:
        say(
            "The node is as it was found: no MPS daemon of ours runs, every compute mode is restored, no pod holds a "
            "share, and no CDI file of ours is left."
        )
        say(f"Logs and sockets of mpsd are in {', '.join(ours)}.")
        say("When it has stopped, `gpufrac uninstall node` removes them.")


def clean_up(root: str, *, yes: bool) -> "Places":
    """Has the mpsd of a run root end its daemons, and removes what the plugin left. Raises Failure: what is left."""
    from mpsd.localapi.call import call
    from mpsd.localapi.client import MpsdClient
    from mpsd.localapi.snapshot import CleanedUp

    snapshot = MpsdClient(mpsd_socket(root)).snapshot()
    if answers(plugin_socket(root)):
        complain("gpufrac plugin is up: stop it first, or it goes on admitting pods that can't start")
    if not yes:
        users = _users(snapshot.gpus)
        confirm(f"End every MPS daemon of this node, and restore the compute modes? They have {_clients(users)}.")
    done = call(mpsd_socket(root), "cleanup", {}, CleanedUp, timeout_s=40.0)
    plugin = [PLUGIN_RUNS] if answers(plugin_socket(root)) else _clear_plugin(root, done.places)
    left = [*done.left, *plugin]
    if left:
        raise Failure(f"cannot leave the node as it was found: {'; '.join(left)}")
    return done.places


def _clear_plugin(root: str, places: "Places") -> list[str]:
    """Removes what the plugin left, if none runs; what is still there."""
    from deviceplugin.grants.instance import lock_files
    from deviceplugin.reconcile.leftovers import clear
    from mpsd.common.processlock import ProcessLock, ProcessLockError

    locks = lock_files(root, places.state_root, places.cdi_directory, places.device_plugins)
    try:
        with ProcessLock("plugin", locks, wait_s=0.0, stop=threading.Event()):
            left = clear(places)
            for path in () if left else locks:
                with suppress(OSError):
                    os.unlink(path)
            return left
    except ProcessLockError:
        return [PLUGIN_RUNS]


@mpsd.command(
    short_help="Replace an MPS daemon by a fresh one.", epilog="Example: gpufrac mpsd replace 0 --reason 'new driver'"
)
@click.argument("daemon", metavar="GPU|GROUP", shell_complete=complete_gpu)
@click.option("--now", is_flag=True, help="Don't wait for its clients: they lose their GPU.")
@click.option("--reason", metavar="TEXT", help="For status and log.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@node_options
@failures
def replace(
    daemon: str, reason: str | None, config_path: str | None, run_root: str | None, output: str, *, now: bool, yes: bool
) -> None:
    """Have a fresh MPS control daemon take the place of one: when it hangs, or what it holds is to be let go.

    The daemon is named by one of its GPUs (index, UUID, unique prefix) or their group. It serves until its clients have
    ended by themselves, and nothing new starts on it meanwhile. With --now it is ended whoever uses it.

    Exit code 1 when it can't be replaced as it is now.
    """
    from deviceplugin.plan.view import domain_text
    from mpsd.localapi.call import call
    from mpsd.localapi.client import MpsdClient

    if reason is not None and not (reason.strip() and reason.isprintable() and len(reason) <= MAX_REASON):
        raise ConfigError(f"cannot take this reason: use 1 to {MAX_REASON} printable characters on one line")
    socket = mpsd_socket(run_root_of(config_path, run_root))
    snapshot = MpsdClient(socket).snapshot()
    chosen = choose([daemon], names_of_mpsd(snapshot))[0]
    name = next(gpu.group for gpu in snapshot.gpus if gpu.info.uuid == chosen.uuid)
    label = f"the MPS daemon of {domain_text(name, snapshot.gpus)}"
    users = _users(gpu for gpu in snapshot.gpus if gpu.group == name)
    if now and not yes:
        confirm(f"End {label} at once? It has {_clients(users)}.")
    params = {"daemon": name, "now": now} | ({"reason": reason} if reason else {})
    try:
        call(socket, "replace", params, object)
    except ConfigError as error:  # it has that name: its state is in the way
        raise Failure(str(error)) from error
    if output == "json":
        print_json({"daemon": name, "now": now, "clients": sorted(users)})
    elif users and not now:
        say(f"T{label[1:]} is replaced once it has no client; until then it serves {_clients(users)}.")
        say(f"See who is left with: gpufrac clients --gpu {daemon}")
    else:
        say(f"T{label[1:]} is being replaced; see: gpufrac daemons")


@mpsd.command(
    "confirm-indices",
    short_help="Accept GPU indices as the driver has them now.",
    epilog="Example: gpufrac mpsd confirm-indices",
)
@click.option("--yes", is_flag=True, help="Don't ask.")
@node_options
@failures
def confirm_indices(config_path: str | None, run_root: str | None, output: str, *, yes: bool) -> None:
    """Have the indices in the config mean the GPUs as the driver numbers them now.

    When a GPU falls out or is replaced, the driver numbers the others anew. The config goes on to mean the GPUs of
    before until this is confirmed, or until it names GPUs by UUID.
    """
    from mpsd.config.numbering import moved
    from mpsd.localapi.call import call
    from mpsd.localapi.client import MpsdClient

    socket = mpsd_socket(run_root_of(config_path, run_root))
    gpus = MpsdClient(socket).snapshot().gpus
    changes = moved(gpu.info for gpu in gpus)
    if changes and not yes:
        confirm(f"Have the config's indices mean other GPUs than before? {'; '.join(changes)}.")
    call(socket, "confirm_indices", {}, object)
    if output == "json":
        print_json({"changes": changes, "indices": {gpu.info.uuid: gpu.info.index for gpu in gpus}})
    elif changes:
        say(f"The config's indices mean what the driver says: {'; '.join(changes)}.")
    else:
        say("The config's indices mean what the driver says already.")


def _users(gpus: "Iterable[GpuStatus]") -> dict[int, str]:
    """The MPS clients on these GPUs, by PID."""
    return {c.pid: f"{c.pid} ({c.command})" for gpu in gpus for c in gpu.clients if c.mps}


def _clients(users: Mapping[int, str]) -> str:
    return f"{counted(len(users), 'client')}{f': pid {some(users.values())}' if users else ''}"


def answers(socket: str) -> bool:
    """Whether a process serves it."""
    from mpsd.localapi.call import call

    try:
        call(socket, "allocations", {}, object)
    except NotReachableError:
        return False
    except GpufracError:
        pass
    return True


@click.command(epilog="Example: gpufrac plugin --config /etc/gpufrac/config.yaml")
@config_option
@log_option
def plugin(config_path: str, log_format: Literal["text", "json"]) -> None:
    """Run the device plugin: it registers the resources at the kubelet, plans allocations and writes CDI files.

    Restarting it never touches a running container.
    """
    from deviceplugin.app import run

    sys.exit(run(config_path, log_format=log_format))
