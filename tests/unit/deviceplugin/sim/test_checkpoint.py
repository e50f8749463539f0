"""The stub kubelet's checkpoint: it reads what it wrote, the plugin's reader does too, and damage is noticed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.kubelet import checkpoint as plugin_checkpoint
from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.kubelet.devicemanager import Held, Slot

KEY = "0123456789abcdef0123"
ANSWER = pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=f"gpufrac.dev/allocation=s{KEY}")])

slots = st.builds(Slot, st.uuids().map(str), st.sampled_from(["a", "b"]), st.just("example.com/x"))
holds = st.builds(Held, st.dictionaries(st.integers(-1, 3), st.lists(st.text(max_size=8)).map(tuple)), st.binary())


@given(st.dictionaries(slots, holds, max_size=4), st.lists(st.sampled_from(["r/a", "r/b"]), unique=True))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, held: dict[Slot, Held], names: list[str]
) -> None:
    directory = str(tmp_path_factory.mktemp("c"))
    checkpoint.write(directory, held, {name: ["x"] for name in names})
    assert checkpoint.read(directory) == (held, names)


def test_the_plugin_reads_it(tmp_path: Path) -> None:
    held = {Slot("uid", "main", "example.com/x"): Held({0: ("b",), 1: ("a",)}, ANSWER.SerializeToString())}
    checkpoint.write(str(tmp_path), held, {"example.com/x": ["a", "b", "c"]})
    (entry,) = plugin_checkpoint.read(str(tmp_path))
    assert entry == plugin_checkpoint.Entry("uid", "main", "example.com/x", ("a", "b"), KEY)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"Data":{"PodDeviceEntries":null},"Checksum":1}', b"\xff"])
def test_a_missing_or_damaged_file_holds_nothing(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / checkpoint.FILE_NAME).write_bytes(content)
    assert checkpoint.read(str(tmp_path)) == ({}, [])


def test_a_changed_file_is_not_believed(tmp_path: Path) -> None:
    checkpoint.write(str(tmp_path), {Slot("uid", "main", "r/x"): Held({-1: ("a",)}, b"")}, {})
    path = tmp_path / checkpoint.FILE_NAME
    path.write_bytes(path.read_bytes().replace(b"uid", b"foo"))
    assert checkpoint.read(str(tmp_path)) == ({}, [])
