"""`gpufrac doctor`: every prerequisite of the node, a row each."""

import sys

import click
import msgspec

from deviceplugin.cli.node import look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import failures, print_json, print_table, say, shortened
from deviceplugin.cli.overview import needs_attention
from mpsd.config.model import NodeConfig


@click.command(epilog="Example: gpufrac doctor --config /etc/gpufrac/config.yaml")
@node_options
@failures
def doctor(config_path: str | None, run_root: str | None, output: str) -> None:
    """Check what this node needs for gpufrac: driver, MPS, limits, directories, kernel, CDI, kubelet, processes.

    Each row is ok, warn, fail or unknown, with why and what to do. It changes nothing, and works while processes are
    down. Directories are those of the config: give --config where it has others. Exit code 1 when a row fails, 3 when
    no process of gpufrac answers.
    """
    from deviceplugin.doctor.checks import rows_of
    from deviceplugin.doctor.look import gather
    from deviceplugin.doctor.model import State, exit_code
    from mpsd.config.load import load_config

    root = run_root_of(config_path, run_root)
    config = load_config(config_path) if config_path else NodeConfig(resources=())
    config = msgspec.structs.replace(config, mps=msgspec.structs.replace(config.mps, run_root=root))
    node = look(root)
    if node.mpsd is not None and node.mpsd.backend == "simulated":
        config = msgspec.structs.replace(config, backend="simulated")
    errors = node.mpsd_error, node.plugin_error
    facts = gather(config, node.mpsd, node.plugin, errors, needs_attention(node), assumed=config_path is None)
    rows = rows_of(facts)
    code = exit_code(rows, down=node.mpsd is None and node.plugin is None)
    if output == "json":
        print_json({"exitCode": code, "rows": rows})
        sys.exit(code)
    print_table(
        ("CHECK", "STATE", "FOUND"), [(one.check, one.state, shortened(one.found, 60)) for one in rows], "no checks"
    )
    for one in rows:
        if one.reason is not None:
            say()
            say(f"{one.state}: {one.check}: {one.reason.message}")
            say(f"  what to do: {one.remedy}")
    counts = [(state, sum(1 for one in rows if one.state == state)) for state in State]
    say()
    say(", ".join(f"{count} {state}" for state, count in counts if count))
    sys.exit(code)
