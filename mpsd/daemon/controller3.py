"""Protocol 3: one server, in it a namespace for each share or allocation, with limits of its own.

The config file restores them when the daemon starts; what changes later is done by command. A namespace is changed or
deleted only while no client is in it, which the daemon itself watches over, so nothing is torn down.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping

from cdi.atomic import read_regular, replace_file
from mpsd.common.errors import GpufracError, TransientError
from mpsd.common.reason import Reason
from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.daemon import dirs as directories
from mpsd.daemon import protocol3
from mpsd.daemon.control import CommandFailedError, ControlClient
from mpsd.daemon.controller import QUERY_S, TERMINATE_CLIENT_S, Configured, MpsClients, check_client
from mpsd.daemon.logs.parse import LogLine, Severity, interpret, parse_line, severity
from mpsd.daemon.namespaces import SERVER, Namespace, is_ours
from mpsd.daemon.paths import MAIN, DaemonDirs, Link, namespace_socket
from mpsd.daemon.plan import DaemonSpec
from mpsd.daemon.protocol3 import DEFAULT, NamespaceRow
from mpsd.localapi.reasons import DaemonCode, NamespaceCode

_LOG_TAIL_BYTES, _LOG_LINES, _LOG_CHARACTERS = 4096, 2, 200


class Controller3:
    """`Controller` of protocol 3."""

    def __init__(self, control: ControlClient, query_s: float = QUERY_S) -> None:
        self._control = control
        self._query_s = query_s
        self._without_socket: dict[str, frozenset[str]] = {}
        """Namespaces that had no socket at the last look, by pipe directory."""

    def start_arguments(self, spec: DaemonSpec, *, multiuser: bool) -> tuple[str, ...]:
        """See Controller."""
        return ("-p", "3", "-d", *(("-m",) if multiuser else ()), "-a", spec.dirs.config_file)

    def prepare(self, spec: DaemonSpec) -> None:
        """Writes the config file: all that is wanted."""
        self._without_socket.pop(spec.dirs.pipe, None)
        _write_config(spec.dirs, _nameable(spec))

    def configure(self, spec: DaemonSpec) -> Configured:
        """See Controller. Afterwards the config file holds what is in force.

        Raises:
            TransientError: the server is not there, or a client brought it down.
        """
        declared = _read_config(spec.dirs)
        rows = self._list(spec)
        failures = {}
        spoilt = self._spoilt(spec, rows)
        for namespace in (*_nameable(spec), DEFAULT):
            row = rows.get(namespace.name)
            if namespace.name in spoilt:
                failures[namespace.name] = self._make_anew(spec, namespace)
                continue
            # What may be rounded proves nothing, unless it is known where it comes from.
            proven = row is not None and (protocol3.is_exact(row) or protocol3.table(namespace) in declared)
            if row is None or not proven or not protocol3.has_limits(row, namespace):
                failures[namespace.name] = self._set(spec, namespace, missing=row is None)
        self._delete_unwanted(spec, rows)
        if failures:
            rows = self._list(spec)
        refused = _objections(spec, rows, failures)
        _write_config(spec.dirs, [namespace for namespace in spec.namespaces if namespace.name not in refused])
        refused |= _link(spec, refused, keep=rows)
        linked = (link.directory for link in spec.links if link.namespace not in refused)
        wanted = {*(namespace.name for namespace in spec.namespaces), *linked}
        return Configured(_default_note(rows), frozenset(wanted - refused.keys()), refused)

    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]:
        """See Controller. One process: the namespaces of `spec` are expected, and they show the server's state."""
        rows = self._list(spec)
        self._spoilt(spec, rows)
        objections = _objections(spec, rows, {})
        objections.update(_unlinked(spec, objections))
        default = rows.get(DEFAULT.name)
        if default is not None and (objection := _objection(DEFAULT, default, "")) is not None:
            objections[DEFAULT.name] = objection
        return objections

    def hold_server(self, spec: DaemonSpec) -> None:
        """Nothing: under this protocol GPUs are open to several processes, so that no server could close one."""

    def clients(self, spec: DaemonSpec) -> MpsClients:
        """See Controller. Of all servers: clients of the daemon's own socket have one of theirs."""
        servers = protocol3.parse_servers(self._call(spec, protocol3.LIST_SERVERS))
        return MpsClients(servers, protocol3.parse_clients(self._call(spec, protocol3.LIST_CLIENTS)))

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        """See Controller."""
        check_client(spec, pid, protocol3.parse_clients(self._call(spec, protocol3.LIST_CLIENTS)))
        self._control.call(spec.dirs, protocol3.terminate_client(pid), TERMINATE_CLIENT_S)

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        """See Controller. What this protocol does about clients is not documented; who asks has a deadline."""
        self._control.call(spec.dirs, protocol3.QUIT, timeout_s)

    def _list(self, spec: DaemonSpec) -> Mapping[str, NamespaceRow]:
        try:
            reply = self._call(spec, protocol3.LIST_NAMESPACES)
        except CommandFailedError as error:
            why = "its MPS server is gone" if self._has_no_server(spec) else str(error)
            raise TransientError(f"{why}{_last_words(spec.dirs)}") from error
        rows = protocol3.parse_namespaces(reply)
        if not rows:  # a server has one namespace at least
            said = f": it lists {reply.strip()[:100]!r}" if reply.strip() else ""
            raise TransientError(f"its MPS server is gone{said}{_last_words(spec.dirs)}")
        if any(protocol3.is_fault(row.status) for row in rows.values()):
            raise TransientError(
                f"cannot rely on MPS server {SERVER} of {spec.dirs.pipe}: a client's fault keeps new ones out until "
                "all that have the error are gone: end them"
            )
        return rows

    def _has_no_server(self, spec: DaemonSpec) -> bool:
        """Whether the daemon says so; how it refuses a command for a server that is not there is not documented."""
        try:
            return SERVER not in protocol3.parse_server_names(self._call(spec, protocol3.LIST_SERVERS))
        except GpufracError:
            return False

    def _spoilt(self, spec: DaemonSpec, rows: Mapping[str, NamespaceRow]) -> frozenset[str]:
        """Namespaces whose socket was there neither now nor at the last look: somebody in them removed it. One that
        was just made may still get its own."""
        now = frozenset(
            namespace.name
            for namespace in _nameable(spec)
            if namespace.name in rows and not directories.is_socket(namespace_socket(spec.dirs, namespace.name))
        )
        before = self._without_socket.get(spec.dirs.pipe, frozenset())
        self._without_socket[spec.dirs.pipe] = now
        return now & before

    def _make_anew(self, spec: DaemonSpec, namespace: Namespace) -> str:
        """As `_set`, for a namespace without its socket: only the daemon can give it another."""
        try:
            directories.clear_socket(spec.dirs, namespace.name)
            self._call(spec, protocol3.delete(namespace.name))
        except CommandFailedError as error:
            return error.said
        return self._set(spec, namespace, missing=True)

    def _set(self, spec: DaemonSpec, namespace: Namespace, *, missing: bool) -> str:
        """What the daemon said against it, empty when nothing. A refused `create` proves nothing: it may be there."""
        said = ""
        try:
            if missing:
                with contextlib.suppress(CommandFailedError):
                    self._call(spec, protocol3.create(namespace.name))
            self._call(spec, protocol3.set_limits(namespace))
        except CommandFailedError as error:
            said = error.said
        return said

    def _delete_unwanted(self, spec: DaemonSpec, rows: Mapping[str, NamespaceRow]) -> None:
        """Refused while a client lives there: then it goes another time."""
        wanted = {namespace.name for namespace in spec.namespaces}
        for name in rows:
            if is_ours(name) and name not in wanted:
                with contextlib.suppress(CommandFailedError):
                    self._call(spec, protocol3.delete(name))

    def _call(self, spec: DaemonSpec, arguments: tuple[str, ...]) -> str:
        return self._control.call(spec.dirs, arguments, self._query_s)


