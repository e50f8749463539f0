"""The configuration file of protocol 3 (`-a`): its keys and their types. Imported only where there is a file.

Sources: 'MPS v3 Configuration File', releases 615 and, as far as published, 620.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any


class ConfigError(Exception):
    """The file cannot be used; its text says why."""


Keys = dict[str, type]

_NAMESPACE: Keys = {"pinned_memory_limit": str, "active_thread_percentage": str, "client_priority": str}
_SERVER: Keys = {
    **_NAMESPACE,
    "allowed_devices": str,
    "uid": int,
    "locality_domains": bool,
    "namespaces": dict,
}
_TOP: Keys = {"schema_version": str, "servers": dict, "features": dict}
_FEATURES: Keys = {"memacct": dict, "context-share": dict}
_MEMACCT: Keys = {"enabled": bool, "audit_log": bool}
_CONTEXT_SHARE: Keys = {"enabled": bool, "default_socket": str}

_SINCE_620: dict[str, Keys] = {
    "top": {"compute_policy": dict},
    "server": {"timeslice_pct": str},
    "namespace": {"cgroup": str, "cgroup_depth": int},
    "memacct": {"force_polling": bool},
}
_COMPUTE_POLICY: Keys = {"timeslice": str, "timeslice_yield_level": int}


class ServerConfig:
    """`[servers.<n>]`. `options` and the namespaces' are named and written as on the command line."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.namespaces: dict[str, dict[str, str]] = {}


class Config:
    """A whole file; what it leaves out has its documented default."""

    def __init__(self) -> None:
        self.servers: dict[str, ServerConfig] = {}
        self.memacct = True
        self.audit_log = False
        self.context_share = True
        self.default_socket = True


class _Reader:
    def __init__(self, driver_major: int, unknown: str) -> None:
        self._newer = driver_major >= 620
        self._unknown = unknown
        self.stray = False
        """An unknown key was met since this was last cleared, and tolerated."""

    def table(self, value: Mapping[str, Any], place: str, keys: Keys, kind: str) -> dict[str, Any]:
        """The known keys of a table. Raises ConfigError."""
        allowed = {**keys, **_SINCE_620.get(kind, {})} if self._newer else keys
        known = {}
        for key, entry in value.items():
            path = f"{place}.{key}" if place else key
            wanted = allowed.get(key)
            if wanted is None:
                if self._unknown == "refuse":
                    raise ConfigError(f"Configuration error: unknown key '{path}'")
                self.stray = True
            elif type(entry) is not wanted:
                raise ConfigError(f"Configuration error: '{path}' must be of type {wanted.__name__}")
            else:
                known[key] = entry
        return known

    def tables(self, value: Mapping[str, Any], place: str) -> dict[str, dict[str, Any]]:
        for name, entry in value.items():
            if type(entry) is not dict:
                raise ConfigError(f"Configuration error: '{place}.{name}' must be a table")
        return dict(value)


def parse_config(text: str, driver_major: int, unknown: str) -> Config:
    """The configuration in a file's text. Raises ConfigError.

    `unknown` says what an unknown key does: refuse, ignore, or vanish (the server it stands in is left out).
    """
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Configuration error: {error}") from error
    reader = _Reader(driver_major, unknown)
    config = Config()
    top = reader.table(value, "", _TOP, "top")
    reader.table(top.get("compute_policy", {}), "compute_policy", _COMPUTE_POLICY, "")
    features = reader.table(top.get("features", {}), "features", _FEATURES, "features")
    memacct = reader.table(features.get("memacct", {}), "features.memacct", _MEMACCT, "memacct")
    config.memacct = memacct.get("enabled", True)
    config.audit_log = memacct.get("audit_log", False)
    sharing = reader.table(features.get("context-share", {}), "features.context-share", _CONTEXT_SHARE, "sharing")
    config.context_share = sharing.get("enabled", True)
    socket = sharing.get("default_socket", "on")
    if socket not in ("on", "off"):
        raise ConfigError('Configuration error: \'features.context-share.default_socket\' must be "on" or "off"')
    config.default_socket = socket == "on"
    for name, entry in reader.tables(top.get("servers", {}), "servers").items():
        reader.stray = False
        server = _server(reader, entry, f"servers.{name}")
        if not (reader.stray and unknown == "vanish"):
            config.servers[name] = server
    return config


def _server(reader: _Reader, entry: Mapping[str, Any], place: str) -> ServerConfig:
    server = ServerConfig()
    known = reader.table(entry, place, _SERVER, "server")
    server.options = _options(known)
    for name, limits in reader.tables(known.get("namespaces", {}), f"{place}.namespaces").items():
        path = f"{place}.namespaces.{name}"
        namespace = reader.table(limits, path, _NAMESPACE, "namespace")
        server.namespaces[name] = _options(namespace)
    return server


def _options(known: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a table as options of the command line; what only 620 knows has no effect here."""
    options = {}
    for key, entry in known.items():
        if key in _SERVER and not isinstance(entry, dict | list):
            text = str(entry).lower() if isinstance(entry, bool) else str(entry)
            options[key.replace("_", "-")] = text
    return options
