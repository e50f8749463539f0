"""`gpufrac config check|show|init|import`."""

import os

import click

from deviceplugin.cli.output import Failure, complain, failures, print_json, say
from deviceplugin.cli.simoptions import DriverVersion, Size, WholeNumber


@click.group()
def config() -> None:
    """Write, check and show config files."""


@config.command(
    short_help="Check a file: every problem at once.", epilog="Example: gpufrac config check /etc/gpufrac/config.yaml"
)
@click.argument("file", type=click.Path())
@failures
def check(file: str) -> None:
    """Check FILE. Every problem is printed at once, with its path, value and rule; exit code 2 when there is one.

    What depends on the node (a share that fits on no GPU, a driver that can't enforce) is not an error here:
    `gpufrac resources` shows it, and `gpufrac sim run --config FILE` tries it.
    """
    from deviceplugin.plan.enforcement import config_note
    from mpsd.config.load import load_config
    from mpsd.config.notes import notes

    loaded = load_config(file)
    count = len(loaded.resources)
    annotated = " and annotated pods" if loaded.annotations is not None else ""
    say(f"{file}: ok, {count} resource{'' if count == 1 else 's'}{annotated}")
    for resource in loaded.resources:
        if note := config_note(resource, loaded.cdi.delivery):
            say(f"note: {resource.name} will advertise 0{note}")
    for text in notes(loaded):
        say(f"note: {text}")


@config.command(
    short_help="Show a file with every default.", epilog="Example: gpufrac config show /etc/gpufrac/config.yaml -o json"
)
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
@failures
def show(file: str, output: str) -> None:
    """Show the effective values of FILE: every default filled in, every size in whole MiB."""
    from mpsd.config.load import load_config
    from mpsd.config.show import effective

    values = effective(load_config(file))
    if output == "json":
        print_json(values)
        return
    import yaml

    say(yaml.safe_dump(values, sort_keys=False), nl=False)


@config.command(short_help="Write one for this node.", epilog="Example: gpufrac config init --output config.yaml")
@click.option("--output", "file", metavar="FILE", help="Write it there. Default: print it.", type=click.Path())
@click.option("--force", is_flag=True, help="With --output: replace a file that is there.")
@click.option("--gpus", type=WholeNumber(1, 64), metavar="N", help="For another node: number of GPUs. Default: 1.")
@click.option("--gpu-memory", type=Size("1Mi"), metavar="SIZE", help="Memory of each of them. Default: 80Gi.")
@click.option("--driver", type=DriverVersion(), metavar="VERSION", help="Its driver. Default: 580.95.05.")
@failures
def init(file: str | None, gpus: int | None, gpu_memory: int | None, driver: str | None, *, force: bool) -> None:
    """Write a commented config for this node: what its GPUs and driver can, a compute mode and why, and shares of sizes
    that fit.

    Where no GPU is seen it says why, and the sizes fit any GPU. With --gpus, --gpu-memory or --driver it is for a node
    like that instead, and this one is not looked at.
    """
    from importlib.metadata import version

    from deviceplugin.draft.facts import told
    from deviceplugin.draft.look import look
    from deviceplugin.draft.proposal import draft, shareable
    from mpsd.config.model import SimulatedConfig, SimulatedGpu

    if gpus or gpu_memory or driver:
        memory_bytes = gpu_memory or SimulatedGpu().memory_bytes
        facts = told(gpus or 1, memory_bytes, driver or SimulatedConfig().driver)
    else:
        from mpsd.gpu.nvml import NvmlBackend

        facts = look(NvmlBackend())
    for trouble in facts.troubles:
        complain(trouble)
    if not shareable(facts):
        complain("no GPU that can be shared is seen here: the config is one that fits any")
    _give(draft(facts, f"gpufrac {version('gpufrac')}"), file, force=force)


@config.group(name="import", short_help="Write one from another plugin's.")
def import_() -> None:
    """Write a config from that of another device plugin."""


@import_.command(
    short_help="From NVIDIA's device plugin.", epilog="Example: gpufrac config import nvidia time-slicing-config.yaml"
)
@click.argument("file", type=click.Path())
@click.option("--name", metavar="NAME", help="Of several configs in a ConfigMap, take this one.")
@click.option("--output", "target", metavar="FILE", help="Write it there. Default: print it.", type=click.Path())
@click.option("--force", is_flag=True, help="With --output: replace a file that is there.")
@failures
def nvidia(file: str, name: str | None, target: str | None, *, force: bool) -> None:
    """Write a config that shares GPUs as FILE, a config of NVIDIA's device plugin, does: time-slicing or MPS with
    replicas, names, and devices.

    FILE is its config, a ConfigMap with named ones, or the values of its Helm chart; - reads standard input. What
    differs, and what could not be carried over, is said on standard error and in comments of the new config.
    """
    import sys
    from importlib.metadata import version

    from deviceplugin.draft.convert import convert
    from deviceplugin.draft.nvidia import read
    from mpsd.config.document import MAX_FILE_BYTES, read_config

    source = "standard input" if file == "-" else file
    content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if file == "-" else read_config(file)
    converted = convert(read(content, source, name), source, f"gpufrac {version('gpufrac')}")
    for text in converted.differs:
        complain(f"differs: {text}")
    for text in converted.left_out:
        complain(f"not carried over: {text}")
    _give(converted.text, target, force=force)


def _give(text: str, file: str | None, *, force: bool) -> None:
    """Prints a new config, or writes it to a file that is not there yet. Raises Failure, OSError."""
    from mpsd.config.load import parse_config

    parse_config(text, file or "config.yaml")  # what we write can be used
    if file is None:
        say(text, nl=False)
        return
    from cdi.atomic import replace_file

    try:
        if force:
            replace_file(os.path.realpath(file), text.encode())
        else:
            _create(file, text)
    except FileExistsError:
        raise Failure(f"cannot write {file}: it is there already: name another file, or add --force") from None
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror or error}") from error
    say(f"{file} is written; check it with: gpufrac config check {file}", err=True)


def _create(file: str, text: str) -> None:
    """A file that was not there, whole or not at all. Raises OSError."""
    with open(file, "x", encoding="utf-8") as new:
        try:
            new.write(text)
            new.flush()
        except OSError:
            os.unlink(file)
            raise