def _nameable(spec: DaemonSpec) -> list[Namespace]:
    return [namespace for namespace in spec.namespaces if _name_objection(spec.dirs, namespace.name) is None]


def _name_objection(dirs: DaemonDirs, name: str) -> Reason | None:
    """Why there can't be a namespace of this name. Names come from the plugin, too, and become paths."""
    if not protocol3.is_name(name):
        return Reason(NamespaceCode.BAD_NAME, "its name is not made of a-z, 0-9 and _, at most 64 of them")
    if (length := len(namespace_socket(dirs, name).encode())) > MAX_SOCKET_PATH_BYTES:
        over = f"{length} bytes, more than {MAX_SOCKET_PATH_BYTES}"
        return Reason(NamespaceCode.PATH_TOO_LONG, f"its socket's path would have {over}: set a shorter mps.runRoot")
    return None


def _objections(spec: DaemonSpec, rows: Mapping[str, NamespaceRow], failures: Mapping[str, str]) -> dict[str, Reason]:
    """Why wanted namespaces can't be relied on, by name.

    Args:
        failures: what the daemon said against setting the limits of one; empty when nothing.
    """
    found = {}
    for namespace in spec.namespaces:
        row, failure = rows.get(namespace.name), failures.get(namespace.name, "")
        if objection := _name_objection(spec.dirs, namespace.name):
            found[namespace.name] = objection
        elif row is not None and not directories.is_socket(path := namespace_socket(spec.dirs, namespace.name)):
            lost = f"its socket was removed: end its clients: the MPS control daemon says: {failure}"
            text = lost if failure else f"its socket {path} is not there"
            found[namespace.name] = Reason(NamespaceCode.SOCKET_MISSING, text)
        elif objection := _objection(namespace, row, failure):
            found[namespace.name] = objection
    return found


