"""The chart with other values than its own, rendered by helm; skips where none is named."""

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hack import deploy_files
from mpsd.config.load import parse_config
from tests.unit.deploy.manifests import Object, objects_of, pods_of, the

HELM = deploy_files.helm()
pytestmark = pytest.mark.skipif(HELM is None, reason="helm: not on PATH, and GPUFRAC_HELM does not name it")
CI = sorted((deploy_files.CHART / "ci").glob("*.yaml"), key=lambda path: path.name)
IMAGE = {"image": {"repository": "registry.example/gpufrac"}}


def helm(values: Path, kubernetes: str = "1.36") -> "subprocess.CompletedProcess[str]":
    assert HELM is not None
    command = [HELM, "template", "gpufrac", str(deploy_files.CHART), "--namespace", "gpus", "--values", str(values)]
    return subprocess.run([*command, "--kube-version", kubernetes], check=False, capture_output=True, text=True)


def rendered(values: Path, kubernetes: str = "1.36") -> list[Object]:
    done = helm(values, kubernetes)
    assert done.returncode == 0, done.stderr
    return objects_of(done.stdout)


def given(directory: Path, **values: Any) -> Path:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(IMAGE | values))
    return path


@pytest.mark.parametrize("kubernetes", ["1.29", "1.30", "1.32", "1.36"])
@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_all_combinations_are_valid_wherever_the_chart_runs(values: Path, kubernetes: str) -> None:
    objects = rendered(values, kubernetes)
    for one in objects:
        if one["kind"] != "PodMonitor":  # a resource of the Prometheus operator's
            kubernetes_validate.validate(one, kubernetes, strict=True)
        assert one["metadata"].get("namespace", "gpus") == "gpus"
    for one in objects:
        if one["kind"] == "ConfigMap":
            parse_config(one["data"]["config.yaml"], one["metadata"]["name"])
    for _, pod in pods_of(objects):
        (container,) = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_a_node_is_of_one_pool(short_tmp: Path) -> None:
    objects = rendered(next(path for path in CI if path.stem == "pools"))

    def pool(name: str) -> tuple[str, list[str]]:
        spec = the(objects, "DaemonSet", name)["spec"]["template"]["spec"]
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"][0]["matchExpressions"]
        return term["operator"], term["values"]

    assert (pool("gpufrac-mpsd"), pool("gpufrac-plugin")) == (("NotIn", ["big"]),) * 2
    assert (pool("gpufrac-mpsd-big"), pool("gpufrac-plugin-big")) == (("In", ["big"]),) * 2


def test_kai_has_annotations_and_its_sockets(short_tmp: Path) -> None:
    objects = rendered(next(path for path in CI if path.stem == "kai-and-metrics"))
    config = parse_config(the(objects, "ConfigMap", "gpufrac")["data"]["config.yaml"], "chart")
    assert config.annotations is not None
    assert (config.annotations.gpus.include, config.annotations.cri_socket) == ((2, 3), "/run/crio/crio.sock")
    mounts = {m["mountPath"] for m in dict(pods_of(objects))["plugin"]["containers"][0]["volumeMounts"]}
    assert {"/run/crio", "/var/run/nri"} <= mounts
    assert dict(pods_of(objects))["mpsd"]["nodeSelector"]["nvidia.com/gpu.deploy.client"] == "true"


def test_what_a_pool_says_beats_what_the_chart_sets(short_tmp: Path) -> None:
    resource = {"name": "gpufrac.dev/a", "unit": "1Gi", "compute": {"mode": "sm-sharing"}}
    own = {"resources": [resource], "metrics": {"address": ""}, "stateRoot": "/data"}
    objects = rendered(given(short_tmp, pools={"default": {"config": own}}))
    config = parse_config(the(objects, "ConfigMap", "gpufrac")["data"]["config.yaml"], "chart")
    assert (config.metrics_address, config.state_root) == ("", "/data")
    for _, pod in pods_of(objects):
        assert "/data" in {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    policy = the(objects, "ValidatingAdmissionPolicy", "gpufrac-one-share")["spec"]
    assert {one["name"]: one["expression"] for one in policy["variables"]}["ours"] == '["gpufrac.dev/a"]'


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"image": {}}, "image.repository: name where your image of gpufrac is"),
        ({"imge": {}}, "additional properties 'imge' not allowed"),
        ({"metrics": {"expse": "pod"}}, "additional properties 'expse' not allowed"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "set metrics.expose to pod"),
        ({"runtime": "docker"}, "/runtime"),
        ({"kubeletRoot": "var/lib/kubelet"}, "/kubeletRoot"),
        ({"pools": {"Default": {"config": {}}}}, "invalid propertyName 'Default'"),
        ({"pools": {"default": {"config": {"resource": []}}}}, "/pools/default"),
        ({"pools": {"default": {"config": {"resources": [{"name": "nvidia.com/gpu"}]}}}}, "/pools/default"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(short_tmp: Path, values: dict[str, Any], text: str) -> None:
    done = helm(given(short_tmp, **values))
    assert done.returncode != 0
    assert text in done.stderr
