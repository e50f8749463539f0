"""`gpufrac sim`: what is wrong with its options is said before anything is started."""

import pytest
from click.testing import CliRunner

from deviceplugin.cli.main import cli

POD = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c, image: x}]}}"


@pytest.mark.parametrize("command", [("run", "-"), ("up", "-d", "/nonexistent/n")])
def test_a_runtime_without_nri_has_no_name_there(command: tuple[str, ...]) -> None:
    got = CliRunner().invoke(cli, ["sim", *command, "--no-nri", "--nri-runtime", "containerd:2.1.9"], input=POD)
    assert got.exit_code == 2, got.output
    assert "cannot use --nri-runtime with --no-nri" in got.stderr
