"""`gpufrac install systemd`, and `gpufrac uninstall systemd|node`: a node without a chart, and what is left on any."""

import os
import shutil
import subprocess
import sys

import click

from deviceplugin.cli.output import EXIT_CONFIG, Failure, failures, say

DIRECTORY = "/etc/systemd/system"
RUNS = "/run/systemd/system"
"""There while systemd is the init process (sd_booted(3))."""

directory_option = click.option(
    "--directory", default=DIRECTORY, show_default=True, type=click.Path(), help="Where units go."
)
config_option = click.option(
    "--config",
    "config_path",
    default="/etc/gpufrac/config.yaml",
    show_default=True,
    type=click.Path(),
    help="The config file that both processes run with.",
    metavar="FILE",
)
force_option = click.option("--force", is_flag=True, help="Units that somebody edited or wrote, too.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")


@click.group(epilog="Example: gpufrac install systemd --now")
def install() -> None:
    """Install gpufrac on this node. On a cluster, the Helm chart does it for all nodes."""


@install.command(
    "systemd",
    short_help="As services of systemd.",
    epilog="Example: gpufrac install systemd --config /etc/gpufrac/config.yaml --now",
)
@config_option
@click.option("--now", is_flag=True, help="Enable and start them, too.")
@directory_option
@force_option
@dry_run_option
@failures
def install_systemd(config_path: str, directory: str, *, now: bool, force: bool, dry_run: bool) -> None:
    """Write units for mpsd and the plugin, which start before the kubelet, so that pods find their shares after a
    reboot. They run this gpufrac, from where it is.

    Units of an earlier version are replaced. One that somebody edited is not, but with --force: changes belong into
    `systemctl edit`, which outlives an upgrade. With --dry-run the units are printed.
    """
    from importlib.metadata import version

    from cdi.atomic import replace_file
    from deviceplugin.draft.units import NAMES, Owner, units
    from mpsd.config.load import load_config

    config = os.path.abspath(config_path)
    if not os.path.exists(config):
        raise Failure(f"there is no {config}: write one with: gpufrac config init --output {config}", EXIT_CONFIG)
    load_config(config)
    texts = units(_program(), config, version("gpufrac"))
    if dry_run:
        for name, text in texts.items():
            say(f"# {directory}/{name}\n{text}")
        return
    _check(directory)
    found = _found(directory)
    for name, (_, of) in found.items():
        if of in (Owner.EDITED, Owner.FOREIGN) and not force:
            kept = f"keep your changes by `systemctl edit {name}`, then add --force"
            raise Failure(f"cannot replace {directory}/{name}: {of}: {kept}")
    for name, text in texts.items():
        if found[name][0] != text:
            replace_file(f"{directory}/{name}", text.encode())
            say(f"{directory}/{name} is written")
        else:
            say(f"{directory}/{name} is as it should be")
    command = f"systemctl enable --now {' '.join(NAMES)}"
    if not _booted():
        say(f"systemd does not run here. Where it does: systemctl daemon-reload && {command}")
        return
    _systemctl("daemon-reload")
    if now:
        _systemctl("enable", "--now", *NAMES)
        say("Both run. Look at the node with: gpufrac status")
    else:
        say(f"Start them with: {command}")


@click.group(epilog="Example: gpufrac uninstall node --dry-run")
def uninstall() -> None:
    """Take gpufrac off this node again."""


@uninstall.command(
    "node", short_help="What both processes left behind.", epilog="Example: gpufrac uninstall node --dry-run"
)
@config_option
@click.option("--keep-logs", is_flag=True, help="Leave the logs of MPS daemons.")
@click.option("--yes", is_flag=True, help="Don't ask before MPS daemons are ended.")
@dry_run_option
@failures
def uninstall_node(config_path: str, *, keep_logs: bool, yes: bool, dry_run: bool) -> None:
    """Leave the node as it was found: delete the pods that hold shares and stop the plugin, then run this twice, before
    and after mpsd is stopped.

    While mpsd runs, its daemons are ended, compute modes given back, and CDI files and records removed, as by `gpufrac
    mpsd cleanup`. When it has stopped, its directories go, too: what gpufrac wrote there, and nothing else. Exit code 0
    when nothing is left, 1 names what is and what to do; it can be run again.
    """
    from deviceplugin.cli.uninstall import after, dry, while_mpsd_runs
    from mpsd.config.load import load_config

    config = load_config(config_path)
    if dry_run:
        dry(config, logs=not keep_logs)
    elif while_mpsd_runs(config, yes=yes):
        raise Failure(f"mpsd runs still: stop it, then once more: gpufrac uninstall node --config {config_path}")
    else:
        after(config, logs=not keep_logs)


@uninstall.command("systemd", short_help="The services of systemd.", epilog="Example: gpufrac uninstall systemd")
@directory_option
@force_option
@dry_run_option
@failures
def uninstall_systemd(directory: str, *, force: bool, dry_run: bool) -> None:
    """Stop and disable the services, and remove their units. Daemons that have clients run on, and records stay: before
    that `gpufrac uninstall node` leaves the node as it was found."""
    from deviceplugin.draft.units import NAMES, Owner

    _check(directory)
    found = _found(directory)
    there = [name for name in reversed(NAMES) if found[name][1] is not Owner.NOBODY]
    if not there:
        say(f"no units of gpufrac are in {directory}")
        return
    for name in there:
        if found[name][1] is not Owner.OURS and not force:
            raise Failure(f"cannot remove {directory}/{name}: {found[name][1]}: add --force to remove it all the same")
    if dry_run:
        for name in there:
            say(f"would stop and disable {name}, and remove {directory}/{name}")
        return
    if _booted():
        _systemctl("disable", "--now", *there)
    for name in there:
        os.unlink(f"{directory}/{name}")
        say(f"{directory}/{name} is removed")
    if _booted():
        _systemctl("daemon-reload")
    drop_ins = [f"{directory}/{name}.d" for name in there if os.path.isdir(f"{directory}/{name}.d")]
    if drop_ins:
        say(f"Left, as somebody else wrote it: {', '.join(drop_ins)}")


def _program() -> tuple[str, ...]:
    """The command that runs this gpufrac, whatever the working directory and PATH of the service."""
    own = shutil.which(sys.argv[0]) if os.path.basename(sys.argv[0]) == "gpufrac" else None
    return (os.path.abspath(own),) if own else (sys.executable, "-m", "deviceplugin.cli.main")


def _check(directory: str) -> None:
    if not os.path.isdir(directory):
        raise Failure(f"there is no {directory}: is this a node with systemd? Else name another with --directory")
    if not os.access(directory, os.W_OK):
        raise Failure(f"cannot write to {directory}: run it as root")


def _found(directory: str) -> "dict[str, tuple[str | None, object]]":
    """Each unit's text and whose it is."""
    from deviceplugin.draft.units import NAMES, owner

    texts: dict[str, str | None] = dict.fromkeys(NAMES)
    for name in NAMES:
        if os.path.lexists(f"{directory}/{name}"):
            with open(f"{directory}/{name}", encoding="utf-8", errors="replace") as file:
                texts[name] = file.read()
    return {name: (text, owner(text)) for name, text in texts.items()}


def _booted() -> bool:
    return os.path.isdir(RUNS)


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(["systemctl", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise Failure(f"systemctl {' '.join(arguments)} failed: {said}")
