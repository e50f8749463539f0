"""An adjustment in an OCI spec, as seen with containerd 2.1.9."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.encode import encode_spec
from cdi.errors import CdiError
from cdi.inject import OciSpec, effective_env
from cdi.model import ContainerEdits, Device, Spec
from cdi.model import Mount as CdiMount
from cdi.registry import Registry
from cdi.scan import scan
from deviceplugin.nri.model import Adjustment, Mount
from deviceplugin.sim.runtime.adjust import ConflictError, adjusted, adjusted_env

NAMES = st.sampled_from(["A", "B", "C", "D"])
VALUES = st.sampled_from(["", "1", "2", "x=y"])


def spec(*env: str, mounts: tuple[str, ...] = ()) -> OciSpec:
    return {
        "process": {"env": list(env)},
        "mounts": [{"destination": m, "source": "/before", "options": []} for m in mounts],
        "linux": {"devices": []},
        "annotations": {},
    }


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    edits = ContainerEdits(
        env=("A=cdi", "NEW=cdi"), mounts=(CdiMount(host_path="/cdi", container_path="/m", options=("bind", "ro")),)
    )
    file = Spec(kind="example.com/gpu", devices=(Device(name="d", container_edits=edits),))
    (tmp_path / "x.json").write_bytes(encode_spec(file))
    return scan([str(tmp_path)])


@pytest.mark.parametrize(
    ("old", "wanted", "new"),
    [
        ((), (), []),
        (("A=1", "A=2"), (), ["A=1", "A=2"]),
        (("A=1", "B=2"), (("A", "x"),), ["A=x", "B=2"]),
        (("A=1",), (("C", "x"), ("B", "")), ["A=1", "C=x", "B="]),
        (("A=1", "B=2", "A=3"), (("A", "x"),), ["A=3", "B=2"]),
        (("A=1", "A=2"), (("B", "x"),), ["A=2", "B=x"]),
        (("no equals sign", "A=1"), (("A", "x"),), ["A=x"]),
    ],
)
def test_env(old: tuple[str, ...], wanted: tuple[tuple[str, str], ...], new: list[str]) -> None:
    assert adjusted_env(old, wanted) == new


def test_a_removal_alone_does_nothing(registry: Registry) -> None:
    removed = Adjustment(removed_env=("A",))
    assert adjusted(spec("A=1"), removed, registry)["process"]["env"] == ["A=1"]
    both = Adjustment(removed_env=("A",), env=(("A", "2"),))
    assert adjusted(spec("A=1"), both, registry)["process"]["env"] == ["A=2"]


def test_the_env_of_cdi_devices_wins(registry: Registry) -> None:
    wanted = Adjustment(env=(("A", "mine"), ("B", "mine")), cdi_devices=("example.com/gpu=d",))
    env = effective_env(adjusted(spec("A=pod", "B=pod", "A=again"), wanted, registry))
    assert env == {"A": "cdi", "B": "mine", "NEW": "cdi"}


def test_mounts(registry: Registry) -> None:
    mine = Mount("/m", "/mine", options=("rbind", "ro"))
    found = adjusted(
        spec(mounts=("/deep/er", "/gone", "/kept", "/m")),
        Adjustment(removed_mounts=("/gone",), mounts=(mine,), cdi_devices=("example.com/gpu=d",)),
        registry,
    )
    sources = {mount["destination"]: mount["source"] for mount in found["mounts"]}
    assert sources == {"/kept": "/before", "/m": "/mine", "/deep/er": "/before"}
    assert [mount["destination"] for mount in found["mounts"]][-1] == "/deep/er"


def test_the_spec_given_stays_as_it_is(registry: Registry) -> None:
    before = spec("A=1")
    assert adjusted(before, Adjustment(env=(("A", "2"),), annotations=(("k", "v"),)), registry)["annotations"] == {
        "k": "v"
    }
    assert before == spec("A=1")
    assert adjusted(before, Adjustment(), registry) == before


@pytest.mark.parametrize(
    "twice",
    [
        Adjustment(env=(("A", "1"), ("A", "1"))),
        Adjustment(mounts=(Mount("/m", "/a"), Mount("/m", "/b"))),
        Adjustment(cdi_devices=("example.com/gpu=d", "example.com/gpu=d")),
    ],
)
def test_what_is_there_twice_is_refused(registry: Registry, twice: Adjustment) -> None:
    with pytest.raises(ConflictError, match="twice"):
        adjusted(spec(), twice, registry)


def test_an_unknown_device_is_an_error(registry: Registry) -> None:
    with pytest.raises(CdiError, match=r"unresolvable CDI devices example\.com/gpu=no"):
        adjusted(spec(), Adjustment(cdi_devices=("example.com/gpu=no",)), registry)


@given(
    st.lists(st.tuples(NAMES, VALUES), unique_by=lambda pair: pair[0]),
    st.lists(st.tuples(NAMES, VALUES), unique_by=lambda pair: pair[0]),
)
def test_where_no_name_is_twice_what_is_set_holds(old: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> None:
    entries = adjusted_env([f"{n}={v}" for n, v in old], wanted)
    assert dict(e.split("=", 1) for e in entries) == {**dict(old), **dict(wanted)}
    assert [e.partition("=")[0] for e in entries][: len(old)] == [name for name, _ in old]
