"""Where the API server is, and what to show it: a service account or a kubeconfig, read anew as they change.

Nothing here talks to a server. A file that is missing now may come later, so every failure is an AccessError of the
request that met it, and the next request looks again.
"""

import base64
import binascii
import os
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from cdi.atomic import read_regular
from deviceplugin.kubernetes.errors import AccessError, shown

IN_CLUSTER = "in-cluster"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where the kubelet mounts the token and the server's CA."""
MAX_FILE_BYTES = 1 << 20
MAX_TOKEN_BYTES = 1 << 16

_TOKEN = re.compile(r"[\x21-\x7e]+")
_NODE_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain (RFC 1123): what Kubernetes takes as the name of a node."""

Identity = tuple[int, int, int, int]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a server. Of file and data only one is set each; `prefix` stands before `/api`."""

    host: str
    port: int
    tls: bool = True
    prefix: str = ""
    server_name: str = ""
    verify: bool = True
    ca_file: str = ""
    ca_pem: bytes = b""
    certificate_file: str = ""
    certificate_pem: bytes = b""
    key_file: str = ""
    key_pem: bytes = b""
    token: str = ""
    token_file: str = ""

    def __repr__(self) -> str:  # no key and no token gets into a log
        return f"Endpoint({self.url})"

    @property
    def url(self) -> str:
        """As a URL, for texts."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    @property
    def files(self) -> tuple[str, ...]:
        """Those a TLS context is made of."""
        return tuple(filter(None, (self.ca_file, self.certificate_file, self.key_file)))


class Access:
    """Credentials as they are now. Safe from several threads.

    Args:
        access: `in-cluster` or the path of a kubeconfig.
        environ, service_account: of this process, for `in-cluster`.
    """

    def __init__(
        self, access: str, *, environ: Mapping[str, str] = os.environ, service_account: str = SERVICE_ACCOUNT
    ) -> None:
        self._access, self._environ, self._service_account = access, environ, service_account
        self._lock = threading.Lock()
        self._endpoint: tuple[Identity | None, Endpoint] | None = None
        self._token: tuple[str, Identity | None, str] | None = None
        self._context: tuple[Endpoint, tuple[Identity | None, ...], ssl.SSLContext] | None = None

    def endpoint(self) -> Endpoint:
        """Where the server is. Raises AccessError."""
        if self._access == IN_CLUSTER:
            return in_cluster(self._environ, self._service_account)
        with self._lock:
            identity = _identity(self._access)
            if self._endpoint is None or identity is None or self._endpoint[0] != identity:
                self._endpoint = identity, parse_kubeconfig(_read(self._access, "kubeconfig"), self._access)
            return self._endpoint[1]

    def token(self, endpoint: Endpoint) -> str:
        """The bearer token of now, empty where another proof is used. Raises AccessError."""
        if not endpoint.token_file:
            return endpoint.token
        with self._lock:
            path = endpoint.token_file
            identity = _identity(path)
            if self._token is not None and self._token[:2] == (path, identity):
                return self._token[2]
            token = parse_token(_read(path, "token", MAX_TOKEN_BYTES), path)
            self._token = path, identity, token
            return token

    def forget_token(self) -> None:
        """The server doesn't take it: the next look reads the file again, also when it seems unchanged."""
        with self._lock:
            self._token = None

    def context(self, endpoint: Endpoint) -> ssl.SSLContext:
        """For a new connection; made again when a certificate was replaced. Raises AccessError."""
        with self._lock:
            identities = tuple(_identity(path) for path in endpoint.files)
            if self._context is not None and self._context[:2] == (endpoint, identities):
                return self._context[2]
            context = _context(endpoint)
            self._context = endpoint, identities, context
            return context


