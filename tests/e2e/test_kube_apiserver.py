"""The plugin's Kubernetes side at a real kube-apiserver, with the rights of deploy/rbac.yaml. And the stub, which all
other tests use, answers as a real one does.

Tried with kube-apiserver 1.20.2 and etcd 3.5, in a directory that GPUFRAC_KUBE_APISERVER names (bin/etcd, and
bin/kube-apiserver or bin/kube-apiserver-1.20).
"""

import http.client
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from deviceplugin.kubernetes import client as client_module
from deviceplugin.kubernetes import events as events_module
from deviceplugin.kubernetes import pods as pods_module
from deviceplugin.kubernetes.access import Access
from deviceplugin.kubernetes.client import STRATEGIC_MERGE, ApiClient
from deviceplugin.kubernetes.errors import GoneError, ServerError
from deviceplugin.kubernetes.frontend import KubernetesApi
from deviceplugin.kubernetes.model import NodeReadiness, PodRef
from deviceplugin.kubernetes.node import CONDITION, DRIVER_LABEL
from deviceplugin.kubernetes.pods import ApiPod
from mpsd.config.model import KubernetesConfig
from tests.apiserver import StubApiServer
from tests.e2e.kubeapiserver import KubeApiserver, wait, why_not
from tests.unit.deploy.manifests import installed
from tests.unit.deviceplugin.kubernetes.certificates import certificate
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(bool(_reason := why_not()), reason=f"kube-apiserver: {_reason}")
restarts = pytest.mark.leaks_ok("the server of all these tests is another process afterwards")

RBAC = Path(__file__).parents[2] / "deploy" / "rbac.yaml"
READY = NodeReadiness("True", "AllDaemonsReady", "annotated pods are served", "615")
NOT = NodeReadiness("False", "NotReady", "mpsd does not answer", "580")
PODS = "/api/v1/pods"
LONG_AGO = "2020-02-02T02:02:02Z"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def everybodys() -> Iterator[KubeApiserver]:
    directory = Path(tempfile.mkdtemp(prefix="gf-", dir="/tmp"))
    try:
        with KubeApiserver(directory) as server:
            server.add_namespace("gpufrac")
            for manifest in yaml.safe_load_all(RBAC.read_text()):
                server.create(manifest)
            yield server
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def server(everybodys: KubeApiserver) -> KubeApiserver:
    everybodys.revive()
    return everybodys


def test_the_whole_manifest_is_taken(server: KubeApiserver) -> None:
    """As far as the server's version knows its kinds; what its schemas say of all, tests/unit/deploy has."""
    taken = set()
    for one in installed():
        newer = one["kind"].startswith("ValidatingAdmissionPolicy")
        if one["kind"] != "Namespace" and not newer:  # that is there, and the name is taken
            one["metadata"]["name"] += "-tried"
            server.create(one, "?dryRun=All")
            taken.add(one["kind"])
    assert {"DaemonSet", "ConfigMap", "NetworkPolicy", "ClusterRole", "ServiceAccount"} <= taken


