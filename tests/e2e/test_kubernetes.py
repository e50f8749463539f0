"""The plugin's Kubernetes side against a stub API server: with a service account over TLS, with the rights of
deploy/rbac.yaml, through every outage; and what it costs."""

import json
import os
import re
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.kubernetes import client as client_module
from deviceplugin.kubernetes import events as events_module
from deviceplugin.kubernetes import node as node_module
from deviceplugin.kubernetes import pods as pods_module
from deviceplugin.kubernetes.access import Access
from deviceplugin.kubernetes.frontend import KubernetesApi
from deviceplugin.kubernetes.model import KubernetesState, NodeReadiness, PodRef
from deviceplugin.kubernetes.node import CONDITION, DRIVER_LABEL
from mpsd.config.model import KubernetesConfig
from tests.apiserver import Fault, StubApiServer
from tests.unit.deviceplugin.kubernetes.certificates import Certificate, certificate
from tests.waiting import WAIT_S, soon

DEPLOY = Path(__file__).parents[2] / "deploy"
READY = NodeReadiness("True", "AllDaemonsReady", "annotated pods are served", "615")
NOT = NodeReadiness("False", "NotReady", "mpsd does not answer", "615")


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def granted() -> set[tuple[str, str]]:
    """The rights of deploy/rbac.yaml: verb and resource."""
    (role,) = (thing for thing in manifests("rbac.yaml") if thing["kind"] == "ClusterRole")
    assert all(rule["apiGroups"] == [""] for rule in role["rules"])
    return {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


class World:
    """A plugin's Kubernetes side in a pod of node n1, and the server."""

    def __init__(self, directory: Path) -> None:
        self.account = directory
        self.authority = certificate("ca")
        self.server = StubApiServer(
            ["n1"],
            context=_context(directory, certificate("kubernetes", "127.0.0.1", issuer=self.authority)),
            tokens={"token-1"},
            allowed=granted(),
        )
        self.server.start()
        (directory / "ca.crt").write_bytes(self.authority.pem)
        (directory / "token").write_text("token-1")
        self.readiness = READY
        self.told: list[tuple[str, float]] = []
        self.api = self.make()

    def make(self) -> KubernetesApi:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.server.port)}
        return KubernetesApi(
            KubernetesConfig(access="in-cluster", node_name="n1"),
            readiness=lambda: self.readiness,
            on_deleting=self.tell,
            access=Access("in-cluster", environ=environ, service_account=str(self.account)),
        )

    def tell(self, pod: PodRef, grace_s: float) -> None:
        self.told.append((pod.name, grace_s))

    def wait(self, condition: Callable[[], bool]) -> bool:
        return self.server.wait(condition, WAIT_S)

    def condition(self) -> tuple[str, str]:
        found = self.server.condition("n1", CONDITION) or {}
        return found.get("status", ""), found.get("reason", "")

    def say(self, readiness: NodeReadiness) -> None:
        self.readiness = readiness
        self.api.wake()

    def works(self) -> bool:
        """Whether a change, an event and a deletion get through now."""
        name = f"p{len(self.server.requests)}"
        self.say(NOT if self.condition()[0] == "True" else READY)
        uid = self.server.add_pod("ns", name, node="n1", restart_policy="Never")
        self.api.events.pod("ns", name, uid, "Warning", "Refused", "no room")
        return (
            self.wait(lambda: self.condition() == (self.readiness.status, self.readiness.reason))
            and self.wait(lambda: self.api.pods.restart_policy(uid) == "Never")
            and self.wait(lambda: any(event["involvedObject"]["uid"] == uid for event in self.server.events()))
            and self.deleted(name)
            and self.wait(lambda: (self.state.connected, self.state.error) == (True, ""))
        )

    def deleted(self, name: str) -> bool:
        self.server.delete_pod("ns", name, 20)
        return self.wait(lambda: (name, 20.0) in self.told)

    @property
    def state(self) -> KubernetesState:
        return self.api.state

    def close(self) -> None:
        with soon():
            self.api.close()


