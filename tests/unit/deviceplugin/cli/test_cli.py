"""The command line without a node: help, exit codes, and what status calls worth attention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deviceplugin.cli.main import COMMANDS, cli
from deviceplugin.cli.node import Node
from deviceplugin.cli.overview import overview
from deviceplugin.status.reasons import ProcessCode
from mpsd.common.reason import Reason
from mpsd.gpu.model import GpuHealth
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, GpuClient
from tests.builders import info, snapshot, status, told
from tests.world import World

ROOT = Path(__file__).resolve().parents[4]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    got = run(name, "--help")
    assert got.exit_code == 0
    assert "Usage:" in got.output
    if name not in ("config", "sim"):
        assert "Example:" in got.output


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "gpus",
        "resources",
        "allocations",
        "daemons",
        "clients",
        "drain 0",
        "undrain --all",
        "terminate a --yes",
        "selftest",
    ],
)
@pytest.mark.parametrize("output", ["table", "json"])
def test_what_needs_a_process_says_which_is_down(command: str, output: str, short_tmp: Path) -> None:
    got = run(*command.split(), "--run-root", str(short_tmp), "-o", output)
    assert got.exit_code == 3
    assert f"{short_tmp}/" in got.stderr
    assert all(line.startswith("gpufrac: cannot reach") for line in got.stderr.splitlines())
    assert "Traceback" not in got.output
    if output == "json":
        assert f"{short_tmp}/" in json.loads(got.stdout)["error"]
    else:
        assert got.stdout == ""


def test_json_of_a_config_error_is_an_error_object() -> None:
    got = run("config", "show", "/nonexistent/config.yaml", "-o", "json")
    assert got.exit_code == 2
    assert "/nonexistent" in json.loads(got.stdout)["error"]


def test_a_size_that_is_none_is_an_error_of_the_command_not_of_the_simulated_client(short_tmp: Path) -> None:
    for size in ("foo", "0", "-1Gi", "9gb"):
        got = run("sim", "client", "-d", str(short_tmp), "a/main", "--allocate", size)
        assert got.exit_code == 2, size
        assert "'--allocate'" in got.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "-o", "yaml"),
        ("nonsense",),
        ("status", "extra"),
        ("plugin",),
        ("mpsd", "--log-format", "text"),
        ("config", "check"),
        ("completion", "csh"),
        ("config", "check", "/nonexistent/config.yaml"),
        ("plugin", "--config", "/nonexistent/config.yaml"),
        ("mpsd", "--config", "/"),
        ("status", "--config", "/nonexistent/config.yaml"),
    ],
)
def test_usage_and_config_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    got = subprocess.run(
        [sys.executable, "-m", "deviceplugin.cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert got.returncode == 2, got.stderr
    assert got.stderr
    assert "Traceback" not in got.stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [("statsu", "status"), ("check", "config check"), ("run", "sim run"), ("replace", "mpsd replace"), ("xyz", "")],
)
def test_a_command_that_is_not_there_is_told_with_the_one_that_was_meant(name: str, meant: str) -> None:
    got = run(name)
    assert got.exit_code == 2
    assert f"No such command '{name}'." in got.stderr
    assert (f"Did you mean `gpufrac {meant}`?" in got.stderr) == bool(meant)


@pytest.mark.parametrize("group", ["config", "sim", "mpsd"])
def test_the_overview_of_a_group_ends_no_line_in_the_middle(group: str) -> None:
    assert "..." not in run(group, "--help").output.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sim", "run", "--gpus", "two", "x"), "'two' is not a valid whole number"),
        (("sim", "run", "--gpu-memory", "80", "x"), "(a number without a suffix counts bytes)"),
        (("sim", "client", "-d", "/x", "a/b", "--device", "-1"), "GPUs are counted from 0"),
    ],
)
def test_options_of_the_simulated_node_say_what_they_take(arguments: tuple[str, ...], words: str) -> None:
    got = run(*arguments)
    assert got.exit_code == 2
    assert words in " ".join(got.stderr.split())


def test_manifests_without_a_pod_are_a_wrong_argument(short_tmp: Path) -> None:
    for name, text in (("config.yaml", (ROOT / "examples" / "config.yaml").read_text()), ("empty.yaml", "")):
        (short_tmp / name).write_text(text)
        for command in (["sim", "run"], ["sim", "admit", "-d", str(short_tmp)]):
            got = run(*command, str(short_tmp / name))
            assert got.exit_code == 2, got.output
            assert got.stderr.startswith("gpufrac: cannot ")


def test_running_mpsd_loads_nothing_of_the_plugin() -> None:
    code = (
        "import sys\n"
        "import deviceplugin.cli.processes\n"
        "heavy = {'grpc', 'deviceplugin.status.status', 'deviceplugin.grants.broker'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    got = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr


@pytest.mark.parametrize("command", ["clients", "drain", "gpus", "node", "selftest", "terminate"])
def test_who_only_asks_the_plugin_imports_neither_grpc_nor_what_runs_in_it(command: str) -> None:
    code = (
        "import sys\n"
        f"import deviceplugin.cli.{command}\n"
        "heavy = {'grpc', 'google.protobuf', 'asyncio', 'deviceplugin.reconcile.keeper'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    got = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr


def test_help_imports_neither_grpc_nor_yaml_nor_commands() -> None:
    code = (
        "import sys\n"
        "from deviceplugin.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "heavy = {'grpc', 'yaml', 'watchdog', 'msgspec', 'deviceplugin.cli.node'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    got = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr


@pytest.fixture
def node(short_tmp: Path) -> Node:
    world = World(short_tmp)
    world.run(world.grant())
    world.keeper.observe()
    world.broker.publish()
    plugin = world.picture()
    world.ledger.close()
    sick = status(
        info(0),
        health=GpuHealth.SICK,
        reason="XID 48",
        daemon=DaemonStatus(state=DaemonState.BACKOFF, reason="it exited"),
        clients=(GpuClient(pid=9),),
    )
    return Node(snapshot(sick, status(info(1))), None, plugin, None)


def away(name: str) -> Reason:
    return Reason(ProcessCode.NOT_REACHABLE, f"cannot reach `gpufrac {name}`")


def test_status_names_all_that_needs_attention(node: Node) -> None:
    text = "\n".join(told(node.mpsd, node.plugin))
    for part in ("is sick: XID 48", "MPS daemon is backoff: it exited", "pid 9", "is not registered"):
        assert part in text


def test_status_of_half_a_node_says_what_is_down(node: Node) -> None:
    half = Node(None, away("mpsd"), node.plugin, None)
    assert ("mpsd", "DOWN") in overview(half)
    assert told(half.mpsd, half.plugin, [half.mpsd_error])[0] == "cannot reach `gpufrac mpsd`"
    other = Node(node.mpsd, None, None, away("plugin"))
    assert ("plugin", "DOWN") in overview(other)


def test_an_answer_of_another_version_names_the_process_and_hides_nothing_else(short_tmp: Path) -> None:
    from mpsd.localapi.methods import reading
    from mpsd.localapi.server import LocalServer

    server = LocalServer(str(short_tmp / "mpsd.sock"), reading({"snapshot": lambda _: {"strange": True}}))
    server.start()
    try:
        got = run("status", "--run-root", str(short_tmp))
    finally:
        server.close()
    assert got.exit_code == 3
    assert "gpufrac mpsd" in got.output
    assert "version" in got.output


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("config*.yaml")))
def test_the_examples_are_valid(example: str) -> None:
    got = run("config", "check", str(ROOT / "examples" / example))
    assert (got.exit_code, got.stderr) == (0, "")


def test_what_a_valid_config_will_not_do_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    annotations = "annotations: {gpus: {include: all}, share: true, whenAway: stop}"
    file.write_text(f"apiVersion: gpufrac.dev/v1\nkind: NodeConfig\n{annotations}\n")
    got = run("config", "check", str(file))
    assert got.exit_code == 0
    assert "note: `annotations.whenAway: stop` will stop nothing" in got.output


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        got = subprocess.run(
            [sys.executable, "-m", "deviceplugin.cli.main", "config", "check", "examples/config.yaml"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert got.returncode == 1
    assert "Traceback" not in got.stderr