def node_name(configured: str, environ: Mapping[str, str] = os.environ) -> str:
    """The name of our node: configured, NODE_NAME, or the host's name as a kubelet takes it. Raises AccessError."""
    for name, source in (
        (configured, "kubernetes.nodeName"),
        (environ.get("NODE_NAME", ""), "NODE_NAME"),
        (socket.gethostname().strip().lower(), "the host's name"),
    ):
        if name:
            if not _NODE_NAME.fullmatch(name):
                raise AccessError(
                    f"cannot use {source} {shown(name)!r} as the name of the node: it is no DNS name in lower case; "
                    "set kubernetes.nodeName to what kubectl get nodes shows"
                )
            return name
    raise AccessError("cannot tell the name of the node: set kubernetes.nodeName, or NODE_NAME in the environment")


def in_cluster(environ: Mapping[str, str], service_account: str = SERVICE_ACCOUNT) -> Endpoint:
    """What the kubelet gives every pod with a service account. Raises AccessError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise AccessError(
            "cannot find the API server: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, as outside "
            "of a pod; set kubernetes.access to the path of a kubeconfig, or to off"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise AccessError(f"cannot use KUBERNETES_SERVICE_PORT {shown(port)!r}: it is no port")
    return Endpoint(
        host=host.strip("[]"),
        port=int(port),
        ca_file=os.path.join(service_account, "ca.crt"),
        token_file=os.path.join(service_account, "token"),
    )


def parse_token(data: bytes, path: str) -> str:
    """The token a file holds. Raises AccessError, whose text shows nothing of it."""
    token = data.decode("ascii", "replace").strip()
    if not token:
        raise AccessError(f"cannot use the token in {path}: the file is empty")
    if not _TOKEN.fullmatch(token):
        raise AccessError(f"cannot use the token in {path}: it is not one word of printable ASCII")
    return token


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool | None = None
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _User(msgspec.Struct, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: object = None
    password: object = None
    exec: object = None
    auth_provider: object = None
    as_user: object = msgspec.field(default=None, name="as")
    as_uid: object = None
    as_groups: object = None
    as_user_extra: object = None


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)


class _NamedUser(msgspec.Struct):
    name: str
    user: _User = msgspec.field(default_factory=_User)


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context = msgspec.field(default_factory=_Context)


_Named = TypeVar("_Named", _NamedCluster, _NamedUser, _NamedContext)


class _Kubeconfig(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None


_REFUSED = {
    "exec": "a credential program",
    "auth_provider": "a credential provider",
    "username": "a user name",
    "password": "a password",
    "as_user": "acting as somebody else",
    "as_uid": "acting as somebody else",
    "as_groups": "acting as somebody else",
    "as_user_extra": "acting as somebody else",
}


def parse_kubeconfig(data: bytes, path: str) -> Endpoint:
    """What the current context of a kubeconfig says. Relative paths are beside the file. Raises AccessError."""
    try:
        return _parse_kubeconfig(data, os.path.dirname(path))
    except AccessError as error:
        raise AccessError(f"cannot use kubeconfig {path}: {error}") from error


def _parse_kubeconfig(data: bytes, directory: str) -> Endpoint:
    import yaml

    try:
        loaded = yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
        config = msgspec.convert(loaded, _Kubeconfig)
    except yaml.YAMLError as error:
        raise AccessError(f"it is no YAML: {shown(str(error))}") from error
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise AccessError(shown(str(error))) from error
    if not config.current_context:
        raise AccessError("it has no current-context")
    context = _named(config.contexts, config.current_context, "context").context
    cluster = _named(config.clusters, context.cluster, "cluster").cluster
    user = _named(config.users, context.user, "user").user if context.user else _User()
    for field, meaning in _REFUSED.items():
        if getattr(user, field):
            key = {"as_user": "as"}.get(field, field.replace("_", "-"))
            raise AccessError(
                f"user {context.user!r} has {key}, and {meaning} is not supported; use a client certificate, a token "
                "or a tokenFile"
            )
    if cluster.proxy_url:
        raise AccessError(f"cluster {context.cluster!r} has proxy-url, and proxies are not supported")
    return _endpoint(cluster, user, directory)


def _endpoint(cluster: _Cluster, user: _User, directory: str) -> Endpoint:
    host, port, tls, prefix = parse_server(cluster.server)
    if cluster.insecure_skip_tls_verify and (cluster.certificate_authority or cluster.certificate_authority_data):
        raise AccessError("it has insecure-skip-tls-verify and a certificate authority; remove one of them")

    def beside(path: str | None) -> str:
        return os.path.join(directory, path) if path else ""

    ca_pem = _decoded(cluster.certificate_authority_data, "certificate-authority-data")
    certificate_pem = _decoded(user.client_certificate_data, "client-certificate-data")
    key_pem = _decoded(user.client_key_data, "client-key-data")
    token_file = beside(user.token_file)  # as in client-go, before `token`
    endpoint = Endpoint(
        host=host,
        port=port,
        tls=tls,
        prefix=prefix,
        server_name=cluster.tls_server_name or "",
        verify=not cluster.insecure_skip_tls_verify,
        ca_file="" if ca_pem else beside(cluster.certificate_authority),
        ca_pem=ca_pem,
        certificate_file="" if certificate_pem else beside(user.client_certificate),
        certificate_pem=certificate_pem,
        key_file="" if key_pem else beside(user.client_key),
        key_pem=key_pem,
        token="" if token_file or not user.token else parse_token(user.token.encode(), "`token`"),
        token_file=token_file,
    )
    if bool(endpoint.certificate_file or certificate_pem) != bool(endpoint.key_file or key_pem):
        raise AccessError("it has a client certificate without its key, or a key without its certificate")
    return endpoint


def parse_server(server: str) -> tuple[str, int, bool, str]:
    """Host, port, whether TLS, and path of a kubeconfig's `server`. Raises AccessError."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AccessError(f"server {shown(server)!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or not server.isprintable():
        raise AccessError(f"server {shown(server)!r} is no http:// or https:// URL")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise AccessError("server may have a host, a port and a path, nothing else")
    tls = parts.scheme == "https"
    return host, port or (443 if tls else 80), tls, parts.path.rstrip("/")


