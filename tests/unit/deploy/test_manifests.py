"""The plain manifest agrees with the program: its paths, its options, its probes, the rights that it needs."""

import kubernetes_validate
import pytest

from deviceplugin.cli.main import cli
from deviceplugin.kubelet.cri import SOCKETS
from hack import deploy_files
from mpsd.config.load import parse_config
from tests.cli import gpufrac
from tests.unit.deploy.manifests import DEPLOY, Object, installed, objects_of, pods_of, the

OBJECTS = installed()
PODS = dict(pods_of(OBJECTS))
CONFIG = parse_config(the(OBJECTS, "ConfigMap", "gpufrac")["data"]["config.yaml"], "deploy/gpufrac.yaml")


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.32", "1.36"])
def test_kubernetes_takes_every_object(one: Object, version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def test_it_is_what_the_chart_renders_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy_files.main(["--check"]) == 0, capsys.readouterr().err


def test_a_manifest_of_other_inputs_is_found_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deploy_files, "digest", lambda: "another")
    monkeypatch.setattr(deploy_files, "helm", lambda: None)
    assert deploy_files.main(["--check"]) == 1
    assert "deploy/gpufrac.yaml" in capsys.readouterr().err


def test_smaller_manifests_are_parts_of_the_whole() -> None:
    for name in ("rbac.yaml", "own-node-policy.yaml"):
        for one in objects_of((DEPLOY / name).read_text()):
            assert one == the(OBJECTS, one["kind"], one["metadata"]["name"])


@pytest.mark.parametrize("component", ["mpsd", "plugin"])
def test_host_directories_are_mounted_at_their_own_paths(component: str) -> None:
    """Containers, daemons and the runtime know them by these."""
    pod = PODS[component]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    on_host = {name: volume["hostPath"]["path"] for name, volume in volumes.items() if "hostPath" in volume}
    assert on_host == {name: path for name, path in mounts.items() if name != "config"}
    assert volumes["config"]["configMap"]["name"] == "gpufrac"


def test_every_place_of_the_config_is_mounted_where_it_is_used() -> None:
    paths = {name: {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]} for name, pod in PODS.items()}
    pods = f"{CONFIG.kubelet_root}/pods"
    both = {CONFIG.mps.run_root, CONFIG.state_root, CONFIG.cdi.directory, CONFIG.kubelet_device_plugins, pods}
    assert paths["mpsd"] == {"/etc/gpufrac", CONFIG.mps.log_root, *both}
    runtime = SOCKETS[0].rpartition("/")[0]
    assert paths["plugin"] == {"/etc/gpufrac", "/etc/cdi", f"{CONFIG.kubelet_root}/pod-resources", runtime, *both}


@pytest.mark.parametrize("component", ["mpsd", "plugin"])
def test_what_is_started_and_probed_are_commands_of_ours(component: str) -> None:
    (container,) = PODS[component]["containers"]
    command = cli.get_command(cli.make_context("gpufrac", [component, "--help"], resilient_parsing=True), component)
    assert command is not None
    with command.make_context(component, container["args"][1:], resilient_parsing=True) as context:
        assert context.params["config_path"] == "/etc/gpufrac/config.yaml"
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["GPUFRAC_RUN_ROOT"] == CONFIG.mps.run_root
    for probe, check in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "ready")):
        words = container[probe]["exec"]["command"]
        assert words == ["gpufrac", "status", f"--check={check}", "--process", component]
        assert container[probe]["timeoutSeconds"] >= 10, "longer than a probe waits for an answer"
        assert container[probe]["failureThreshold"] >= 3
        asked = gpufrac(*words[1:], "--run-root", "/nonexistent")
        assert (asked.returncode, component in asked.stdout) == (3, True)


def test_the_plugin_has_no_right_that_it_does_not_need() -> None:
    (container,) = PODS["plugin"]["containers"]
    context = container["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE", "DAC_READ_SEARCH"]}
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert not {"privileged", "hostNetwork", "hostIPC"} & {*context, *PODS["plugin"]}
    assert {one["name"]: one.get("value") for one in container["env"]}["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_mpsd_knows_no_api_server_and_its_update_waits_for_people() -> None:
    assert PODS["mpsd"]["automountServiceAccountToken"] is False
    assert PODS["mpsd"]["hostPID"] is True
    assert the(OBJECTS, "DaemonSet", "gpufrac-mpsd")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert the(OBJECTS, "NetworkPolicy", "gpufrac-mpsd")["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_metrics_are_for_the_pod_itself_until_somebody_is_named() -> None:
    assert CONFIG.metrics_address == "127.0.0.1:9478"
    assert "ports" not in PODS["plugin"]["containers"][0]
    assert "ingress" not in the(OBJECTS, "NetworkPolicy", "gpufrac-plugin")["spec"]
