"""`gpufrac mpsd` and `gpufrac plugin`: the two long-lived processes."""

import sys
from typing import Literal

import click

from deviceplugin.cli.gpuname import choose, complete_gpu, names_of_mpsd
from deviceplugin.cli.output import Failure, confirm, counted, failures, some

config_option = click.option(
    "--config", "config_path", type=click.Path(), required=True, help="The node's config file.", metavar="FILE"
)
run_root_option = click.option(
    "--run-root", envvar="GPUFRAC_RUN_ROOT", metavar="DIR", default="/run/gpufrac", show_default=True
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
    """Run mpsd: it owns NVML, the GPUs' compute modes and one MPS control daemon per GPU.

    Daemons outlive it: SIGTERM stops those without clients and leaves the others to the next mpsd.
    """
    if context.invoked_subcommand is not None:
        return
    if config_path is None:
        raise click.MissingParameter(ctx=context, param_hint="'--config'", param_type="option")
    from mpsd.app import run

    sys.exit(run(config_path, log_format=log_format))


@mpsd.command(epilog="Example: gpufrac mpsd cleanup")
@run_root_option
@failures
def cleanup(run_root: str) -> None:
    """Before an uninstall: end every MPS daemon of a running mpsd, clients or not, and restore the compute modes.

    Stop the plugin first. Nothing starts again until mpsd is restarted. Exit code 1 names what could not be ended.
    """
    from mpsd.localapi.client import call

    left = call(f"{run_root}/mpsd.sock", "cleanup", {}, dict[str, list[str]], timeout_s=40.0)["left"]
    if left:
        raise Failure(f"cannot leave the node as it was found: {'; '.join(left)}")
    click.echo("The node is as it was found: no MPS daemon of ours runs, and every compute mode is restored.")


@mpsd.command(epilog="Example: gpufrac mpsd replace 0 --reason 'new driver'")
@click.argument("daemon", metavar="GPU|GROUP", shell_complete=complete_gpu)
@click.option("--now", is_flag=True, help="Don't wait for its clients: they lose their GPU.")
@click.option("--reason", metavar="TEXT", help="For status and log.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@run_root_option
@failures
def replace(daemon: str, reason: str | None, run_root: str, *, now: bool, yes: bool) -> None:
    """Have a fresh MPS control daemon take the place of one: when it hangs, or what it holds is to be let go.

    The daemon is named by its GPU (index, UUID, unique prefix) or group. It serves until its clients have ended by
    themselves, and nothing new starts on it meanwhile. With --now it is ended whoever uses it.
    """
    from mpsd.localapi.client import MpsdClient, call

    snapshot = MpsdClient(f"{run_root}/mpsd.sock").snapshot()
    chosen = choose([daemon], names_of_mpsd(snapshot))
    name = chosen[0].group or chosen[0].uuid
    label = f"the MPS daemon of {f'group {name}' if chosen[0].group else chosen[0]}"
    users = {
        client.pid: f"{client.pid} ({client.command})"
        for gpu in snapshot.gpus
        if name in (gpu.group, gpu.info.uuid)
        for client in gpu.clients
        if client.mps
    }
    clients = f"{counted(len(users), 'client')}{f': pid {some(users.values())}' if users else ''}"
    if now and not yes:
        confirm(f"End {label} at once? It has {clients}.")
    params = {"daemon": name, "now": now} | ({"reason": reason} if reason else {})
    call(f"{run_root}/mpsd.sock", "replace", params, object)
    if users and not now:
        click.echo(f"T{label[1:]} is replaced once it has no client; until then it serves {clients}.")
        click.echo(f"See who is left with: gpufrac clients --gpu {daemon}")
    else:
        click.echo(f"T{label[1:]} is being replaced; see: gpufrac daemons")


@click.command(epilog="Example: gpufrac plugin --config /etc/gpufrac/config.yaml")
@config_option
@log_option
def plugin(config_path: str, log_format: Literal["text", "json"]) -> None:
    """Run the device plugin: it registers the resources at the kubelet, plans allocations and writes CDI files.

    Restarting it never touches a running container.
    """
    from deviceplugin.app import run

    sys.exit(run(config_path, log_format=log_format))
