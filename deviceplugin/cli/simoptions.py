"""Options of `gpufrac sim`: what kind of node to simulate, and the words they take."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A Kubernetes quantity, in bytes."""

    name = "size"

    def __init__(self, minimum: str) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from mpsd.common.quantity import QuantityError, parse_bytes

        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_bytes(value)
        except QuantityError as error:
            self.fail(str(error), param, ctx)
        if size_bytes < parse_bytes(self._minimum):
            unit = " (a number without a suffix counts bytes)" if value[-1:].isdigit() else ""
            self.fail(f"cannot use {value}: must be at least {self._minimum}, such as 80Gi{unit}", param, ctx)
        return size_bytes


class WholeNumber(click.IntRange):
    """As IntRange, which calls itself an "integer range"."""

    name = "whole number"


class DriverVersion(click.ParamType[str]):
    """Such as 580.95.05."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = str(value).split(".")
        if not (2 <= len(parts) <= 3 and all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts)):
            self.fail(f"cannot use {value!r}: must be a driver version such as 580.95.05", param, ctx)
        return str(value)


class RuntimeVersion(click.ParamType[tuple[str, str]]):
    """Name and version of a container runtime, such as containerd:2.1.9."""

    name = "runtime"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, colon, version = str(value).partition(":")
        if not (name and colon and version and value.isascii() and value.isprintable()):
            self.fail(f"cannot use {value!r}: must be NAME:VERSION such as containerd:2.1.9", param, ctx)
        return name, version


schedule_option = click.option(
    "--schedule",
    is_flag=True,
    help="A stand-in for KAI Scheduler places pods that ask for fractions of GPUs and have `schedulerName: "
    "kai-scheduler`, and writes their annotations; beside it, NVIDIA's device plugin offers whole GPUs.",
)


def node_options(command: F) -> F:
    """What kind of node to simulate."""
    for option in (
        click.option("--no-nri", is_flag=True, help="A container runtime without NRI: annotations have no effect."),
        click.option(
            "--nri-runtime",
            type=RuntimeVersion(),
            metavar="NAME:VERSION",
            help="How the container runtime introduces itself; not with --no-nri. Default: containerd:2.1.9.",
        ),
        click.option(
            "--no-dmem", is_flag=True, help="A kernel without the dmem controller (before 6.14); for --driver 615."
        ),
        click.option(
            "--no-memory-hook", is_flag=True, help="A container toolkit that sets no memory limits; for --driver 615."
        ),
        click.option("--driver", type=DriverVersion(), metavar="VERSION", help="Driver version. Default: 580.95.05."),
        click.option("--gpu-memory", type=Size("1Mi"), metavar="SIZE", help="Memory of each GPU. Default: 80Gi."),
        click.option(
            "--gpus",
            type=WholeNumber(1, 64),
            metavar="N",
            help="Number of GPUs. Default: 1, or as many as the config names by index.",
        ),
        click.option(
            "--config",
            "config_path",
            metavar="FILE",
            help="The config to try; its paths and backend are replaced. Default: gpufrac.dev/gpu-8gi, gpu-16gi and "
            "memory-gib, all sm-sharing, and annotated pods on all GPUs.",
        ),
    ):
        command = option(command)
    return command


directory_option = click.option(
    "-d", "--directory", required=True, metavar="DIR", help="The directory of the node.", type=click.Path()
)
