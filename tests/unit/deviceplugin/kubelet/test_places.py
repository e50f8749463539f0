"""A kubelet whose --root-dir is elsewhere: what does not follow it, and what is said when one of the pair is wrong."""

from pathlib import Path

import pytest

from deviceplugin.kubelet.places import KubeletPlaces, kubelet_places
from deviceplugin.kubelet.podresources import PodResourcesClient, PodResourcesError
from mpsd.config.load import parse_config

CONFIG = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources:
  - {name: gpufrac.dev/gpu, memory: {request: 8Gi}, compute: {mode: sm-sharing}}
"""


def test_device_plugins_do_not_follow_the_root() -> None:
    places = kubelet_places(parse_config(f"{CONFIG}kubelet: {{root: /data/kubelet}}\n", "f"))
    assert places.registration_socket == "/var/lib/kubelet/device-plugins/kubelet.sock"
    assert places.pod_resources_socket == "/data/kubelet/pod-resources/kubelet.sock"


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (["plugins", "root/pod-resources"], ""),
        (["plugins"], "set kubelet.root"),
        (["root/pod-resources"], "kubelet.devicePlugins is not its directory"),
        ([], "neither"),
    ],
)
def test_what_is_missing_of_the_pair_is_named_with_its_setting(there: list[str], words: str, short_tmp: Path) -> None:
    places = KubeletPlaces(str(short_tmp / "root"), str(short_tmp / "plugins"))
    for directory in there:
        (short_tmp / directory).mkdir(parents=True)
        (short_tmp / directory / "kubelet.sock").touch()
    said = places.missing()
    assert words in said
    assert bool(said) == (len(there) < 2)
    if said:
        assert str(short_tmp / "root") in said
        assert str(short_tmp / "plugins") in said


def test_pod_resources_that_are_elsewhere_are_explained(short_tmp: Path) -> None:
    places = KubeletPlaces(str(short_tmp / "root"), str(short_tmp / "plugins"))
    (short_tmp / "plugins").mkdir()
    (short_tmp / "plugins" / "kubelet.sock").touch()
    client = PodResourcesClient(places.pod_resources_socket, places.missing)
    with pytest.raises(PodResourcesError, match=r"set kubelet\.root"):
        client.list()
    client.close()
