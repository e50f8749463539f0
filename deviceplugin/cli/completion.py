"""`gpufrac completion SHELL`."""

import click
from click.shell_completion import get_completion_class


@click.command(epilog='Example: eval "$(gpufrac completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell."""
    from deviceplugin.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "gpufrac", "_GPUFRAC_COMPLETE").source())
