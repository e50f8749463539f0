"""The front end against small shell scripts in the binary's place."""

import os
from pathlib import Path

import pytest

from mpsd.common.errors import ProtocolError, TransientError
from mpsd.config.model import MpsConfig
from mpsd.daemon.control import CommandFailedError, FrontEnd
from mpsd.daemon.paths import DaemonDirs, daemon_dirs


@pytest.fixture
def dirs(short_tmp: Path) -> DaemonDirs:
    dirs = daemon_dirs(MpsConfig(run_root=f"{short_tmp}/run", log_root=f"{short_tmp}/log"), "GPU-1")
    os.makedirs(dirs.pipe)
    return dirs


def front_end(short_tmp: Path, script: str) -> FrontEnd:
    path = short_tmp / "control"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return FrontEnd(MpsConfig(binary=str(path)))


def test_protocol_2_is_spoken_over_stdin(short_tmp: Path, dirs: DaemonDirs) -> None:
    said = 'read command; echo "$#: $command, protocol $CUDA_MPS_PROTOCOL_VERSION in $CUDA_MPS_PIPE_DIRECTORY"'
    reply = front_end(short_tmp, said).ask(dirs, "get_server_list", 5.0)
    assert reply == f"0: get_server_list, protocol 2 in {dirs.pipe}\n"


def test_protocol_3_is_spoken_in_arguments(short_tmp: Path, dirs: DaemonDirs) -> None:
    said = 'cat; echo "$*, protocol $CUDA_MPS_PROTOCOL_VERSION in $CUDA_MPS_PIPE_DIRECTORY"'
    reply = front_end(short_tmp, said).call(dirs, ("server", "list"), 5.0)
    assert reply == f"server list, protocol 3 in {dirs.pipe}\n"


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_failure_comes_with_what_was_said_on_either_stream(short_tmp: Path, dirs: DaemonDirs, stream: str) -> None:
    control = front_end(short_tmp, f"echo no such thing >&{stream}; exit 1")
    with pytest.raises(CommandFailedError, match=r"cannot talk to the MPS .*: no such thing \(exit 1\)"):
        control.ask(dirs, "get_server_list", 5.0)
    with pytest.raises(CommandFailedError, match=r"do 'server list': no such thing \(exit 1\)") as failed:
        control.call(dirs, ("server", "list"), 5.0)
    assert failed.value.said == "no such thing"


def test_late_is_no_refusal(short_tmp: Path, dirs: DaemonDirs) -> None:
    control = front_end(short_tmp, "sleep 1000")
    with pytest.raises(TransientError, match=r"answer to 'client terminate 7' within 0\.2 s") as late:
        control.call(dirs, ("client", "terminate", "7"), 0.2)
    assert not isinstance(late.value, CommandFailedError)


def test_a_reply_is_bounded(short_tmp: Path, dirs: DaemonDirs) -> None:
    with pytest.raises(ProtocolError, match="cannot take a reply of more than"):
        front_end(short_tmp, "exec cat /dev/zero").call(dirs, ("server", "list"), 20.0)
