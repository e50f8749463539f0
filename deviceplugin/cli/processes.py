"""`gpufrac mpsd` and `gpufrac plugin`: the two long-lived processes."""

import sys
from typing import Literal

import click

config_option = click.option(
    "--config", "config_path", type=click.Path(), required=True, help="The node's config file.", metavar="FILE"
)
log_option = click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Log lines on stderr."
)


@click.command(epilog="Example: gpufrac mpsd --config /etc/gpufrac/config.yaml")
@config_option
@log_option
def mpsd(config_path: str, log_format: Literal["text", "json"]) -> None:
    """Run mpsd: it owns NVML, the GPUs' compute modes and one MPS control daemon per GPU.

    Daemons outlive it: SIGTERM stops those without clients and leaves the others to the next mpsd.
    """
    from mpsd.app import run

    sys.exit(run(config_path, log_format=log_format))


@click.command(epilog="Example: gpufrac plugin --config /etc/gpufrac/config.yaml")
@config_option
@log_option
def plugin(config_path: str, log_format: Literal["text", "json"]) -> None:
    """Run the device plugin: it registers the resources at the kubelet, plans allocations and writes CDI files.

    Restarting it never touches a running container.
    """
    from deviceplugin.app import run

    sys.exit(run(config_path, log_format=log_format))
