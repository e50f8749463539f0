"""The kubelet's checkpoint, in the forms kubelets wrote it."""

import base64
import json

import pytest

from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.kubelet.checkpoint import CheckpointError, Entry, parse

KEY = "0123456789abcdef0123"


def entry(**changes: object) -> dict[str, object]:
    answer = pb.ContainerAllocateResponse(
        cdi_devices=[pb.CDIDevice(name="nvidia.com/gpu=GPU-1"), pb.CDIDevice(name=f"gpufrac.dev/allocation=s{KEY}")]
    )
    return {
        "PodUID": "uid",
        "ContainerName": "c",
        "ResourceName": "gpufrac.dev/a",
        "DeviceIDs": {"-1": ["GPU-1::1"], "0": ["GPU-1::0"]},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    } | changes


def file(*entries: object) -> bytes:
    return json.dumps(
        {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {"x": ["y"]}}, "Checksum": 1}
    ).encode()


def test_ids_of_all_numa_nodes_and_our_key_are_read() -> None:
    assert parse(file(entry())) == [Entry("uid", "c", "gpufrac.dev/a", ("GPU-1::0", "GPU-1::1"), KEY)]


@pytest.mark.parametrize(
    "answer",
    [
        pb.ContainerAllocateResponse(annotations={"gpufrac.dev/allocation": KEY}),
        pb.ContainerAllocateResponse(envs={"GPUFRAC_ALLOCATION": KEY}),
    ],
)
def test_an_old_kubelet_that_dropped_the_cdi_names_still_shows_our_key(answer: pb.ContainerAllocateResponse) -> None:
    (got,) = parse(file(entry(AllocResp=base64.b64encode(answer.SerializeToString()).decode())))
    assert got.allocation_key == KEY


def test_a_key_that_could_be_a_path_is_none_of_ours() -> None:
    answer = pb.ContainerAllocateResponse(envs={"GPUFRAC_ALLOCATION": "../../../../etc/pass"})
    (got,) = parse(file(entry(AllocResp=base64.b64encode(answer.SerializeToString()).decode())))
    assert got.allocation_key is None


def test_the_old_flat_form_is_read() -> None:
    (got,) = parse(file(entry(DeviceIDs=["b", "a"])))
    assert got.device_ids == ("a", "b")


@pytest.mark.parametrize("answer", [None, "", "!!!", "AAAA", base64.b64encode(b"\xff" * 40).decode()])
def test_an_answer_that_is_not_ours_has_no_key(answer: str | None) -> None:
    (got,) = parse(file(entry(AllocResp=answer)))
    assert got.allocation_key is None


@pytest.mark.parametrize("data", [b'{"Data":{"PodDeviceEntries":null},"Checksum":0}', b'{"Data":{}}'])
def test_an_empty_checkpoint_has_no_entries(data: bytes) -> None:
    assert parse(data) == []


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"Data":3}', b'{"Data":{"PodDeviceEntries":[{}]}}', b"\xff\xfe"]
)
def test_nonsense_is_an_error_not_an_empty_checkpoint(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        parse(data)
