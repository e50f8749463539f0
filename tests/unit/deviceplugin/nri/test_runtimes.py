"""What is known of container runtimes, and how it is found out."""

from pathlib import Path

import pytest

from deviceplugin.kubelet import cri
from deviceplugin.nri.model import Runtime
from deviceplugin.nri.runtimes import cdi_loses
from deviceplugin.sim.runtime.cri import CriServer


@pytest.mark.parametrize(
    ("name", "version", "loses"),
    [
        ("cri-o", "1.28.0", True),
        ("CRI-O", "1.33.4", True),
        ("cri-o", "1.34.0", False),
        ("cri-o", "1.36.1-dev", False),
        ("cri-o", "main", True),
        ("containerd", "1.7.24", False),
        ("containerd", "v2.1.9", False),
        ("other", "0.1", False),
    ],
)
def test_where_the_environment_of_a_pod_beats_its_cdi_device(name: str, version: str, loses: bool) -> None:
    reason = cdi_loses(Runtime(name=name, version=version))
    assert bool(reason) == loses
    assert (f"{name} {version}" in str(reason)) == loses
    assert cdi_loses(None) is None


def test_a_runtime_says_over_cri_what_it_is(short_tmp: Path) -> None:
    path, other = str(short_tmp / "crio.sock"), str(short_tmp / "containerd.sock")
    assert cri.runtime_of((path, other)) is None, "there is none"
    server = CriServer(path, lambda _: None, ("cri-o", "1.32.1"))
    server.start()
    try:
        assert cri.runtime_of((path, other)) == Runtime(name="cri-o", version="1.32.1")
        Path(other).touch()
        assert cri.runtime_of((path, other)) is None, "which of the two the kubelet uses is not known"
    finally:
        server.close()
    assert cri.runtime_of((other,)) is None, "nobody answers"