def _context(directory: Path, shown: Certificate) -> ssl.SSLContext:
    path = directory / "server.pem"
    path.write_bytes(shown.chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.fixture
def world(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(node_module, "RETRY_LAST_S", 1.0)  # an outage of a test is short
    monkeypatch.setattr(pods_module, "RETRY_LAST_S", 1.0)
    made = World(short_tmp)
    yield made
    made.api.close()
    made.server.close()


def test_it_needs_every_right_that_it_is_granted_and_uses_no_other(world: World) -> None:
    world.api.start()
    assert world.works()
    uid = world.server.add_pod("ns", "again", node="n1")
    for sent in (2, 3):
        world.api.events.pod("ns", "again", uid, "Warning", "Refused", "no room")
        assert world.wait(partial(lambda expected: world.state.events_sent == expected, sent))
    assert world.wait(lambda: {request.right for request in world.server.requests} == granted())
    world.close()
    assert {request.right for request in world.server.requests} == granted()
    assert world.condition() == ("Unknown", "AgentStopped")


def test_the_account_is_the_same_everywhere() -> None:
    account, other, _, binding = manifests("rbac.yaml")
    assert other["automountServiceAccountToken"] is False, "mpsd asks nothing of the API server"
    (subject,) = binding["subjects"]
    name, namespace = account["metadata"]["name"], account["metadata"]["namespace"]
    assert (subject["name"], subject["namespace"]) == (name, namespace)
    policy, policy_binding = manifests("own-node-policy.yaml")
    assert f'"system:serviceaccount:{namespace}:{name}"' in policy["spec"]["matchConditions"][0]["expression"]
    assert policy_binding["spec"]["policyName"] == policy["metadata"]["name"]
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert set(rule["resources"]) == {resource for verb, resource in granted() if "nodes" in resource}


def test_the_policy_lets_a_plugin_change_what_it_writes_and_nothing_else() -> None:
    """Its expressions are run by API servers of 1.32 and newer only; here: that they are of what we write."""
    spec = manifests("own-node-policy.yaml")[0]["spec"]
    variables = {variable["name"]: variable["expression"] for variable in spec["variables"]}
    rules = {rule["message"]: rule["expression"] for rule in spec["validations"]}
    own_label = rules["gpufrac may set its own label on a node, no other"]
    assert f'name == "{DRIVER_LABEL}"' in own_label
    assert "variables.labelsBefore.all(name, name in variables.labels)" in own_label
    for name in ("conditions", "conditionsBefore"):
        assert f'c.type != "{CONDITION}"' in variables[name]
    used = set(re.findall(r"variables\.(\w+)", " ".join(rules.values())))
    assert used == set(variables)
    assert {"object.spec == oldObject.spec", "variables.annotations == variables.annotationsBefore"} <= set(
        rules.values()
    )
    assert spec["failurePolicy"] == "Fail"


def counted(state: KubernetesState) -> tuple[int, int, int]:
    return state.pods, state.events_sent, state.events_dropped


def test_what_status_shows(world: World) -> None:
    begun_unix_s = time.time()
    assert (world.state.access, world.state.node, world.state.connected) == ("in-cluster", "n1", None)
    world.api.start()
    assert world.works()
    assert world.wait(lambda: world.state.last_heartbeat_at is not None)
    assert begun_unix_s - 1 <= (world.state.last_heartbeat_at or 0) <= time.time() + 1
    assert world.wait(lambda: counted(world.state) == (1, 1, 0))
    assert world.wait(lambda: world.server.node("n1")["metadata"]["labels"].get(DRIVER_LABEL) == "615")


def test_a_server_that_comes_after_us_and_goes_and_comes_again(world: World) -> None:
    world.server.stop()
    world.api.start()
    world.api.events.pod("default", "p", "uid-p", "Normal", "Started", "hello")
    assert world.wait(lambda: "Connection refused" in world.state.error)
    assert world.state.connected is False
    world.server.start()
    assert world.works()
    assert world.wait(lambda: any(event["message"] == "hello" for event in world.server.events()))
    world.server.add_pod("ns", "meanwhile", node="n1")
    world.server.stop()
    world.say(READY if world.readiness == NOT else NOT)
    assert world.wait(lambda: world.state.connected is False)
    world.server.delete_pod("ns", "meanwhile", 20)
    world.server.expire()
    world.server.start()
    assert world.wait(lambda: ("meanwhile", 20.0) in world.told)
    assert world.works()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP, Fault.ENDLESS, Fault.GARBAGE, Fault.PAGE, Fault.DROP])
