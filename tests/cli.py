"""The command line, called in this process: to start Python for it costs more than what most commands do."""

import subprocess

from click.testing import CliRunner

from deviceplugin.cli.main import cli


def gpufrac(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """What a command prints and exits with. For tests that are about neither its process nor signals.

    Args:
        text: standard input.
    """
    done = CliRunner().invoke(cli, list(arguments), prog_name="gpufrac", input=text, catch_exceptions=False)
    return subprocess.CompletedProcess(["gpufrac", *arguments], done.exit_code, done.stdout, done.stderr)