class World:
    """A plugin's Kubernetes side in a pod of a node of its own, with a namespace of its own."""

    def __init__(self, server: KubeApiserver, directory: Path) -> None:
        self.server, self.directory = server, directory
        number = next(_numbers)
        self.node, self.elsewhere, self.namespace = f"n{number}", f"other{number}", f"ns{number}"
        server.add_node(self.node)
        server.add_namespace(self.namespace)
        self.readiness = READY
        self.told: list[tuple[str, float]] = []
        (directory / "ca.crt").write_bytes(server.authority.pem)
        self.show(server.token("gpufrac", "gpufrac"))
        self.api = self.make()

    def show(self, token: str) -> None:
        """The kubelet brings another token."""
        (self.directory / "next").write_text(token)
        (self.directory / "next").rename(self.directory / "token")

    @property
    def access(self) -> Access:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.server.port)}
        return Access("in-cluster", environ=environ, service_account=str(self.directory))

    def make(self, access: Access | None = None, node: str = "") -> KubernetesApi:
        return KubernetesApi(
            KubernetesConfig(access="in-cluster", node_name=node or self.node),
            readiness=lambda: self.readiness,
            on_deleting=self.tell,
            access=access or self.access,
        )

    def tell(self, pod: PodRef, grace_s: float) -> None:
        self.told.append((pod.name, grace_s))

    def add_pod(self, name: str, **settings: Any) -> str:
        return self.server.add_pod(self.namespace, name, **{"node": self.node, **settings})

    def delete_pod(self, name: str, grace_s: int) -> None:
        self.server.delete_pod(self.namespace, name, grace_s)

    def say(self, readiness: NodeReadiness) -> None:
        self.readiness = readiness
        self.api.wake()

    def condition(self) -> dict[str, Any]:
        return self.server.conditions(self.node).get(CONDITION, {})

    def label(self) -> object:
        return self.server.node(self.node)["metadata"]["labels"].get(DRIVER_LABEL)

    def events(self) -> list[tuple[str, str, int]]:
        """Of our namespace: the object's name, the text, how often."""
        return [
            (event["involvedObject"]["name"], event["message"], event["count"])
            for event in self.server.events(self.namespace)
        ]

    def wait(self, condition: Callable[[], bool], what: str = "what was expected", timeout_s: float = WAIT_S) -> None:
        wait(f"{what} ({self.api.state.error})", condition, timeout_s)

    def reported(self) -> None:
        """Waits until condition and label are as they shall be."""
        wanted = (self.readiness.status, self.readiness.reason, self.readiness.driver_major)
        self.wait(lambda: (*map(self.condition().get, ("status", "reason")), self.label()) == wanted, f"{wanted}")

    def works(self) -> None:
        """Waits until a change, an event and a deletion have got through."""
        name = f"p{next(_numbers)}"
        self.say(NOT if self.readiness == READY else READY)
        uid = self.add_pod(name, restart_policy="Never")
        self.api.events.pod(self.namespace, name, uid, "Warning", "Refused", "no room")
        self.reported()
        self.wait(lambda: self.api.pods.restart_policy(uid) == "Never", "the pod")
        self.wait(lambda: (name, "no room", 1) in self.events(), "the event")
        self.delete_pod(name, 20)
        self.wait(lambda: (name, 20.0) in self.told, "the deletion")
        self.wait(lambda: (self.api.state.connected, self.api.state.error) == (True, ""), "no error")