def _objection(namespace: Namespace, row: NamespaceRow | None, failure: str) -> Reason | None:
    said = f": the MPS control daemon says: {failure}" if failure else ""
    if row is None:
        return Reason(NamespaceCode.NOT_THERE, f"it is not there{said}")
    has = f"memory {row.limit}, threads {row.percent} %"
    if not protocol3.has_limits(row, namespace):
        text = f"its limits read back as {has}, which is not what was set"
        if failure:
            text = f"its limits ({has}) can't be changed, as a rule because a client of it lives{said}"
    elif failure and not protocol3.is_exact(row):
        text = f"its limits ({has}) may be rounded and can't be set anew, as a rule because a client of it lives{said}"
    else:
        return None
    return Reason(NamespaceCode.LIMITS_DIFFER, text)


def _default_note(rows: Mapping[str, NamespaceRow]) -> Reason | None:
    row = rows.get(DEFAULT.name)
    if row is None or protocol3.has_limits(row, DEFAULT):
        return None
    text = f"MPS namespace {DEFAULT.name} is not capped: memory {row.limit}, threads {row.percent} %"
    return Reason(DaemonCode.LIMIT_NOT_PROVEN, text)


def _unlinked(spec: DaemonSpec, refused: Collection[str]) -> dict[str, Reason]:
    """Directories that containers mount and whose socket is not there: who finds none runs without MPS. `refused`:
    namespaces of which something else is said."""
    return {
        link.directory: Reason(NamespaceCode.SOCKET_MISSING, f"its socket in {link.directory} is not there")
        for link in spec.links
        if link.namespace not in refused and not directories.is_linked(spec.dirs, link)
    }


def _link(spec: DaemonSpec, refused: Collection[str], keep: Iterable[str]) -> dict[str, Reason]:
    """Links the sockets where containers mount them, but those of namespaces that are `refused`. Says why one can't be
    linked, by directory. What nobody wants any more goes, but for namespaces that still are: `keep`."""
    failed = {}
    for link in spec.links:
        if link.namespace in refused:
            continue
        try:
            directories.link_socket(spec.dirs, link)
        except TransientError as error:
            failed[link.directory] = Reason(NamespaceCode.NOT_LINKED, str(error))
    for home in spec.homes:
        names = {link.name for link in spec.links if link.home == home}
        if spec.dirs.linked:
            directories.prune_links(home, names.union(keep if home == spec.dirs.links else ()))
        elif MAIN not in names:  # others are of a time when they were linked, and may be mounted
            directories.remove_link(Link(home, MAIN, MAIN))
    return failed


def _read_config(dirs: DaemonDirs) -> str:
    try:
        return read_regular(dirs.config_file, follow_links=False)[0].decode(errors="replace")
    except OSError:
        return ""


def _write_config(dirs: DaemonDirs, namespaces: Iterable[Namespace]) -> None:
    text = protocol3.config(namespaces)
    if text == _read_config(dirs):
        return
    try:
        replace_file(dirs.config_file, text.encode(), 0o600)
    except OSError as error:
        raise TransientError(f"cannot write {dirs.config_file}: {error.strerror}") from error


def _last_words(dirs: DaemonDirs) -> str:
    """The end of the server's log without what it always says: what became of a server is said nowhere else."""
    try:
        text = directories.read_file(dirs.server_log, _LOG_TAIL_BYTES, end=True).decode(errors="replace")
    except OSError:
        return ""
    lines = text.split("\n")[1 if len(text) >= _LOG_TAIL_BYTES else 0 :]  # the first one may be cut
    telling = [line.message for line in map(parse_line, lines) if _tells(line)]
    last = "; ".join(telling[-_LOG_LINES:])
    last = "".join(c if c.isprintable() else "?" for c in last)
    return f"; it logged last: {last[-_LOG_CHARACTERS:]}" if last else ""


def _tells(line: LogLine) -> bool:
    event = interpret(line)
    return event is not None and severity(event) in (Severity.WARNING, Severity.ERROR)