def test_a_server_gone_mad_and_back(world: World, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(client_module, "MAX_OBJECT_BYTES", 1 << 20)
    for client in (world.api._parts.node._client, world.api._parts.pods._client, world.api._parts.events._client):  # type: ignore[union-attr]
        client._timeout_s = 0.5
    world.server.fault(fault)
    world.api.start()
    world.api.events.pod("default", "p", "uid-p", "Normal", "Started", "hello")
    assert world.wait(lambda: world.state.error != "")
    world.server.heal()
    assert world.works()


@pytest.mark.parametrize("fault", [None, Fault.HANG, Fault.DRIP, Fault.ENDLESS])
def test_closing_never_takes_long(world: World, fault: Fault | None) -> None:
    assert events_module.CLOSE_S + 2 * pods_module.CLOSE_S <= node_module.CLOSE_S <= 2.0
    if fault is not None:
        world.server.fault(fault)
    world.api.start()
    world.api.events.pod("default", "p", "uid-p", "Normal", "Started", "hello")
    assert world.wait(lambda: len({r.right[1] for r in world.server.requests}) == 3 or fault is None)
    world.close()


def test_closing_with_nobody_there_is_quick(world: World) -> None:
    world.api.start()
    assert world.works()
    world.server.stop()
    world.close()


def test_tokens_that_rotate_and_one_that_comes_late(world: World) -> None:
    world.api.start()
    assert world.works()
    world.server.tokens = {"token-2"}
    (world.account / "next").write_text("token-2")
    os.replace(world.account / "next", world.account / "token")
    assert world.works()
    world.server.tokens = {"token-3"}
    world.say(READY if world.readiness == NOT else NOT)
    assert world.wait(lambda: "401" in world.state.error)
    (world.account / "token").write_text("token-3")
    assert world.works()


def test_a_clock_that_jumps_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.api.start()
    for jump_s in (-1e8, 1e8):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.8e9 + jump_s)
        assert world.works()


def test_a_new_instance_tells_of_no_deletion_that_is_none(world: World) -> None:
    world.api.start()
    world.server.add_pod("ns", "stays", node="n1")
    assert world.works()
    before, world.told = world.told, []
    world.api.close()
    world.api = world.make()
    world.api.start()
    assert world.wait(lambda: world.told == before), "what is still being deleted is told again, and nothing else"
    assert world.works()


# --- what it costs -------------------------------------------------------------------------------------------------

PROGRAM = """
    import json, resource, sys, threading, time
    import deviceplugin.app, deviceplugin.services  # as in the plugin's process
    from deviceplugin.kubernetes.frontend import KubernetesApi
    from deviceplugin.kubernetes.model import NodeReadiness
    from mpsd.config.model import KubernetesConfig

    def rss_mib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20

    before_mib, begun_s = rss_mib(), time.perf_counter()
    api = KubernetesApi(
        KubernetesConfig(access=sys.argv[1], node_name="n1"),
        readiness=lambda: NodeReadiness("True", "AllDaemonsReady", "fine", "615"),
        on_deleting=lambda pod, grace_s: None,
    )
    api.start()
    started_s = time.perf_counter() - begun_s
    for number in range(5):
        api.events.pod("ns", f"p{number}", "u", "Warning", "Refused", "no room")
    while not (api.state.pods == 110 and api.state.events_sent == 5 and api.state.last_heartbeat_at):
        time.sleep(0.01)
    ready_s = time.perf_counter() - begun_s
    added_mib = rss_mib() - before_mib
    time.sleep(0.5)
    cpu_s = time.process_time()
    time.sleep(2.0)
    cpu_s = time.process_time() - cpu_s
    threads = sorted(thread.name for thread in threading.enumerate())
    api.close()
    print(json.dumps([added_mib, started_s, ready_s, cpu_s, threads]))
"""


def test_it_adds_little_to_the_plugin_and_nothing_while_idle(world: World, short_tmp: Path) -> None:
    for number in range(110):
        world.server.add_pod("ns", f"p{number}", node="n1", annotations={"text": "x" * 20_000})
    config = json.loads(world.server.kubeconfig(token="token-1"))
    config["clusters"][0]["cluster"]["certificate-authority"] = "ca.crt"
    (short_tmp / "config").write_text(json.dumps(config))
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(short_tmp / "config")],
        check=True,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    added_mib, started_s, ready_s, cpu_s, threads = json.loads(said.stdout)
    print(f"added {added_mib:.1f} MiB, started {1000 * started_s:.0f} ms, all there {1000 * ready_s:.0f} ms, ", end="")
    print(f"idle {1000 * cpu_s / 2:.2f} ms of CPU a second")
    assert added_mib < 12.0
    assert cpu_s < 0.02
    assert threads == [
        "MainThread",
        "kubernetes-deleting",
        "kubernetes-events",
        "kubernetes-node",
        "kubernetes-pods",
    ]
