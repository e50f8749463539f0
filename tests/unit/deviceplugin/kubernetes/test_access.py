"""Credentials: where they come from, what is refused, and that they are read anew as they change."""

import base64
import json
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.kubernetes import access as access_module
from deviceplugin.kubernetes.access import (
    MAX_FILE_BYTES,
    Access,
    Endpoint,
    in_cluster,
    node_name,
    parse_kubeconfig,
    parse_server,
)
from deviceplugin.kubernetes.errors import AccessError
from tests.unit.deviceplugin.kubernetes.certificates import certificate

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def kubeconfig(
    cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    return {
        "current-context": "here",
        "clusters": [
            {"name": "other", "cluster": {"server": "https://other"}},
            {"name": "c", "cluster": {"server": "https://api.example.org:6443", **(cluster or {})}},
        ],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "preferences": {},
        **changes,
    }


def parse(config: object, path: str = "/etc/k/config") -> Endpoint:
    return parse_kubeconfig(json.dumps(config).encode(), path)


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# --- in a cluster --------------------------------------------------------------------------------------------------


def test_a_pod_has_its_service_account() -> None:
    endpoint = in_cluster(POD, "/sa")
    assert (endpoint.url, endpoint.ca_file, endpoint.token_file) == (
        "https://10.96.0.1:443",
        "/sa/ca.crt",
        "/sa/token",
    )
    assert in_cluster({**POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"


@pytest.mark.parametrize(
    "environ", [{}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, {**POD, "KUBERNETES_SERVICE_HOST": ""}]
)
def test_outside_of_a_pod_it_says_so(environ: dict[str, str]) -> None:
    with pytest.raises(AccessError, match=r"not set, as outside of a pod; set kubernetes\.access"):
        in_cluster(environ)


@pytest.mark.parametrize("port", ["https", "0", "65536", "-1", "443 ", "9" * 5000, "\u0663"])
def test_a_port_is_a_port(port: str) -> None:
    with pytest.raises(AccessError, match="is no port"):
        in_cluster({**POD, "KUBERNETES_SERVICE_PORT": port})


# --- kubeconfigs ---------------------------------------------------------------------------------------------------


def test_the_current_context_counts_and_paths_are_beside_the_file() -> None:
    endpoint = parse(
        kubeconfig(
            {"certificate-authority": "pki/ca.crt", "tls-server-name": "kubernetes"},
            {"client-certificate": "/abs/c.pem", "client-key": "c.key", "tokenFile": "token", "token": "unused"},
        )
    )
    assert endpoint.url == "https://api.example.org:6443"
    assert endpoint.files == ("/etc/k/pki/ca.crt", "/abs/c.pem", "/etc/k/c.key")
    assert (endpoint.token_file, endpoint.token, endpoint.server_name) == ("/etc/k/token", "", "kubernetes")
    assert endpoint.verify


def test_data_goes_before_files() -> None:
    endpoint = parse(
        kubeconfig(
            {"certificate-authority": "ca", "certificate-authority-data": data("CA")},
            {
                "client-certificate": "c",
                "client-key": "k",
                "client-certificate-data": data("CERT"),
                "client-key-data": data("KEY"),
                "token": "secret",
            },
        )
    )
    assert endpoint.files == ()
    assert (endpoint.ca_pem, endpoint.certificate_pem, endpoint.key_pem) == (b"CA", b"CERT", b"KEY")
    assert endpoint.token == "secret"


def test_it_may_be_yaml_and_insecure_on_purpose() -> None:
    text = """
    apiVersion: v1
    kind: Config
    current-context: a
    contexts: [{name: a, context: {cluster: b}}]
    clusters: [{name: b, cluster: {server: "http://127.0.0.1:8001/proxy/", insecure-skip-tls-verify: true}}]
    users: null
    """
    endpoint = parse_kubeconfig(text.encode(), "/k")
    assert (endpoint.url, endpoint.tls, endpoint.verify) == ("http://127.0.0.1:8001/proxy", False, False)


def test_secrets_are_not_shown() -> None:
    endpoint = parse(kubeconfig(user={"token": "secret"}))
    assert "secret" not in repr(endpoint)
    with pytest.raises(AccessError) as caught:
        parse(kubeconfig(user={"token": "secret one"}))
    assert "secret" not in str(caught.value)


CA = {"certificate-authority": "ca"}
REFUSALS: dict[str, tuple[Any, str]] = {
    "empty": ({}, "no current-context"),
    "list": ([], "Expected `object`"),
    "null": (None, "Expected `object`"),
    "unknown context": ({**kubeconfig(), "current-context": "gone"}, "no context 'gone'"),
    "no clusters": (kubeconfig(clusters=None), "no cluster 'c'"),
    "no users": (kubeconfig(users=[]), "no user 'u'"),
    "number": (kubeconfig(user={"token": 12}), "Expected `str | null`, got `int`"),
    "exec": (kubeconfig(user={"exec": {"command": "aws"}}), "user 'u' has exec, and a credential program is not"),
    "provider": (kubeconfig(user={"auth-provider": {"name": "gcp"}}), "has auth-provider"),
    "basic": (kubeconfig(user={"username": "a", "password": "b"}), "has username"),
    "password": (kubeconfig(user={"password": "b"}), "has password"),
    "impersonation": (kubeconfig(user={"as": "root", "token": "a"}), "has as, and acting as somebody else"),
    "groups": (kubeconfig(user={"as-groups": ["x"]}), "has as-groups"),
    "proxy": (kubeconfig({"proxy-url": "http://p"}), "has proxy-url"),
    "both": (kubeconfig({"insecure-skip-tls-verify": True, **CA}), "remove one of them"),
    "half a pair": (kubeconfig(user={"client-certificate": "c"}), "without its key"),
    "other half": (kubeconfig(user={"client-key-data": data("k")}), "a key without its certificate"),
    "base64": (kubeconfig({"certificate-authority-data": "a*b"}), "certificate-authority-data is no base64"),
    "no server": (kubeconfig({"server": ""}), "is no http:// or https:// URL"),
    "scheme": (kubeconfig({"server": "ftp://x"}), "is no http:// or https:// URL"),
    "port": (kubeconfig({"server": "https://x:y"}), "is no URL"),
    "query": (kubeconfig({"server": "https://x/?a"}), "nothing else"),
    "user in URL": (kubeconfig({"server": "https://a:b@x/"}), "nothing else"),
    "control": (kubeconfig({"server": "https://x/\u0007"}), "is no http:// or https:// URL"),
    "bracket": (kubeconfig({"server": "https://[::1"}), "is no URL"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_what_can_not_be_used_is_said_with_the_file(case: tuple[Any, str]) -> None:
    config, said = case
    with pytest.raises(AccessError) as caught:
        parse(config)
    assert str(caught.value).startswith("cannot use kubeconfig /etc/k/config: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", [b"a: [", b"\xff\xfe\x00", b"{{{{", b"- &a [*a]", b"!!python/object:os.system {}"])
def test_any_bytes_are_a_clear_error(text: bytes) -> None:
    with pytest.raises(AccessError, match="cannot use kubeconfig /k"):
        parse_kubeconfig(text, "/k")


def test_servers() -> None:
    assert parse_server("https://x") == ("x", 443, True, "")
    assert parse_server("http://x") == ("x", 80, False, "")
    assert parse_server("https://[fd00::1]:6443/k8s/clusters/c-1/") == ("fd00::1", 6443, True, "/k8s/clusters/c-1")


# --- files that change ---------------------------------------------------------------------------------------------


def test_a_kubeconfig_is_read_again_when_it_changed_or_was_missing(short_tmp: Path) -> None:
    path = short_tmp / "config"
    access = Access(str(path))
    with pytest.raises(AccessError, match=r"cannot read the kubeconfig .*: No such file"):
        access.endpoint()
    path.write_text(json.dumps(kubeconfig()))
    first = access.endpoint()
    assert access.endpoint() is first
    path.write_text(json.dumps(kubeconfig({"server": "https://new:1"})))
    assert access.endpoint().url == "https://new:1"


def test_a_token_is_read_again_when_the_kubelet_swaps_its_directory(short_tmp: Path) -> None:
    for name in ("one", "two"):
        (short_tmp / name).mkdir()
        (short_tmp / name / "token").write_text(f"token-{name}\n")
    (short_tmp / "..data").symlink_to("one")
    (short_tmp / "token").symlink_to("..data/token")
    access = Access("in-cluster", environ=POD, service_account=str(short_tmp))
    endpoint = access.endpoint()
    assert access.token(endpoint) == "token-one"
    (short_tmp / "new").symlink_to("two")
    os.replace(short_tmp / "new", short_tmp / "..data")
    assert access.token(endpoint) == "token-two"


def test_a_token_that_was_refused_is_read_again_though_nothing_seems_to_have_changed(short_tmp: Path) -> None:
    path = short_tmp / "token"
    path.write_text("token-1")
    before = path.stat()
    access = Access("in-cluster", environ=POD, service_account=str(short_tmp))
    endpoint = access.endpoint()
    assert access.token(endpoint) == "token-1"
    path.write_text("token-2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert access.token(endpoint) == "token-1"
    access.forget_token()
    assert access.token(endpoint) == "token-2"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"a b", "not one word"),
        (b"a\r\nX-Evil: 1", "not one word"),
        (b"\xff", ""),
    ],
)
def test_what_is_no_token_is_said_without_showing_it(short_tmp: Path, content: bytes, said: str) -> None:
    (short_tmp / "token").write_bytes(content)
    access = Access("in-cluster", environ=POD, service_account=str(short_tmp))
    with pytest.raises(AccessError, match=f"cannot use the token in .*{said}") as caught:
        access.token(access.endpoint())
    assert "Evil" not in str(caught.value)


def test_neither_pipes_nor_huge_files_are_read(short_tmp: Path) -> None:
    os.mkfifo(short_tmp / "pipe")
    with pytest.raises(AccessError, match="not a regular file"):
        Access(str(short_tmp / "pipe")).endpoint()
    with pytest.raises(AccessError, match="cannot read the kubeconfig"):
        Access(str(short_tmp)).endpoint()
    (short_tmp / "huge").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(AccessError, match="larger than"):
        Access(str(short_tmp / "huge")).endpoint()


# --- TLS -----------------------------------------------------------------------------------------------------------


def test_a_tls_context_is_kept_until_one_of_its_files_changes(short_tmp: Path) -> None:
    path = short_tmp / "ca.crt"
    access = Access("in-cluster", environ=POD, service_account=str(short_tmp))
    endpoint = access.endpoint()
    with pytest.raises(AccessError, match=r"cannot read the certificate authority .*ca\.crt: No such file"):
        access.context(endpoint)
    path.write_bytes("# zertifiziert für uns\n".encode() + certificate("one").pem)
    context = access.context(endpoint)
    assert access.context(endpoint) is context
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    path.write_bytes(certificate("another one").pem)
    assert access.context(endpoint) is not context


def test_what_is_no_certificate_is_a_clear_error(short_tmp: Path) -> None:
    (short_tmp / "ca.crt").write_text("no PEM")
    access = Access("in-cluster", environ=POD, service_account=str(short_tmp))
    with pytest.raises(AccessError, match=r"cannot use the certificate authority in .*ca\.crt"):
        access.context(access.endpoint())
    client = certificate("client")
    other = certificate("other")
    for key in (b"no key", other.key_pem, b""):
        endpoint = Endpoint(host="x", port=1, certificate_pem=client.pem, key_pem=key or b"-")
        with pytest.raises(AccessError, match="cannot use the client certificate in client-certificate-data"):
            access.context(endpoint)


def test_a_client_key_leaves_no_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(access_module, "_read", lambda path, *_: opened.append(path))
    client = certificate("client")
    endpoint = Endpoint(host="x", port=1, verify=False, certificate_pem=client.pem, key_pem=client.key_pem)
    context = Access("in-cluster").context(endpoint)
    assert context.verify_mode == ssl.CERT_NONE
    assert opened == []


# --- our node ------------------------------------------------------------------------------------------------------


def test_the_node_is_named_by_config_then_environment_then_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Host.Example.ORG")
    assert node_name("a", {"NODE_NAME": "b"}) == "a"
    assert node_name("", {"NODE_NAME": "b"}) == "b"
    assert node_name("", {}) == "host.example.org"
    monkeypatch.setattr("socket.gethostname", lambda: "")
    with pytest.raises(AccessError, match=r"set kubernetes\.nodeName"):
        node_name("", {})


@pytest.mark.parametrize("name", ["A", "a/../b", "-a", "a..b", "a b", "é", "a" * 254, "a\n", "."])
def test_a_name_that_is_none_never_gets_into_a_path(name: str) -> None:
    with pytest.raises(AccessError, match=r"NODE_NAME .* as the name of the node"):
        node_name("", {"NODE_NAME": name})