def _named(entries: "list[_Named] | None", name: str, kind: str) -> "_Named":
    for entry in entries or ():
        if entry.name == name:
            return entry
    raise AccessError(f"it has no {kind} {name!r}")


def _decoded(data: str | None, key: str) -> bytes:
    try:
        return base64.b64decode("".join((data or "").split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise AccessError(f"{key} is no base64: {error}") from error


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    # Not create_default_context(): from Python 3.13 on it demands extensions that many a cluster's CA lacks.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if not endpoint.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif endpoint.ca_file or endpoint.ca_pem:
            pem = endpoint.ca_pem or _read(endpoint.ca_file, "certificate authority")
            context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))  # comments may be in any tongue
        else:
            context.load_default_certs()
    except (ssl.SSLError, ValueError) as error:
        where = endpoint.ca_file or "certificate-authority-data"
        raise AccessError(f"cannot use the certificate authority in {where}: {shown(str(error))}") from error
    if endpoint.certificate_file or endpoint.certificate_pem:
        _load_client_certificate(context, endpoint)
    return context


def _load_client_certificate(context: ssl.SSLContext, endpoint: Endpoint) -> None:
    certificate = endpoint.certificate_pem or _read(endpoint.certificate_file, "client certificate")
    key = endpoint.key_pem or _read(endpoint.key_file, "client key")
    # The ssl module takes files only; this one has no name and is gone with its descriptor.
    descriptor = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")  # never asked for at a terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        where = endpoint.certificate_file or "client-certificate-data"
        raise AccessError(f"cannot use the client certificate in {where} with its key: {shown(str(error))}") from error
    finally:
        os.close(descriptor)


def _identity(path: str) -> Identity | None:
    """What changes when a file is written or replaced, also behind a symbolic link; None while it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: str, meaning: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    try:
        return read_regular(path, max_bytes=max_bytes)[0]
    except OSError as error:
        raise AccessError(f"cannot read the {meaning} {path}: {error.strerror}") from error
