"""The `gpufrac` command. Commands are imported when they run, so that `--help` and reads stay quick."""

import importlib
from typing import NamedTuple

import click


class Lazy(NamedTuple):
    """Where a command lives, and its line in the overview."""

    module: str
    attribute: str
    short_help: str


COMMANDS = {
    "status": Lazy(
        "deviceplugin.cli.status", "status", "The node in one minute: processes, GPUs, what needs attention."
    ),
    "gpus": Lazy("deviceplugin.cli.gpus", "gpus", "GPUs: health, mode, MPS daemon, memory granted and free."),
    "resources": Lazy(
        "deviceplugin.cli.node", "resources", "Resources: registered, listed, what can still be had, and why not."
    ),
    "allocations": Lazy(
        "deviceplugin.cli.node", "allocations", "Allocations: pod, GPU, request, limit, mode, enforcement."
    ),
    "daemons": Lazy("deviceplugin.cli.node", "daemons", "MPS control daemons: state, limit read back, restarts."),
    "clients": Lazy("deviceplugin.cli.clients", "clients", "Processes on the GPUs: pod, allocation, memory, kind."),
    "events": Lazy("deviceplugin.cli.events", "events", "What happened on the node and why, also while it is down."),
    "doctor": Lazy("deviceplugin.cli.doctor", "doctor", "Every prerequisite of the node: ok or not, why, what to do."),
    "explain": Lazy(
        "deviceplugin.cli.explain", "explain", "What a reason code means, what to do, and where it is now."
    ),
    "drain": Lazy("deviceplugin.cli.drain", "drain", "Give nothing new on GPUs; what runs there goes on."),
    "undrain": Lazy("deviceplugin.cli.drain", "undrain", "End a drain."),
    "terminate": Lazy(
        "deviceplugin.cli.terminate", "terminate", "End a pod's GPU use in the order that keeps its neighbours alive."
    ),
    "selftest": Lazy(
        "deviceplugin.cli.selftest", "selftest", "Prove with CUDA processes that memory limits hold on this node."
    ),
    "config": Lazy(
        "deviceplugin.cli.config", "config", "Write a config for this node; check a file, or show its effective values."
    ),
    "install": Lazy("deviceplugin.cli.install", "install", "Install both processes on this node, as systemd services."),
    "uninstall": Lazy("deviceplugin.cli.install", "uninstall", "Take them off again."),
    "sim": Lazy("deviceplugin.cli.sim", "sim", "A simulated node: admit pods and see what they would get."),
    "mpsd": Lazy("deviceplugin.cli.processes", "mpsd", "Run the process that owns GPUs and MPS daemons."),
    "plugin": Lazy("deviceplugin.cli.processes", "plugin", "Run the kubelet device plugin."),
    "completion": Lazy("deviceplugin.cli.completion", "completion", "Print the shell completion script."),
}

BELOW = {
    **dict.fromkeys(("check", "validate", "lint"), "config check"),
    "show": "config show",
    "init": "config init",
    "import": "config import nvidia",
    **{name: f"sim {name}" for name in ("run", "up", "admit", "client", "delete", "restart-kubelet")},
    **{name: f"mpsd {name}" for name in ("replace", "cleanup", "confirm-indices")},
}
"""Commands that are looked for here and are below another."""

EPILOG = """\b
Examples:
  gpufrac config check /etc/gpufrac/config.yaml
  gpufrac sim run --gpus 2 pod.yaml
  gpufrac status
  gpufrac allocations -o json
  gpufrac drain 0 --wait

Exit codes: 0 ok, 1 failure, 2 usage or config, 3 process not reachable.
"""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = str(args[0])
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = BELOW.get(name) or next(iter(near), "")
            ctx.fail(f"No such command {name!r}.{f' Did you mean `gpufrac {meant}`?' if meant else ''}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.short_help) for name, lazy in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufrac", message="gpufrac %(version)s")
def cli() -> None:
    """Share one NVIDIA GPU between pods, with memory limits that hold."""


def main() -> None:
    """The console script."""
    cli(prog_name="gpufrac")


if __name__ == "__main__":
    main()
