"""`gpufrac config init|import`: what is written can be checked and tried, and nothing is overwritten."""

import errno
from pathlib import Path
from typing import IO

import pytest

from deviceplugin.cli import config
from mpsd.config.load import load_config, parse_config
from mpsd.gpu.backend import GpuError
from mpsd.gpu.nvml import NvmlBackend
from tests.cli import gpufrac


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise GpuError("cannot initialise NVML: there is none")

    monkeypatch.setattr(NvmlBackend, "open", fail)


def test_on_a_node_without_a_gpu_it_is_a_config_that_fits_any_and_says_so(no_gpu: None) -> None:
    done = gpufrac("config", "init")
    assert done.returncode == 0
    assert parse_config(done.stdout, "stdout").resources
    assert "cannot initialise NVML: there is none" in done.stdout
    assert done.stderr.splitlines() == [
        "gpufrac: cannot initialise NVML: there is none",
        "gpufrac: no GPU that can be shared is seen here: the config is one that fits any",
    ]


def test_what_is_written_passes_the_check_and_is_never_overwritten(short_tmp: Path) -> None:
    file = short_tmp / "config.yaml"
    node = ("--gpus", "2", "--gpu-memory", "24Gi", "--driver", "615.71.09")
    done = gpufrac("config", "init", *node, "--output", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert str(file) in done.stderr
    assert gpufrac("config", "check", str(file)).returncode == 0
    assert len(load_config(str(file)).resources) == 4
    file.write_text("mine")
    again = gpufrac("config", "init", *node, "--output", str(file))
    assert again.returncode == 1
    assert again.stderr == f"gpufrac: cannot write {file}: it is there already: name another file, or add --force\n"
    assert file.read_text() == "mine"
    assert gpufrac("config", "init", *node, "--output", str(file), "--force").returncode == 0
    assert load_config(str(file)).resources


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(short_tmp: Path) -> None:
    (short_tmp / "real.yaml").write_text("old")
    (short_tmp / "link.yaml").symlink_to("real.yaml")
    done = gpufrac("config", "init", "--gpus", "1", "--force", "--output", str(short_tmp / "link.yaml"))
    assert done.returncode == 0
    assert (short_tmp / "link.yaml").is_symlink()
    assert load_config(str(short_tmp / "real.yaml")).resources


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("place", ["nowhere/config.yaml", "."])
def test_what_can_not_be_written_is_said(short_tmp: Path, place: str, force: tuple[str, ...]) -> None:
    done = gpufrac("config", "init", "--gpus", "1", "--output", str(short_tmp / place), *force)
    assert done.returncode == 1
    assert done.stderr.startswith(f"gpufrac: cannot write {short_tmp / place}: ")
    assert list(short_tmp.iterdir()) == []


def test_a_full_disk_leaves_no_half_of_a_file(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_on_a_full_disk(file: str, mode: str, encoding: str) -> IO[str]:
        made = open(file, mode, encoding=encoding)  # noqa: SIM115 - as the real one is

        def flush() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(made, "flush", flush, raising=False)
        return made

    monkeypatch.setattr(config, "open", open_on_a_full_disk, raising=False)
    done = gpufrac("config", "init", "--gpus", "1", "--output", str(short_tmp / "config.yaml"))
    assert done.returncode == 1
    assert done.stderr.endswith("config.yaml: No space left on device\n")
    assert list(short_tmp.iterdir()) == []


NVIDIAS = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\nother: 1\n"


def test_a_config_of_nvidia_s_plugin_is_imported_and_what_changes_is_said_twice(short_tmp: Path) -> None:
    file, target = short_tmp / "nvidia.yaml", short_tmp / "config.yaml"
    file.write_text(NVIDIAS)
    done = gpufrac("config", "import", "nvidia", str(file), "--output", str(target))
    assert (done.returncode, done.stdout) == (0, "")
    assert load_config(str(target)).resources[0].name == "gpufrac.dev/gpu"
    assert "gpufrac: differs: pods ask for `gpufrac.dev/gpu` instead of `nvidia.com/gpu`" in done.stderr
    assert "gpufrac: not carried over: `other`: the format has no such key" in done.stderr
    assert "#  - `other`: the format has no such key" in target.read_text()
    assert gpufrac("config", "import", "nvidia", str(file), "--output", str(target)).returncode == 1
    printed = gpufrac("config", "import", "nvidia", "-", text=NVIDIAS).stdout
    assert parse_config(printed, "stdout") == load_config(str(target))


def test_what_can_not_be_imported_is_a_config_error_and_nothing_is_written(short_tmp: Path) -> None:
    target = short_tmp / "config.yaml"
    for text in ("version: v1\n", "{", "sharing: {mps: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}"):
        done = gpufrac("config", "import", "nvidia", "-", "--output", str(target), text=text)
        assert (done.returncode, done.stdout) == (2, "")
        assert "standard input" in done.stderr
    assert gpufrac("config", "import", "nvidia", str(short_tmp / "none.yaml")).returncode == 2
    assert list(short_tmp.iterdir()) == []


def test_a_config_of_nvidia_s_plugin_in_place_of_ours_is_told_what_makes_one_of_it(short_tmp: Path) -> None:
    (short_tmp / "nvidia.yaml").write_text(NVIDIAS)
    done = gpufrac("config", "check", str(short_tmp / "nvidia.yaml"))
    assert done.returncode == 2
    assert "`gpufrac config import nvidia` makes one of it" in done.stderr
