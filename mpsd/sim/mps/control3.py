"""What a control daemon remembers and how it answers commands of protocol 3. Pure: effects are returned as actions.

Sources: 'MPS v3 Interface' and 'MPS v3 Namespaces' r615, captures of 615.71.09. Refusal texts other than the one about
privileges are guesses: a caller goes by the exit status. Over 400 lines: a method for each command of the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.sim.mps import table3
from mpsd.sim.mps.grammar3 import Command, parse
from mpsd.sim.mps.state3 import (
    DEFAULT,
    Namespace,
    Server3,
    check_name,
    read_field,
    read_number,
    read_percentage,
    read_size,
    read_truth,
)
from mpsd.sim.mps.views import ACTIVE, FAULT, INITIALIZING, ClientView, Limit, Refused, Settings
from mpsd.sim.pinnedlimits import resolve_device, show_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpsd.sim.mps.config3 import Config

MEMACCT, CONTEXT_SHARE = "memacct", "context-share"

TOTAL_SMS, CHUNKS = 132, 16
"""Of a Hopper GPU, as `device list` shows them (MPS documentation r615)."""

_SERVER_FIELDS = ("name", "uid", "pid", "status", "pipe-directory", "allowed-devices")
_NAMESPACE_FIELDS = (
    "name",
    "server",
    "server-status",
    "pinned-memory-limit",
    "active-thread-percentage",
    "client-priority",
    "pipe-directory",
)
_CLIENT_FIELDS = ("pid", "server", "device", "pci-id", "linux-ns", "maws-ns", "cmd")


Action3 = tuple[str, Server3, str]
"""make server; remove server; make namespace; remove namespace; evict PID; terminate PID (the reply waits for it)"""


class Control3:
    """Servers, namespaces and features of one daemon. `owner_uid` is who runs it, root on a real node."""

    def __init__(self, settings: Settings, pipe_directory: str, owner_uid: int, multiuser: bool) -> None:
        self.settings = settings
        self.pipe_directory = pipe_directory
        self.owner_uid = owner_uid
        self.multiuser = multiuser
        self.servers: dict[str, Server3] = {}
        self.features = {MEMACCT: True, CONTEXT_SHARE: True}
        self.audit_log = False
        self.default_socket = True
        self._actions: list[Action3] = []

    def execute(self, words: list[str], uid: int) -> tuple[int, str, list[Action3]]:
        """Exit status, text (no newline at its end) and effects of a user's command. Never raises."""
        self._actions = []
        try:
            command = parse(words)
            return 0, _COMMANDS[command.module, command.verb](self, command, uid), self._actions
        except Refused as refusal:
            return 1, str(refusal), []

    def load(self, config: Config) -> list[Action3]:
        """Takes over a configuration file; the effects. Raises Refused for a value that no command would take."""
        self._actions = []
        self.features = {MEMACCT: config.memacct, CONTEXT_SHARE: config.context_share}
        self.audit_log = config.audit_log
        self.default_socket = config.default_socket
        for name, wanted in config.servers.items():
            owner = wanted.options.get("uid")
            server = self._add_server(name, self._owner(owner, self.owner_uid))
            self._configure(server, wanted.options)
            self._limit(server.namespaces[DEFAULT], wanted.options)
            for namespace, options in wanted.namespaces.items():
                if namespace != DEFAULT:
                    self._add_namespace(server, namespace)
                self._limit(server.namespaces[namespace], options)
        return self._actions

    def server_of_user(self, uid: int) -> tuple[Server3, list[Action3]]:
        """The server for clients of a user on the main socket, made where there is none; the effects."""
        self._actions = []
        owner = 0 if self.multiuser else uid
        name = f"uid_{owner}"
        return self.servers.get(name) or self._add_server(name, owner), self._actions

    def directory(self, server: Server3, namespace: str = "") -> str:
        """Where the control socket of a server or namespace is."""
        return "/".join(part for part in (self.pipe_directory, server.name, namespace) if part)

    # Values

    def _server(self, name: str) -> Server3:
        server = self.servers.get(name)
        if server is None:
            raise Refused(f"Server '{name}' not found")
        return server

    def _namespace(self, server: Server3, name: str) -> Namespace:
        namespace = server.namespaces.get(name)
        if namespace is None:
            raise Refused(f"Namespace '{name}' not found in server '{server.name}'")
        return namespace

    def _servers(self, command: Command) -> list[Server3]:
        name = command.options.get("server")
        return list(self.servers.values()) if name is None else [self._server(name)]

    def _may(self, command: Command, uid: int, server_uid: int | None = None) -> None:
        if uid not in (0, self.owner_uid, server_uid):
            verb = f"{command.module} {command.verb}".upper()
            raise Refused(f"Insufficient privileges for UID {uid}. '{verb}' requires server owner.")

    def _owner(self, text: str | None, default: int) -> int:
        """UID of a server to come. Raises Refused."""
        uid = None if text is None else read_number("uid", text)
        if self.multiuser:
            if uid not in (None, 0):
                raise Refused("A multi-user daemon only has servers of UID 0")
            return 0
        return default if uid is None else uid

    def _status(self, server: Server3) -> str:
        words = self.settings.switch("server-status-words").split()
        state = server.process.state if server.process is not None else ""
        return words[("", INITIALIZING, ACTIVE, FAULT).index(state)]

    def _limit(self, namespace: Namespace, options: Mapping[str, str]) -> bool:
        """Sets those limits that are named; whether there were any."""
        memory = options.get("pinned-memory-limit")
        percent = options.get("active-thread-percentage")
        priority = options.get("client-priority")
        limit = None if memory is None else Limit(read_size(memory), memory)
        stored_percent = namespace.percent if percent is None else read_percentage(percent)
        if priority not in (None, "0", "1"):
            raise Refused(f"Invalid client priority '{priority}'")
        if limit is not None:
            namespace.limit = self.settings.apply_limit(limit)
        namespace.percent = stored_percent
        namespace.priority = namespace.priority if priority is None else int(priority)
        return (memory, percent, priority) != (None, None, None)

    def _configure(self, server: Server3, options: Mapping[str, str]) -> bool:
        """Sets what is the server's own among the options; whether there was any."""
        server.allowed_devices = options.get("allowed-devices", server.allowed_devices)
        domains = options.get("locality-domains")
        if domains is not None:
            read_truth("locality-domains", domains)
        return domains is not None

    def _check_path(self, server: Server3, namespace: str) -> None:
        path = f"{self.directory(server, namespace)}/control"
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES and self.settings.switch("overlong-path-3") == "refuse":
            raise Refused(f"Path too long: {path}")

    # Servers

    def _add_server(self, name: str, uid: int) -> Server3:
        check_name("server", name)
        if name in self.servers:
            raise Refused(f"Server '{name}' already exists")
        server = Server3(name, uid)
        self._check_path(server, DEFAULT)
        self.servers[name] = server
        self._actions.append(("make server", server, ""))
        return server

    def server_create(self, command: Command, uid: int) -> str:
        owner = self._owner(command.options.get("uid"), uid)
        self._may(command, uid, owner)
        name = command.positional(0)
        if name is None and "uid" not in command.options:
            raise Refused("server create requires a name or --uid")
        self._configure(Server3("", owner), command.options)  # refused as a whole, or not at all
        self._configure(self._add_server(name or f"uid_{owner}", owner), command.options)
        return ""

    def server_delete(self, command: Command, uid: int) -> str:
        server = self._server(command.positionals[0])
        self._may(command, uid, server.uid)
        if server.clients() and "force" not in command.flags:
            raise Refused(f"Server '{server.name}' has active clients")
        del self.servers[server.name]
        self._actions += [("evict", server, str(client.pid)) for client in server.clients()]
        self._actions.append(("remove server", server, ""))
        return ""

    def server_list(self, command: Command, uid: int) -> str:
        name = command.positional(0)
        servers = list(self.servers.values()) if name is None else [self._server(name)]
        rows = [[*(self._server_field(server, field) for field in _SERVER_FIELDS), "-"] for server in servers]
        return self._list(table3.SERVERS, rows, command)

    def server_set(self, command: Command, uid: int) -> str:
        server = self._server(command.positionals[0])
        self._may(command, uid, server.uid)
        owner = self._owner(command.options.get("uid"), server.uid)
        if server.clients(DEFAULT):
            raise Refused(f"Server '{server.name}' has active clients")
        self._configure(Server3("", owner), command.options)  # refused as a whole, or not at all
        changed = [
            self._limit(server.namespaces[DEFAULT], command.options),
            self._configure(server, command.options),
            "uid" in command.options,
        ]
        if not any(changed):
            raise Refused("server set requires at least one option")
        server.uid = owner
        return ""

    def server_get(self, command: Command, uid: int) -> str:
        name, field = command.positionals
        return self._server_field(self._server(name), read_field(field, _SERVER_FIELDS))

    def _server_field(self, server: Server3, field: str) -> str:
        match field:
            case "name":
                return server.name
            case "uid":
                return str(server.uid)
            case "pid":
                return str(server.process.pid) if server.process is not None else "-"
            case "status":
                return self._status(server)
            case "pipe-directory":
                return self.directory(server)
            case _:
                return server.allowed_devices or self.settings.switch("allowed-devices-unset")

    # Namespaces

    def _add_namespace(self, server: Server3, name: str) -> None:
        check_name("namespace", name)
        if name in server.namespaces:
            raise Refused(f"Namespace '{name}' already exists in server '{server.name}'")
        self._check_path(server, name)
        server.namespaces[name] = Namespace(name)
        self._actions.append(("make namespace", server, name))

    def namespace_create(self, command: Command, uid: int) -> str:
        server = self._server(command.options["server"])
        self._may(command, uid, server.uid)
        self._add_namespace(server, command.positionals[0])
        return ""

    def namespace_delete(self, command: Command, uid: int) -> str:
        server = self._server(command.options["server"])
        self._may(command, uid, server.uid)
        namespace = self._namespace(server, command.positionals[0])
        if namespace.name == DEFAULT:
            raise Refused("The default namespace cannot be deleted")
        clients = server.clients(namespace.name)
        if clients and "force" not in command.flags:
            raise Refused(f"Namespace '{namespace.name}' has active clients")
        if self.settings.switch("namespace-delete-force") == "terminate":
            self._actions += [("evict", server, str(client.pid)) for client in clients]
        del server.namespaces[namespace.name]
        self._actions.append(("remove namespace", server, namespace.name))
        return ""

    def namespace_list(self, command: Command, uid: int) -> str:
        name, count = command.positional(0), int(self.settings.switch("namespace-columns"))
        rows = [
            [self._namespace_field(server, namespace, field) for field in _NAMESPACE_FIELDS[:count]]
            for server in self._servers(command)
            for namespace in server.namespaces.values()
            if name in (None, namespace.name)
        ]
        if name is not None and not rows:
            raise Refused(f"Namespace '{name}' not found")
        return self._list(table3.NAMESPACES[:count], rows, command)

    def namespace_set(self, command: Command, uid: int) -> str:
        server = self._server(command.options["server"])
        self._may(command, uid, server.uid)
        namespace = self._namespace(server, command.positionals[0])
        if server.clients(namespace.name):
            raise Refused(f"Namespace '{namespace.name}' has active clients")
        if not self._limit(namespace, command.options):
            raise Refused("namespace set requires at least one option")
        return ""

    def namespace_get(self, command: Command, uid: int) -> str:
        name, server_name, field = command.positionals
        server = self._server(server_name)
        return self._namespace_field(server, self._namespace(server, name), read_field(field, _NAMESPACE_FIELDS))

    def _namespace_field(self, server: Server3, namespace: Namespace, field: str) -> str:
        match field:
            case "name":
                return namespace.name
            case "server":
                return server.name
            case "server-status":
                return self._status(server)
            case "pinned-memory-limit":
                limit = namespace.limit
                return "unlimited" if limit is None else show_value(limit.size_bytes, limit.text, self.settings.floor_g)
            case "active-thread-percentage":
                return f"{namespace.percent:.2f}"
            case "client-priority":
                return str(namespace.priority)
            case _:
                return self.directory(server, namespace.name)

    # Clients

    def client_list(self, command: Command, uid: int) -> str:
        documented = self.settings.switch("client-list-layout") == "documented"
        rows = []
        for server in self._servers(command):
            for client in server.clients():
                pid, _, device, _, _, namespace, line = (
                    self._client_field(server, client, field) for field in _CLIENT_FIELDS
                )
                if documented:
                    uuids = self.settings.uuids
                    device, namespace = str(uuids.index(device)) if device in uuids else "-", client.namespace
                rows.append([pid, server.name, device, namespace, line])
        return self._list(table3.CLIENTS, rows, command)

    def _client(self, text: str) -> tuple[Server3, ClientView]:
        pid = read_number("PID", text)
        for server in self.servers.values():
            for client in server.clients():
                if client.pid == pid:
                    return server, client
        raise Refused(f"Client {pid} not found")

    def client_get(self, command: Command, uid: int) -> str:
        pid, field = command.positionals
        return self._client_field(*self._client(pid), read_field(field, _CLIENT_FIELDS))

    def client_terminate(self, command: Command, uid: int) -> str:
        server, client = self._client(command.positionals[0])
        self._may(command, uid, server.uid)
        self._actions.append(("terminate", server, str(client.pid)))
        return ""

    def _client_field(self, server: Server3, client: ClientView, field: str) -> str:
        match field:
            case "pid" | "linux-ns":
                return str(self.settings.show_pid(client.pid))
            case "server":
                return server.name
            case "device":
                return client.device or "-"
            case "pci-id":
                devices = self.settings.devices
                return next((device.pci_bus_id for device in devices if device.uuid == client.device), "-")
            case "maws-ns":
                return f"{server.name}/{client.namespace} (0)"
            case _:
                return self.settings.command_of(client.pid)

    # Devices

    def _allowed(self, server: Server3) -> list[str]:
        """UUIDs of the devices that a server may use and that are there."""
        uuids = self.settings.uuids
        if not server.allowed_devices:
            return uuids
        named = [resolve_device(name.strip(), uuids) for name in server.allowed_devices.split(",")]
        return [uuid for uuid in named if uuid is not None]

    def device_list(self, command: Command, uid: int) -> str:
        rows = []
        for server in self._servers(command):
            for ordinal, device in enumerate(self.settings.devices):
                if device.uuid in self._allowed(server):
                    place = [str(ordinal), server.name, device.pci_bus_id, device.uuid, device.name]
                    rows.append([*place, str(TOTAL_SMS), str(CHUNKS), "-"])
        return self._list(table3.DEVICES, rows, command)

    # Features

    def _set_feature(self, command: Command, uid: int, enabled: bool) -> str:
        self._may(command, uid)
        name = command.positionals[0]
        if name not in self.features:
            raise Refused(f"Unknown feature '{name}'")
        self.features[name] = enabled
        return ""

    def feature_enable(self, command: Command, uid: int) -> str:
        return self._set_feature(command, uid, True)

    def feature_disable(self, command: Command, uid: int) -> str:
        return self._set_feature(command, uid, False)

    def feature_describe(self, command: Command, uid: int) -> str:
        name = command.positional(0)
        if name is not None and name not in self.features:
            raise Refused(f"Unknown feature '{name}'")
        rows = [
            [feature, "enabled (default)" if enabled else "disabled", feature, "-"]
            for feature, enabled in self.features.items()
            if name in (None, feature)
        ]
        return self._list(table3.FEATURES, rows, command)

    def memacct_set(self, command: Command, uid: int) -> str:
        self._may(command, uid)
        self.audit_log = read_truth("audit_log", command.options["audit_log"])
        return ""

    def memacct_describe(self, command: Command, uid: int) -> str:
        return self._list(table3.SETTINGS, [["audit_log", str(self.audit_log).lower()]], command)

    def _list(self, columns: Iterable[table3.Column], rows: list[list[str]], command: Command) -> str:
        quote = self.settings.switch("csv-quotes") == "yes"
        return table3.render(list(columns), rows, command.options.get("format", "table"), quote)


_COMMANDS: dict[tuple[str, str], Callable[[Control3, Command, int], str]] = {
    ("server", "create"): Control3.server_create,
    ("server", "delete"): Control3.server_delete,
    ("server", "list"): Control3.server_list,
    ("server", "set"): Control3.server_set,
    ("server", "get"): Control3.server_get,
    ("namespace", "create"): Control3.namespace_create,
    ("namespace", "delete"): Control3.namespace_delete,
    ("namespace", "list"): Control3.namespace_list,
    ("namespace", "set"): Control3.namespace_set,
    ("namespace", "get"): Control3.namespace_get,
    ("client", "list"): Control3.client_list,
    ("client", "get"): Control3.client_get,
    ("client", "terminate"): Control3.client_terminate,
    ("device", "list"): Control3.device_list,
    ("feature", "enable"): Control3.feature_enable,
    ("feature", "disable"): Control3.feature_disable,
    ("feature", "describe"): Control3.feature_describe,
    ("memacct", "set"): Control3.memacct_set,
    ("memacct", "describe"): Control3.memacct_describe,
}
