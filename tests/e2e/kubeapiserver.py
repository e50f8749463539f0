"""A kube-apiserver of a test's own, with its etcd. All that they keep is in the test's directory, both listen on
loopback only, and both end with us, however we end.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.unit.deviceplugin.kubernetes.certificates import certificate
from tests.waiting import WAIT_S

VARIABLE = "GPUFRAC_KUBE_APISERVER"
OLDEST = (1, 20)
"""The oldest that was tried; resourceVersionMatch came with 1.19."""
_SERVERS = ("kube-apiserver", "kube-apiserver-1.20")
START_S = 40.0

_RBAC = "rbac.authorization.k8s.io"

Object = dict[str, Any]


def why_not() -> str:
    """Why these tests can't run here; "" when they can."""
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return f"{VARIABLE} names no directory with bin/etcd and bin/kube-apiserver"
    if not os.access(os.path.join(directory, "bin", "etcd"), os.X_OK):
        return f"{VARIABLE}={directory} has no bin/etcd"
    if not (server := _server()):
        return f"{VARIABLE}={directory} has no bin/kube-apiserver"
    if shutil.which("setpriv") is None:
        return "needs setpriv"
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False, timeout=WAIT_S).stdout
    if not (match := re.search(r"v(\d+)\.(\d+)\.", said)) or (int(match[1]), int(match[2])) < OLDEST:
        return f"{server} is {said.strip() or 'no working server'}, these tests need 1.20 or later"
    return ""


def _server() -> str:
    paths = (os.path.join(os.environ.get(VARIABLE, ""), "bin", name) for name in _SERVERS)
    return next((path for path in paths if os.access(path, os.X_OK)), "")


