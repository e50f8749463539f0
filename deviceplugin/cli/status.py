"""`gpufrac status`, and the same as a probe. Light: a probe runs every few seconds, and loads only what it asks for."""

import sys

import click

from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import failures
from mpsd.common.errors import ConfigError

CHECKS = ("attention", "live", "ready")
PROCESSES = ("mpsd", "plugin")


@click.command(epilog="Example: gpufrac status --check=live --process mpsd")
@click.option(
    "--check",
    is_flag=False,
    flag_value="attention",
    type=click.Choice(CHECKS),
    help="One line and an exit code, for probes and scripts: 0 ok, 1 not ready or needs attention, 3 a process is down "
    "or hangs. live: it answers and its loops go round. ready: it can serve, too. attention (the default): nothing "
    "needs attention, too.",
)
@click.option("--process", type=click.Choice(PROCESSES), help="With --check: only this one. Default: both.")
@node_options
@failures
def status(check: str | None, process: str | None, config_path: str | None, run_root: str | None, output: str) -> None:
    """The node in one minute: processes, GPUs, resources, and everything that needs attention.

    While one process answers, what it knows is shown and the other is said to be down; exit code 3 when neither does.
    """
    if check is not None:
        from deviceplugin.cli.check import run

        sys.exit(run(check, (process,) if process else PROCESSES, run_root_of(config_path, run_root), output))
    if process is not None:
        raise ConfigError("cannot use --process alone: it says which process --check looks at")
    from deviceplugin.cli.node import look
    from deviceplugin.cli.overview import show

    node = look(run_root_of(config_path, run_root))
    node.need_any()
    show(node, output)
