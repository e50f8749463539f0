"""Options that several commands take. Light: `gpufrac mpsd` imports it, too, and stays small."""

import math
import os
from collections.abc import Callable
from typing import Any, ParamSpec

import click

from deviceplugin.cli.output import output_option
from mpsd.common.errors import ConfigError
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES, RUN_ROOT, plugin_socket

P = ParamSpec("P")


def node_options(command: Callable[P, None]) -> Callable[P, None]:
    """Where the node's sockets are, and the output format."""
    command = output_option(command)
    command = click.option(
        "--run-root",
        envvar="GPUFRAC_RUN_ROOT",
        metavar="DIR",
        help=f"Directory of the sockets (mps.runRoot). Default: {RUN_ROOT}.",
    )(command)
    return click.option(
        "--config", "config_path", envvar="GPUFRAC_CONFIG", metavar="FILE", help="Take mps.runRoot from this config."
    )(command)


def run_root_of(config_path: str | None, run_root: str | None) -> str:
    """The directory of the sockets. Raises ConfigError for a config that can't be used, or a path that is too long."""
    if run_root is None and config_path is not None:
        from mpsd.config.load import load_config

        run_root = load_config(config_path).mps.run_root
    root = run_root or RUN_ROOT
    size_bytes = len(os.fsencode(plugin_socket(root)))
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"cannot use run root {root[:80]}...: the path of a socket in it has {size_bytes} bytes, and may have "
            f"{MAX_SOCKET_PATH_BYTES}: name a shorter directory"
        )
    return root


class Seconds(click.ParamType[float]):
    """A time that passes: no negative number, nothing infinite, no NaN."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"cannot use {value!r}: write a number of seconds, 0 or more", param, ctx)
        return seconds
