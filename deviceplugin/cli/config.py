"""`gpufrac config check|show`."""

import click

from deviceplugin.cli.output import failures, print_json, say


@click.group()
def config() -> None:
    """Check a config file, or show its effective values."""


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