class RefusedError(Exception):
    """What the server refused to an administrator."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code


class KubeApiserver:
    """Both run within `with`; `stop`, `start` and their like are for tests that take one away.

    Args:
        directory: an absolute path, the test's to remove.
        flags: more of the server's command line.
    """

    admin, nobody = "admin-of-a-test", "nobody-of-a-test"
    """Tokens: of who may do everything, and of a user `nobody` without any right."""

    def __init__(self, directory: Path, flags: Sequence[str] = ()) -> None:
        self.directory, self._flags = directory, tuple(flags)
        self.etcd_port, self.port = _free_ports(2)
        self.authority = certificate("ca-of-a-test")
        self._log: IO[bytes] | None = None
        self._etcd: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._store = "etcd"
        self._count = 0
        shown = certificate("kube-apiserver", "127.0.0.1", issuer=self.authority)
        for name, data in (
            ("ca.crt", self.authority.pem),
            ("server.crt", shown.pem),
            ("server.key", shown.key_pem),
            ("accounts.key", certificate("accounts").key_pem),
            ("tokens.csv", f"{self.admin},admin,1,system:masters\n{self.nobody},nobody,2\n".encode()),
        ):
            (directory / name).write_bytes(data)
        self._context = ssl.create_default_context(cafile=str(directory / "ca.crt"))

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "KubeApiserver":
        try:
            self._log = open(self.directory / "log", "ab")
            self.start_etcd()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start_etcd(self, store: str = "") -> None:
        """With the objects of last time, or those of another store."""
        self._store = store or self._store
        url = f"http://127.0.0.1:{self.etcd_port}"
        self._etcd = self._spawn(
            os.path.join(os.environ[VARIABLE], "bin", "etcd"),
            f"--data-dir={self.directory / self._store}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:0",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        wait("etcd", lambda: _answers(self.etcd_port), START_S)

    def start(self) -> None:
        """Starts the server and waits until it is ready."""
        self.launch()
        wait("kube-apiserver", self._ready, START_S)

    def launch(self) -> None:
        """Starts the server without waiting."""
        here = self.directory
        self._process = self._spawn(
            _server(),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--etcd-compaction-interval=0",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={here}",
            f"--tls-cert-file={here}/server.crt",
            f"--tls-private-key-file={here}/server.key",
            f"--client-ca-file={here}/ca.crt",
            f"--token-auth-file={here}/tokens.csv",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-key-file={here}/accounts.key",
            f"--service-account-signing-key-file={here}/accounts.key",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            *self._flags,
        )

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the server; etcd stays."""
        process, self._process = self._process, None
        _end(process, how)

    def revive(self) -> None:
        """Starts what a test left stopped."""
        if self._etcd is None:
            self.start_etcd()
        if self._process is None:
            self.start()

    def copy_store(self) -> str:
        """A copy of all objects as they are; the server waits for its store meanwhile."""
        self._count += 1
        name = f"copy{self._count}"
        self.stop_etcd()
        shutil.copytree(self.directory / self._store, self.directory / name)
        self.start_etcd()
        wait("the store", self._ready, START_S)
        return name

    def stop_etcd(self) -> None:
        process, self._etcd = self._etcd, None
        _end(process, signal.SIGKILL)

    def close(self) -> None:
        self.stop()
        self.stop_etcd()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self.directory,
        )

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"kube-apiserver ended: {(self.directory / 'log').read_text()[-4000:]}")
        try:
            self.ask("GET", "/readyz")
        except (OSError, http.client.HTTPException, RefusedError):
            return False
        return True

    # --- what an administrator does ------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        """One request with all rights. Raises RefusedError."""
        connection = self.connect()
        try:
            headers = {"Authorization": f"Bearer {self.admin}", "Content-Type": kind}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RefusedError(answer.status, data.decode(errors="replace"))
        return dict(json.loads(data)) if data.startswith(b"{") else {"text": data.decode()}

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10.0, context=self._context)

    def clock(self) -> str:
        """The time of now as objects have it."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def add_namespace(self, name: str) -> None:
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def end_namespace(self, name: str) -> None:
        """From then on it is being terminated: nobody is there who would end it."""
        self.ask("DELETE", f"/api/v1/namespaces/{name}")

    def add_node(self, name: str) -> None:
        """A node that its kubelet has said one word of."""
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), "2020-01-01T00:00:00Z")
        self.set_condition(name, {"type": "Ready", "status": "True", "reason": "KubeletReady", **times})

    def set_condition(self, node: str, condition: Object) -> None:
        body = {"status": {"conditions": [condition]}}
        self.ask("PATCH", f"/api/v1/nodes/{node}/status", body, "application/strategic-merge-patch+json")

    def node(self, name: str) -> Object:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def conditions(self, node: str) -> dict[str, Object]:
        """By type."""
        return {one["type"]: one for one in self.node(node)["status"].get("conditions", ())}

    def add_pod(
        self,
        namespace: str,
        name: str,
        *,
        node: str,
        restart_policy: str = "Always",
        annotations: Mapping[str, str] | None = None,
    ) -> str:
        """A pod that is bound to a node; its UID."""
        container = {"name": "main", "image": "none"}
        spec = {
            "nodeName": node,
            "restartPolicy": restart_policy,
            "containers": [container],
            "initContainers": [{"name": "first", "image": "none"}],
        }
        pod = {"metadata": {"name": name, "annotations": dict(annotations or {})}, "spec": spec}
        return str(self.ask("POST", f"/api/v1/namespaces/{namespace}/pods", pod)["metadata"]["uid"])

    def delete_pod(self, namespace: str, name: str, grace_s: int) -> None:
        """With a grace of 0 it is gone at once, as when its kubelet has ended it."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace_s}
        self.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", options)

    def events(self, namespace: str) -> list[Object]:
        return list(self.ask("GET", f"/api/v1/namespaces/{namespace}/events")["items"])

    def create(self, manifest: Object, query: str = "") -> None:
        """One of the kinds that deploy/gpufrac.yaml has."""
        group, _, version = manifest["apiVersion"].rpartition("/")
        namespace = manifest["metadata"].get("namespace")
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        kinds = f"{manifest['kind'].lower()}s".replace("policys", "policies")
        self.ask("POST", f"{base}{f'/namespaces/{namespace}' if namespace else ''}/{kinds}{query}", manifest)

    def token(self, namespace: str, account: str) -> str:
        """A new one for a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.ask("POST", path, {"spec": {}})["status"]["token"])

    def bind(self, kind: str, name: str, rights: Sequence[tuple[str, str]]) -> None:
        """Grants a user or a service account of namespace `default` these rights (verb and resource), and waits until
        the server knows of them."""
        metadata = {"name": f"test-of-{name}"}
        role = {"apiGroup": _RBAC, "kind": "ClusterRole", **metadata}
        user, subject = name, {"apiGroup": _RBAC, "kind": kind, "name": name}
        if kind == "ServiceAccount":
            user = f"system:serviceaccount:default:{name}"
            subject = {"kind": kind, "name": name, "namespace": "default"}
        rules = [{"apiGroups": [""], "resources": [resource], "verbs": [verb]} for verb, resource in rights]
        head = {"apiVersion": f"{_RBAC}/v1", "metadata": metadata}
        self.create({**head, "kind": "ClusterRole", "rules": rules})
        self.create({**head, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]})
        wait("the rights", lambda: all(self._may(user, *right) for right in rights))

    def _may(self, user: str, verb: str, resource: str) -> bool:
        kind, _, part = resource.partition("/")
        spec = {"user": user, "resourceAttributes": {"verb": verb, "resource": kind, "subresource": part}}
        review = self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
        return bool(review["status"]["allowed"])

    def account_with(self, rights: Sequence[tuple[str, str]]) -> str:
        """The token of a new service account with these rights: verb and resource."""
        self._count += 1
        name = f"account{self._count}"
        metadata = {"name": name, "namespace": "default"}
        self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        self.bind("ServiceAccount", name, rights)
        return self.token("default", name)


def wait(what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come in {timeout_s:.0f} s"
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    if process is not None:
        process.send_signal(how)
        process.wait(WAIT_S)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
