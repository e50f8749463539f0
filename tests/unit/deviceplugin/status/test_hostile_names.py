"""Names from outside are printed so that they can't turn a line around, clear a screen or make a line of their own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from deviceplugin.cli.main import cli
from deviceplugin.cli.output import complain
from deviceplugin.reconcile.markers import VerdictCode
from deviceplugin.status import metrics
from deviceplugin.status.clients import clients
from mpsd.common.reason import Reason
from mpsd.localapi.methods import reading
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import GpuClient, GpuClients
from tests.builders import reported, snapshot, uuid
from tests.world import World

NAME = "evil\u202egnp\x1b[2J\u2028x"
CLI = Path(__file__).parents[4] / "deviceplugin" / "cli"


@pytest.fixture
def root(short_tmp: Path) -> Iterator[str]:
    world = World(short_tmp)
    got = world.grant()
    world.kubelet.containers["ns", NAME, NAME] = {got.resource: got.device_ids}
    world.holds((got, "uid-1"))
    world.keeper.observe()
    world.unenforced = {got.key: Reason(VerdictCode.NO_MARKER, NAME)}
    gpus = reported(world.broker.node.config, world.infos, world.broker.desired())
    client = GpuClient(pid=7, allocation_key=got.key, used_bytes=2**40, pod_uid="uid-1", command=NAME)
    daemon = structs.replace(gpus[1].daemon, wedged=True, reason=NAME, last_log=(NAME,))  # type: ignore[type-var]
    gpus = [
        structs.replace(gpus[0], clients=(client,)),
        structs.replace(gpus[1], daemon=daemon, reason=NAME, info=structs.replace(gpus[1].info, name=NAME)),
    ]
    world.broker.observe_snapshot(snapshot(*gpus))
    plugin = LocalServer(
        f"{short_tmp}/plugin.sock",
        reading(
            {
                "status": lambda _: world.picture(),
                "clients": lambda _: clients(world.broker.node.gpus, world.picture().allocations),
            }
        ),
    )
    looked_up = {uuid(0): GpuClients(clients=(client,))}
    mpsd = LocalServer(
        f"{short_tmp}/mpsd.sock", reading({"snapshot": lambda _: snapshot(*gpus), "clients": lambda _: looked_up})
    )
    plugin.start()
    mpsd.start()
    yield str(short_tmp)
    plugin.close()
    mpsd.close()
    assert metrics.render(world.picture()).replace("\n", "").isprintable()
    world.ledger.close()


@pytest.mark.parametrize("command", ["status", "allocations", "clients", "gpus", "gpus 0", "daemons", "resources"])
@pytest.mark.parametrize("output", ["table", "json"])
def test_hostile_names_are_escaped_wherever_they_are_printed(root: str, command: str, output: str) -> None:
    got = CliRunner().invoke(cli, [*command.split(), "--run-root", root, "-o", output])
    assert got.exit_code == 0, got.output
    assert got.output.replace("\n", "").isprintable()
    if output == "json":
        json.loads(got.stdout)
    if command in ("status", "allocations", "clients"):
        assert "evil\\u202egnp" in got.stdout


def test_errors_are_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"cannot find {NAME}\nand more")
    assert capsys.readouterr().err == "gpufrac: cannot find evil\\u202egnp\\u001b[2J\\u2028x\ngpufrac: and more\n"


def test_commands_print_by_one_door() -> None:
    for path in CLI.glob("*.py"):
        if path.name not in ("output.py", "completion.py"):  # a script of click's own
            assert not re.search(r"click\.s?echo|\bprint\(", path.read_text()), path
