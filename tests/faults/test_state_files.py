"""Whatever lies where a file of state should: the start goes on at once and says what it can't use."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deviceplugin.grants import lastknown
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.ledger import Ledger
from deviceplugin.kubelet import checkpoint
from deviceplugin.selftest import record
from mpsd.common.errors import GpufracError
from mpsd.daemon.state import StateFile
from tests.desired import bind

MIB = 1 << 20
KEY = "0" * 20


def read_ledger(path: Path) -> str:
    ledger = Ledger(str(path.parent))
    found, problems = ledger.load()
    ledger.close()
    assert found == []
    return "; ".join(problems)


def read_drains(path: Path) -> str:
    return Drains(str(path)).problem


def read_last_known(path: Path) -> str:
    assert lastknown.load(str(path), "boot").gpus == ()
    return ""


def read_state(path: Path) -> str:
    assert StateFile(str(path), "boot").saved.daemons == {}
    return ""


def read_selftest(path: Path) -> str:
    with pytest.raises(GpufracError) as raised:
        record.load(str(path.parent))
    return str(raised.value)


def read_checkpoint(path: Path) -> str:
    with pytest.raises(checkpoint.CheckpointError) as raised:
        checkpoint.read(str(path.parent))
    return str(raised.value)


READERS: list[tuple[str, Callable[[Path], str]]] = [
    (f"{KEY}.json", read_ledger),
    ("drains.json", read_drains),
    ("node.json", read_last_known),
    ("mpsd.json", read_state),
    ("selftest.json", read_selftest),
    (checkpoint.FILE_NAME, read_checkpoint),
]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(8 << 30)


def nested(path: Path) -> None:
    path.write_bytes(b"[" * MIB)


def directory(path: Path) -> None:
    path.mkdir()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A reader without bounds fails instead of taking the machine along."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + 512 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", [fifo, endless, huge, nested, directory])
@pytest.mark.parametrize(("name", "read"), READERS)
def test_what_is_no_small_regular_file_neither_hangs_nor_fills_memory(
    short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    read: Callable[[Path], str],
    what: Callable[[Path], None],
) -> None:
    what(short_tmp / name)
    said = read(short_tmp / name) or " ".join(str(getattr(r, "gpufrac_fields", "")) for r in caplog.records)
    assert str(short_tmp) in said or read is read_checkpoint
    assert "None" not in said
    if read not in (read_selftest, read_checkpoint):
        assert not os.path.lexists(short_tmp / name)
        assert os.path.lexists(short_tmp / f"{name}.unreadable")


def test_what_was_set_aside_before_is_neither_lost_nor_in_the_way(short_tmp: Path) -> None:
    """A directory takes no file's place, nor one that has entries: mpsd could never write its state again."""
    path = short_tmp / "mpsd.json"
    kept = []
    for n, put in enumerate([fifo, directory, directory, endless]):
        put(path)
        if put is directory:
            (path / str(n)).touch()
        read_state(path)
        assert not os.path.lexists(path)
        kept.append({entry.name for entry in short_tmp.iterdir()})
    assert [len(names) for names in kept] == [1, 2, 3, 4]
    StateFile(str(path), "boot").record_desired(bind("GPU-0"))
    assert path.is_file()
