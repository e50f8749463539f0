"""`gpufrac mpsd` and `gpufrac plugin`: the two long-lived processes."""

import sys
from typing import Literal

import click

from deviceplugin.cli.output import Failure, failures

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
@click.option("--run-root", envvar="GPUFRAC_RUN_ROOT", metavar="DIR", default="/run/gpufrac", show_default=True)
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


@click.command(epilog="Example: gpufrac plugin --config /etc/gpufrac/config.yaml")
@config_option
@log_option
def plugin(config_path: str, log_format: Literal["text", "json"]) -> None:
    """Run the device plugin: it registers the resources at the kubelet, plans allocations and writes CDI files.

    Restarting it never touches a running container.
    """
    from deviceplugin.app import run

    sys.exit(run(config_path, log_format=log_format))