@pytest.fixture
def world(server: KubeApiserver, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(pods_module, "RETRY_FIRST_S", 0.1)
    monkeypatch.setattr(events_module, "RETRY_FIRST_S", 0.1)
    made = World(server, short_tmp)
    yield made
    made.api.close()


# --- what is said, and what is heard -------------------------------------------------------------------------------


def test_the_condition_stands_beside_those_of_others_and_keeps_its_time(world: World) -> None:
    world.api.start()
    world.reported()
    first = world.server.conditions(world.node)
    assert set(first) == {"Ready", CONDITION}
    assert first["Ready"]["reason"] == "KubeletReady"
    world.wait(lambda: world.server.clock() > first[CONDITION]["lastHeartbeatTime"], "another second")
    world.say(NodeReadiness("True", "Another", "reason", "616"))
    world.reported()
    second = world.condition()
    assert second["lastTransitionTime"] == first[CONDITION]["lastTransitionTime"]
    assert second["lastHeartbeatTime"] > first[CONDITION]["lastHeartbeatTime"]
    world.say(NOT)
    world.reported()
    assert world.condition()["lastTransitionTime"] > first[CONDITION]["lastTransitionTime"]
    labels = world.server.node(world.node)["metadata"]["labels"]
    assert labels == {"kubernetes.io/hostname": world.node, DRIVER_LABEL: "580"}
    world.api.close()
    last = world.server.conditions(world.node)
    assert (last[CONDITION]["status"], last[CONDITION]["reason"]) == ("Unknown", "AgentStopped")
    assert last["Ready"] == first["Ready"]


def test_events_are_counted_in_one_also_over_our_restart(world: World) -> None:
    uid = world.add_pod("p")
    world.api.start()
    for count in (1, 2):
        world.api.events.pod(world.namespace, "p", uid, "Warning", "Refused", "no room")
        world.wait(partial(lambda expected: world.events() == [("p", "no room", expected)], count))
    world.api.events.pod(world.namespace, "q", "uid-q", "Normal", "Started", "hello")
    world.wait(lambda: world.events() == [("p", "no room", 2), ("q", "hello", 1)])
    world.api.close()
    world.api = world.make()
    world.api.start()
    world.api.events.pod(world.namespace, "p", uid, "Warning", "Refused", "no room")
    world.wait(lambda: world.events() == [("p", "no room", 3), ("q", "hello", 1)])
    assert world.api.state.events_dropped == 0


def test_events_of_namespaces_that_go_or_are_gone_are_nobodys_fault(world: World) -> None:
    world.server.end_namespace(world.namespace)
    world.api.start()
    for namespace in (world.namespace, "nowhere"):
        world.api.events.pod(namespace, "p", "u", "Warning", "Refused", "no room")
    world.wait(lambda: world.api.state.events_dropped == 2)
    assert world.api.state.error == ""


def test_deletions_with_and_without_grace_of_pods_of_any_size(world: World) -> None:
    """Annotations of one pod may have 256 KiB; each of these bytes is six in JSON."""
    large = {"text": "\x01" * ((256 << 10) - 10)}
    before = world.add_pod("before", annotations=large)
    world.api.start()
    later = world.add_pod("later", annotations=large, restart_policy="OnFailure")
    world.add_pod("elsewhere", node=world.elsewhere)
    world.wait(lambda: world.api.pods.restart_policy(later) == "OnFailure")
    assert world.api.pods.restart_policy(before) == "Always"
    world.delete_pod("elsewhere", 0)
    world.delete_pod("before", 17)
    world.delete_pod("before", 0)
    world.delete_pod("later", 0)
    world.wait(lambda: world.api.state.pods == 0)
    world.wait(lambda: world.told == [("before", 17.0), ("later", 0.0)])


def test_bookmarks_bring_the_version_of_what_is_none_of_ours(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WATCH_S", 6.0)  # the server sends one about 2 s before the end
    client = ApiClient(world.access)
    ours = {"fieldSelector": f"spec.nodeName={world.node}"}
    _, version = client.list(PODS, ours, ApiPod)
    watch = client.watch(PODS, ours, version)
    world.add_pod("elsewhere", node=world.elsewhere)
    events = list(watch)
    watch.release()
    client.close()
    assert events
    assert {event.type for event in events} == {"BOOKMARK"}
    pod = msgspec.json.decode(events[-1].object, type=ApiPod)
    assert int(pod.metadata.resource_version) > int(version)


# --- rights and credentials ----------------------------------------------------------------------------------------


def granted() -> list[tuple[str, str]]:
    """The rights of deploy/rbac.yaml: verb and resource."""
    (role,) = (thing for thing in yaml.safe_load_all(RBAC.read_text()) if thing["kind"] == "ClusterRole")
    return [(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]]


@pytest.mark.parametrize("missing", granted(), ids=lambda right: "-".join(right).replace("/", "-"))
def test_each_right_is_needed_and_the_rest_goes_on_without_it(world: World, missing: tuple[str, str]) -> None:
    verb, resource = missing
    uid = world.add_pod("p")
    expected = {
        "condition": missing != ("patch", "nodes/status"),
        "label": missing != ("patch", "nodes/status"),
        "since": missing not in (("patch", "nodes/status"), ("get", "nodes")),
        "pod": missing != ("list", "pods"),
        "deletion": resource != "pods",
        "event": missing != ("create", "events"),
        "repeat": resource != "events",
    }

    def found() -> dict[str, bool]:
        return {
            "condition": world.condition().get("status") == "True",
            "label": world.label() == "615",
            "since": world.condition().get("lastTransitionTime") == LONG_AGO,
            "pod": world.api.pods.restart_policy(uid) is not None,
            "deletion": bool(world.told),
            "event": bool(world.events()),
            "repeat": world.events() == [("p", "no room", 2)],
        }

    world.server.set_condition(world.node, {"type": CONDITION, "status": "True", "lastTransitionTime": LONG_AGO})
    if not expected["condition"]:
        world.server.set_condition(world.node, {"type": CONDITION, "$patch": "delete"})
    world.show(world.server.account_with([right for right in granted() if right != missing]))
    world.api.start()
    for count in (1, 2):
        world.api.events.pod(world.namespace, "p", uid, "Warning", "Refused", "no room")
        world.wait(partial(lambda least: sum(_handled(world)) >= least, count))
    if missing != ("get", "nodes"):
        world.wait(lambda: f'cannot {verb} resource "{resource}"' in world.api.state.error, "the refusal")
        assert resource == "events" or "; grant it as deploy/rbac.yaml does" in world.api.state.error
    world.delete_pod("p", 20)
    world.wait(lambda: found() == expected, f"{expected}")
    assert _handled(world) == {("create", "events"): (0, 2), ("patch", "events"): (1, 1)}.get(missing, (2, 0))


def _handled(world: World) -> tuple[int, int]:
    return world.api.state.events_sent, world.api.state.events_dropped


def test_a_token_that_is_not_taken_and_one_that_is(world: World) -> None:
    world.show("nonsense")
    world.api.start()
    world.wait(lambda: "401 Unauthorized" in world.api.state.error)
    world.show(world.server.token("gpufrac", "gpufrac"))
    world.works()
    world.show(world.server.token("gpufrac", "gpufrac"))
    world.works()


def test_a_client_certificate_of_a_kubeconfig(world: World) -> None:
    world.server.bind("User", "somebody", granted())
    shown = certificate("somebody", issuer=world.server.authority)
    (world.directory / "client.crt").write_bytes(shown.pem)
    (world.directory / "client.key").write_bytes(shown.key_pem)
    config = {
        "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": world.server.url, "certificate-authority": "ca.crt"}}],
        "users": [{"name": "a", "user": {"client-certificate": "client.crt", "client-key": "client.key"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }
    (world.directory / "config").write_text(json.dumps(config))
    world.api = world.make(Access(str(world.directory / "config")))
    world.api.start()
    world.works()


def test_a_node_of_another_name(world: World) -> None:
    world.api = world.make(node="nobody")
    world.api.start()
    world.wait(lambda: 'nodes "nobody" not found; set kubernetes.nodeName' in world.api.state.error)


# --- outages -------------------------------------------------------------------------------------------------------


@restarts
def test_a_server_that_is_killed_under_a_watch_and_comes_again(world: World) -> None:
    """It takes requests before it knows the roles, and remembers no version from before."""
    uid = world.add_pod("meanwhile")
    world.api.start()
    world.works()
    client = ApiClient(world.access)
    _, version = client.list(PODS, {}, ApiPod)
    world.add_pod("elsewhere", node=world.elsewhere)
    world.server.stop()
    world.say(READY if world.readiness == NOT else NOT)
    world.api.events.pod(world.namespace, "meanwhile", uid, "Warning", "Refused", "while it was away")
    world.wait(lambda: world.api.state.connected is False)
    world.server.start()
    world.delete_pod("meanwhile", 15)
    world.wait(lambda: ("meanwhile", 15.0) in world.told)
    world.wait(lambda: ("meanwhile", "while it was away", 1) in world.events())
    world.reported()
    watch = client.watch(PODS, {}, version)
    with pytest.raises(GoneError, match="410 too old resource version"):
        list(watch)
    watch.release()
    client.close()
    world.works()


@restarts
def test_a_store_that_was_put_back_to_an_earlier_state(world: World) -> None:
    world.add_pod("early")
    world.api.start()
    world.works()
    earlier = world.server.copy_store()
    late = [world.add_pod(f"late{number}") for number in range(3)]
    world.wait(lambda: all(world.api.pods.restart_policy(uid) for uid in late))
    world.server.stop()
    world.server.stop_etcd()
    world.wait(lambda: world.api.state.connected is False)
    world.server.start_etcd(earlier)
    world.server.start()
    world.wait(lambda: {(f"late{number}", 0.0) for number in range(3)} <= set(world.told), "what is gone", 30.0)
    world.delete_pod("early", 20)
    world.wait(lambda: ("early", 20.0) in world.told, "a deletion after that")
    client = ApiClient(world.access)
    with pytest.raises(ServerError, match="504 Timeout: Too large resource version") as caught:
        client.list(PODS, {"resourceVersion": "1000000", "resourceVersionMatch": "NotOlderThan"}, ApiPod)
    client.close()
    assert caught.value.retry_after_s == 1.0


# --- the stub ------------------------------------------------------------------------------------------------------

Ask = tuple[str, str, Any, str]
MERGED = STRATEGIC_MERGE


def event(namespace: str, name: str, about: str | None = None, kind: str = "Pod") -> dict[str, Any]:
    involved = {"kind": kind, "name": "p", **({"namespace": about or namespace} if about != "" else {})}
    return {"metadata": {"namespace": namespace, "name": name}, "involvedObject": involved, "count": 1}


def asks(namespace: str, going: str, node: str) -> dict[str, Ask]:
    events, ours = f"/api/v1/namespaces/{namespace}/events", f"{PODS}?fieldSelector=spec.nodeName%3D{node}"
    condition = {"conditions": [{"type": "T", "status": "True"}]}
    label = {"labels": {"a": "b"}}
    return {
        "no such node": ("GET", "/api/v1/nodes/none", None, ""),
        "the status of no such node": ("PATCH", "/api/v1/nodes/none/status", {"status": condition}, MERGED),
        "a label by the status": ("PATCH", f"/api/v1/nodes/{node}/status", {"metadata": label}, MERGED),
        "a condition": ("PATCH", f"/api/v1/nodes/{node}/status", {"status": condition}, MERGED),
        "a condition by the node": ("PATCH", f"/api/v1/nodes/{node}", {"status": {"phase": "Pending"}}, MERGED),
        "a condition less": (
            "PATCH",
            f"/api/v1/nodes/{node}/status",
            {"status": {"conditions": [{"type": "T", "$patch": "delete"}]}},
            MERGED,
        ),
        "no kind of patch": ("PATCH", f"/api/v1/nodes/{node}", {"metadata": label}, "application/json"),
        "a selector": ("GET", f"{PODS}?fieldSelector=spec.nothing%3Dn1", None, ""),
        "a list": ("GET", f"{ours}&resourceVersion=0&resourceVersionMatch=NotOlderThan", None, ""),
        "a version to come": ("GET", f"{ours}&resourceVersion=99999999&resourceVersionMatch=NotOlderThan", None, ""),
        "a match without a version": ("GET", f"{ours}&resourceVersionMatch=NotOlderThan", None, ""),
        "a watch with a match": ("GET", f"{ours}&watch=1&resourceVersion=1&resourceVersionMatch=Exact", None, ""),
        "a watch from what is to come": ("GET", f"{ours}&watch=1&resourceVersion=99999999&timeoutSeconds=1", None, ""),
        "an event": ("POST", events, event(namespace, "e"), "application/json"),
        "the same event": ("POST", events, event(namespace, "e"), "application/json"),
        "more of it": ("PATCH", f"{events}/e", {"count": 2}, MERGED),
        "more of none": ("PATCH", f"{events}/none", {"count": 2}, MERGED),
        "an event elsewhere": ("POST", events, event("elsewhere", "f"), "application/json"),
        "an event about elsewhere": ("POST", events, event(namespace, "f", "elsewhere"), "application/json"),
        "an event about a node": ("POST", events, event(namespace, "f", "", "Node"), "application/json"),
        "an event in what goes": ("POST", events.replace(namespace, going), event(going, "f"), "application/json"),
        "nothing there": ("GET", "/api/v1/nothing", None, ""),
    }


def _answer(connection: http.client.HTTPConnection, ask: Ask, token: str) -> tuple[int, object, object, str | None]:
    """Code, reason and text of a refusal, or nothing of them, and when to come again."""
    method, path, body, kind = ask
    headers = {"Authorization": f"Bearer {token}", **({"Content-Type": kind} if kind else {})}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    data = answer.read()
    said = json.loads(data) if answer.status >= 300 else {}
    text = str(said.get("message", "")).partition(", current:")[0]
    return answer.status, said.get("reason"), text, answer.getheader("Retry-After")


@pytest.fixture
def pair(world: World) -> Iterator[Callable[[Ask, str], tuple[Any, Any]]]:
    """What the stub and the real server say, of whom the token is known or has no rights."""
    going = f"{world.namespace}-going"
    world.server.add_namespace(going)
    world.server.end_namespace(going)
    with StubApiServer([world.node], tokens={world.server.admin, world.server.nobody}) as stub:
        stub.terminating.add(going)
        connections = http.client.HTTPConnection("127.0.0.1", stub.port), world.server.connect()

        def ask(one: Ask, token: str) -> tuple[Any, Any]:
            stub.allowed = () if token == world.server.nobody else None
            said, real = (_answer(connection, one, token) for connection in connections)
            code, reason, text, retry = said
            return (code, reason, str(text).replace("system:serviceaccount:gpufrac:gpufrac", "nobody"), retry), real

        yield ask
        for connection in connections:
            connection.close()


def test_the_stub_answers_as_a_real_server_does(world: World, pair: Callable[[Ask, str], tuple[Any, Any]]) -> None:
    every = asks(world.namespace, f"{world.namespace}-going", world.node)
    answers = {name: pair(ask, world.server.admin) for name, ask in every.items()}
    assert {name: stub for name, (stub, _) in answers.items()} == {name: real for name, (_, real) in answers.items()}


def test_the_stub_refuses_as_a_real_server_does(world: World, pair: Callable[[Ask, str], tuple[Any, Any]]) -> None:
    every = asks(world.namespace, f"{world.namespace}-going", world.node)
    del every["nothing there"]
    for token in (world.server.nobody, "nonsense"):
        answers = {name: pair(ask, token) for name, ask in every.items()}
        assert {name: stub for name, (stub, _) in answers.items()} == {n: real for n, (_, real) in answers.items()}


def test_the_stub_changes_a_node_as_a_real_server_does(world: World) -> None:
    def changed(connection: http.client.HTTPConnection) -> tuple[Any, Any]:
        for name in ("a condition", "a label by the status", "a condition by the node"):
            ask = asks(world.namespace, "", world.node)[name]
            assert _answer(connection, ask, world.server.admin)[0] == 200
        connection.request(
            "GET", f"/api/v1/nodes/{world.node}", headers={"Authorization": f"Bearer {world.server.admin}"}
        )
        node = json.loads(connection.getresponse().read())
        connection.close()
        conditions = {(one["type"], one["status"]) for one in node["status"]["conditions"]}
        return node["metadata"]["labels"], (conditions, node["status"].get("phase"))

    with StubApiServer([world.node]) as stub:
        assert changed(http.client.HTTPConnection("127.0.0.1", stub.port)) == changed(world.server.connect())
