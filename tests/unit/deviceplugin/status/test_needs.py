"""What the plugin needs of its own process and place."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from deviceplugin.status import needs
from mpsd.config.model import CdiConfig, KubernetesConfig, MpsConfig, NodeConfig
from mpsd.host.survival import INITIAL_PID
from tests.builders import config, fixed, resource

FULL, NO_PTRACE, NONE = 0x1FFFFFFFFFF, 0xA80425FB, 0
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def place(short_tmp: Path) -> NodeConfig:
    """A node whose directories are all there."""
    (short_tmp / "kubelet" / "pods").mkdir(parents=True)
    return config(
        resource("a", fixed(8)),
        kubelet_root=str(short_tmp / "kubelet"),
        cdi=CdiConfig(directory=str(short_tmp)),
        mps=MpsConfig(run_root=str(short_tmp)),
        state_root=str(short_tmp),
    )


def proc_of(root: Path, capabilities: int, namespace: str = INITIAL_PID) -> str:
    """A /proc of a process with these capabilities in this PID namespace."""
    (root / "self" / "ns").mkdir(parents=True)
    os.symlink(namespace, root / "self" / "ns" / "pid")
    (root / "self" / "status").write_text(f"Name:\tpython3\nCapEff:\t{capabilities:016x}\nSeccomp:\t0\n")
    return str(root)


@pytest.mark.parametrize(
    ("capabilities", "namespace", "words"),
    [
        (FULL, INITIAL_PID, ""),
        (NO_PTRACE, INITIAL_PID, "SYS_PTRACE"),
        (NONE, INITIAL_PID, "SYS_PTRACE"),
        (FULL, "pid:[4026532198]", "hostPID: true"),
    ],
)
def test_each_right_that_is_missing_is_named_with_what_to_give(
    tmp_path: Path, place: NodeConfig, capabilities: int, namespace: str, words: str
) -> None:
    found = needs.lacks(place, environ={}, proc=proc_of(tmp_path / "proc", capabilities, namespace))
    assert len(found) == bool(words)
    assert words in "".join(str(lack) for lack in found)


def test_what_cannot_be_read_of_itself_is_no_right(tmp_path: Path, place: NodeConfig) -> None:
    (found,) = needs.lacks(place, environ={}, proc=str(tmp_path / "nothing"))
    assert "cannot tell whether" in found.message


def test_a_missing_directory_of_the_kubelet_is_named(tmp_path: Path, place: NodeConfig) -> None:
    (Path(place.kubelet_root) / "pods").rmdir()
    (found,) = needs.lacks(place, environ={}, proc=proc_of(tmp_path / "proc", FULL))
    assert f"{place.kubelet_root}/pods" in found.message


def test_a_directory_of_the_containers_own_is_named_in_a_pod_only(
    tmp_path: Path, place: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = proc_of(tmp_path / "proc", FULL)
    monkeypatch.setattr(needs, "_of_the_container", lambda path: path == place.state_root)
    assert needs.lacks(place, environ={}, proc=proc) == ()
    found = needs.lacks(structs.replace(place, cdi=CdiConfig(directory="/x")), environ=IN_POD, proc=proc)
    assert [
        key for key in ("cdi.directory", "mps.runRoot", "stateRoot") if any(key in line.message for line in found)
    ] == [
        "mps.runRoot",
        "stateRoot",
    ]


@pytest.mark.parametrize(
    ("access", "name", "environ", "lacking"),
    [
        ("off", "", IN_POD, False),
        ("in-cluster", "", {}, False),
        ("in-cluster", "", IN_POD, True),
        ("in-cluster", "n1", IN_POD, False),
        ("in-cluster", "", IN_POD | {"NODE_NAME": "n1"}, False),
    ],
)
def test_the_name_of_the_node_has_to_be_given_in_a_pod_that_talks_to_the_api(
    place: NodeConfig, access: str, name: str, environ: Mapping[str, str], lacking: bool
) -> None:
    made = structs.replace(place, kubernetes=KubernetesConfig(access=access, node_name=name))
    assert bool(needs.no_node_name(made, environ)) == lacking


def test_a_simulated_node_needs_nothing(place: NodeConfig) -> None:
    assert needs.lacks(structs.replace(place, backend="simulated"), environ=IN_POD, proc="/nothing") == ()
