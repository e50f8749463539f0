from pathlib import Path

import msgspec
import pytest

from mpsd.common.errors import TransientError
from mpsd.daemon.adopt import DaemonIdentity
from mpsd.daemon.state import Saved, StateFile
from mpsd.gpu.model import ComputeMode
from tests.desired import bind

IDENTITY = DaemonIdentity(boot_id="boot", pid=1, start_time=2, process_group=1, pipe_directory="/p")
DESIRED = bind("GPU-1")


def test_what_is_recorded_survives(short_tmp: Path) -> None:
    path = f"{short_tmp}/state/mpsd.json"
    state = StateFile(path, "boot")
    state.record_daemon("GPU-1", IDENTITY)
    state.record_compute_mode("GPU-1", ComputeMode.DEFAULT)
    state.record_desired(DESIRED)
    again = StateFile(path, "boot")
    assert again.saved == Saved(
        boot_id="boot", daemons={"GPU-1": IDENTITY}, compute_modes={"GPU-1": ComputeMode.DEFAULT}, desired=DESIRED
    )
    assert Path(path).stat().st_mode & 0o777 == 0o600
    again.record_daemon("GPU-1", None)
    again.record_compute_mode("GPU-1", None)
    assert StateFile(path, "boot").saved == Saved(boot_id="boot", desired=DESIRED)


def test_after_a_reboot_only_what_is_wanted_counts(short_tmp: Path) -> None:
    path = f"{short_tmp}/mpsd.json"
    state = StateFile(path, "boot")
    state.record_daemon("GPU-1", IDENTITY)
    state.record_compute_mode("GPU-1", ComputeMode.DEFAULT)
    state.record_desired(DESIRED)
    assert StateFile(path, "next boot").saved == Saved(boot_id="next boot", desired=DESIRED)


def recorded(**values: object) -> bytes:
    good = Saved(boot_id="boot", daemons={"GPU-1": IDENTITY}, desired=DESIRED)
    return msgspec.json.encode(msgspec.to_builtins(good) | values)


def daemon(**values: object) -> bytes:
    return recorded(daemons={"GPU-1": msgspec.to_builtins(IDENTITY) | values})


def wanted(**values: object) -> bytes:
    return recorded(desired={"allocations": [msgspec.to_builtins(DESIRED.allocations[0]) | values]})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"boot_id": 1}',
        b"\xff",
        recorded(version=2),
        recorded(compute_modes={"GPU-1": "UNKNOWN"}),
        recorded(daemons={"../x": msgspec.to_builtins(IDENTITY)}),
        daemon(pid=-1),
        daemon(process_group=-5),
        daemon(protocol=7),
        daemon(pipe_directory="relative"),
        wanted(limit_bytes=-1),
        wanted(limit_bytes=0),
        wanted(group="../../x"),
        wanted(gpus=["a/b"]),
        wanted(thread_percent=0),
        recorded().replace(b"x/y", b"x/\xff"),
    ],
)
def test_an_unreadable_file_is_started_over(short_tmp: Path, content: bytes) -> None:
    path = short_tmp / "mpsd.json"
    path.write_bytes(content)
    state = StateFile(str(path), "boot")
    assert state.saved == Saved(boot_id="boot")
    assert (short_tmp / "mpsd.json.unreadable").read_bytes() == content
    state.record_daemon("GPU-1", IDENTITY)
    assert StateFile(str(path), "boot").saved.daemons == {"GPU-1": IDENTITY}


def test_what_cannot_be_written_is_an_error_and_not_remembered(short_tmp: Path) -> None:
    (short_tmp / "file").write_text("")
    state = StateFile(f"{short_tmp}/file/mpsd.json", "boot")
    with pytest.raises(TransientError, match="cannot write"):
        state.record_daemon("GPU-1", IDENTITY)
    assert state.saved.daemons == {}
    assert "File exists" in str(state.problem)
    (short_tmp / "file").unlink()
    state.record_daemon("GPU-1", IDENTITY)
    assert state.problem is None


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_what_is_lost_of_the_first_file_is_in_the_second_for_this_boot(short_tmp: Path, loss: str) -> None:
    path, copy = short_tmp / "state" / "mpsd.json", f"{short_tmp}/run/mpsd.json"
    state = StateFile(str(path), "boot", copy)
    assert state.begins_anew
    state.record_compute_mode("GPU-1", ComputeMode.DEFAULT)
    path.unlink() if loss == "removed" else path.write_text("{")
    again = StateFile(str(path), "boot", copy)
    assert (again.begins_anew, again.saved.compute_modes) == (False, {"GPU-1": ComputeMode.DEFAULT})
    again.record_desired(DESIRED)
    assert StateFile(str(path), "boot").saved == again.saved
    path.unlink()
    assert StateFile(str(path), "next boot", copy).saved.compute_modes == {}
