"""Messages and values."""

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.api import nri_v1alpha1_pb2 as pb
from deviceplugin.nri import codec
from deviceplugin.nri.model import Adjustment, Container, ContainerState, Mount, Pod
from mpsd.common.errors import ProtocolError

M = TypeVar("M", pb.PodSandbox, pb.Container, pb.ContainerAdjustment)
text = st.text(max_size=8)
maps = st.dictionaries(text, text, max_size=3)
texts = st.lists(text, max_size=3).map(tuple)
mounts = st.builds(Mount, text, text, text, texts)
pods = st.builds(
    Pod,
    id=text,
    name=text,
    uid=text,
    namespace=text,
    labels=maps,
    annotations=maps,
    cgroup_parent=text,
    pid=st.integers(0, 2**32 - 1),
)
containers = st.builds(
    Container,
    id=text,
    pod_id=text,
    name=text,
    state=st.sampled_from(ContainerState),
    labels=maps,
    annotations=maps,
    args=texts,
    env=texts,
    mounts=st.lists(mounts, max_size=2).map(tuple),
    cgroups_path=text,
    pid=st.integers(0, 2**32 - 1),
    cdi_devices=texts,
)
names = text.filter(lambda name: not name.startswith("-"))
adjustments = st.builds(
    Adjustment,
    removed_env=st.lists(names, max_size=2).map(tuple),
    env=st.lists(st.tuples(names, text), max_size=2).map(tuple),
    removed_mounts=st.lists(names, max_size=2).map(tuple),
    mounts=st.lists(st.builds(Mount, names, text, text, texts), max_size=2).map(tuple),
    cdi_devices=texts,
    annotations=maps.map(lambda d: tuple(d.items())),
)


@settings(deadline=None)
@given(pods, containers, adjustments)
def test_what_is_encoded_comes_back(pod: Pod, container: Container, adjustment: Adjustment) -> None:
    assert codec.pod_of(over_the_wire(codec.pod_message(pod))) == pod
    assert codec.container_of(over_the_wire(codec.container_message(container))) == container
    back = codec.adjustment_of(over_the_wire(codec.adjustment_message(adjustment)))
    assert back == adjustment or sorted(back.annotations) == sorted(adjustment.annotations)


def over_the_wire(message: M) -> M:
    return codec.parse(type(message), message.SerializeToString())


def field(number: int, payload: bytes) -> bytes:
    """A field of bytes, as protobuf spells it: for numbers below 16 and at most 127 bytes."""
    return bytes((number << 3 | 2, len(payload))) + payload


def test_a_pod_and_a_container_are_read_as_the_reference_has_them() -> None:
    pod = (
        field(1, b"id")
        + field(2, b"name")
        + field(3, b"uid")
        + field(4, b"ns")
        + field(5, field(1, b"k") + field(2, b"l"))
        + field(6, field(1, b"k") + field(2, b"a"))
        + field(7, b"nvidia")
        + field(8, field(3, b"/kubepods") + field(4, b"/not/read"))
        + b"\x48\x2a"  # 9: pid
        + field(10, b"10.0.0.1")
    )
    assert codec.pod_of(codec.parse(pb.PodSandbox, pod)) == Pod(
        id="id",
        name="name",
        uid="uid",
        namespace="ns",
        labels={"k": "l"},
        annotations={"k": "a"},
        cgroup_parent="/kubepods",
        pid=42,
        runtime_handler="nvidia",
    )
    container = (
        field(1, b"id")
        + field(2, b"pod")
        + field(3, b"main")
        + b"\x20\x03"  # 4: state
        + field(5, field(1, b"k") + field(2, b"l"))
        + field(6, field(1, b"k") + field(2, b"a"))
        + field(7, b"run")
        + field(8, b"A=1")
        + field(8, b"A=2")
        + field(9, field(1, b"/in") + field(2, b"bind") + field(3, b"/out") + field(4, b"ro"))
        + field(11, field(1, field(1, b"user")) + field(2, field(1, b"/dev/x")) + field(5, b"a:b:c"))
        + b"\x60\x07"  # 12: pid
        + b"\xa2\x01\x05"
        + field(1, b"a=b")  # 20: CDI device
    )
    assert codec.container_of(codec.parse(pb.Container, container)) == Container(
        id="id",
        pod_id="pod",
        name="main",
        state=ContainerState.RUNNING,
        labels={"k": "l"},
        annotations={"k": "a"},
        args=("run",),
        env=("A=1", "A=2"),
        mounts=(Mount("/in", "/out", "bind", ("ro",)),),
        cgroups_path="a:b:c",
        pid=7,
        cdi_devices=("a=b",),
        user_namespace=True,
    )


def test_an_adjustment_is_spelled_as_the_reference_has_it() -> None:
    adjustment = Adjustment(
        removed_env=("A",),
        env=(("A", "1"),),
        removed_mounts=("/in",),
        mounts=(Mount("/in", "/out", "bind", ("ro",)),),
        cdi_devices=("a=b",),
        annotations=(("k", "v"),),
    )
    assert codec.adjustment_message(adjustment).SerializeToString() == (
        field(2, field(1, b"k") + field(2, b"v"))
        + field(3, field(1, b"-/in"))
        + field(3, field(1, b"/in") + field(2, b"bind") + field(3, b"/out") + field(4, b"ro"))
        + field(4, field(1, b"-A"))
        + field(4, field(1, b"A") + field(2, b"1"))
        + field(8, field(1, b"a=b"))
    )


def test_what_is_missing_is_empty() -> None:
    request = codec.parse(pb.CreateContainerRequest, b"")
    assert codec.pod_of(request.pod) == Pod(id="", name="", uid="", namespace="")
    assert codec.container_of(request.container) == Container(id="", pod_id="", name="")
    assert codec.adjustment_of(pb.ContainerAdjustment()) == Adjustment()


def test_numbers_and_fields_that_we_do_not_know_do_no_harm() -> None:
    container = codec.parse(pb.Container, b"\x20\x63" + field(1, b"id") + b"\xfa\x7f\x01x")
    assert codec.container_of(container) == Container(id="id", pod_id="", name="", state=ContainerState.UNKNOWN)
    assert codec.parse(pb.StateChangeEvent, b"\x08\xe7\x07").event == 999


@pytest.mark.parametrize("payload", [b"\x0a\x02\xff\xfe", b"\xff", b"\x0a\x09short"])
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read a PodSandbox"):
        codec.parse(pb.PodSandbox, payload)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        request = codec.parse(pb.CreateContainerRequest, payload)
    except ProtocolError:
        return
    codec.pod_of(request.pod)
    codec.container_of(request.container)
