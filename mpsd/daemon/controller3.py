"""Protocol 3: one server, in it a namespace for each share or allocation, with limits of its own.

The config file restores them when the daemon starts; what changes later is done by command. A namespace is changed or
deleted only while no client is in it, which the daemon itself watches over, so nothing is torn down.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping

from cdi.atomic import read_regular, replace_file
from mpsd.daemon import dirs as directories
from mpsd.daemon import protocol3
from mpsd.daemon.control import CommandFailedError, ControlClient
from mpsd.daemon.controller import QUERY_S, TERMINATE_CLIENT_S, Configured, MpsClients
from mpsd.daemon.namespaces import SERVER, Namespace, is_ours
from mpsd.daemon.paths import SOCKET_PATH_MAX, DaemonDirs, namespace_socket
from mpsd.daemon.protocol3 import DEFAULT, NamespaceRow
from mpsd.errors import TransientError
from mpsd.plan import DaemonSpec

_LOG_TAIL_BYTES = 2048


class Controller3:
    """`Controller` of protocol 3."""

    def __init__(self, control: ControlClient, query_s: float = QUERY_S) -> None:
        self._control = control
        self._query_s = query_s

    def start_arguments(self, spec: DaemonSpec, *, multiuser: bool) -> tuple[str, ...]:
        """See Controller."""
        return ("-p", "3", "-d", *(("-m",) if multiuser else ()), "-a", spec.dirs.config_file)

    def prepare(self, spec: DaemonSpec) -> None:
        """Writes the config file: all that is wanted."""
        _write_config(spec.dirs, _nameable(spec))

    def configure(self, spec: DaemonSpec) -> Configured:
        """See Controller. Afterwards the config file holds what is in force.

        Raises:
            TransientError: the server is not there, or a client brought it down.
        """
        declared = _read_config(spec.dirs)
        rows = self._list(spec)
        failures = {}
        for namespace in (*_nameable(spec), DEFAULT):
            row = rows.get(namespace.name)
            # What may be rounded proves nothing, unless it is known where it comes from.
            proven = row is not None and (protocol3.is_exact(row) or protocol3.table(namespace) in declared)
            if row is None or not proven or not protocol3.has_limits(row, namespace):
                failures[namespace.name] = self._set(spec, namespace, missing=row is None)
        self._delete_unwanted(spec, rows)
        if failures:
            rows = self._list(spec)
        refused = _objections(spec, rows, failures)
        _write_config(spec.dirs, [namespace for namespace in spec.namespaces if namespace.name not in refused])
        if spec.dirs.linked:
            refused |= _link(spec, refused, keep=rows)
        attached = frozenset(namespace.name for namespace in spec.namespaces) - refused.keys()
        return Configured(_default_note(rows), attached, refused)

    def probe(self, spec: DaemonSpec, *, servers: bool) -> None:
        """See Controller. One process: the namespaces of `spec` are expected, and they show the server's state."""
        rows = self._list(spec)
        if objections := _objections(spec, rows, {}):
            name, reason = next(iter(objections.items()))
            more = f" (and {len(objections) - 1} more)" if len(objections) > 1 else ""
            raise TransientError(f"cannot rely on MPS namespace {name}{more}: {reason}")

    def clients(self, spec: DaemonSpec) -> MpsClients:
        """See Controller. Of all servers: clients of the daemon's own socket have one of theirs."""
        servers = protocol3.parse_servers(self._call(spec, protocol3.LIST_SERVERS))
        return MpsClients(servers, protocol3.parse_clients(self._call(spec, protocol3.LIST_CLIENTS)))

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        """See Controller."""
        self._control.call(spec.dirs, protocol3.terminate_client(pid), TERMINATE_CLIENT_S)

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        """See Controller. What this protocol does about clients is not documented; who asks has a deadline."""
        self._control.call(spec.dirs, protocol3.QUIT, timeout_s)

    def _list(self, spec: DaemonSpec) -> Mapping[str, NamespaceRow]:
        try:
            reply = self._call(spec, protocol3.LIST_NAMESPACES)
        except CommandFailedError as error:
            raise TransientError(f"{error}{_last_words(spec.dirs)}") from error
        rows = protocol3.parse_namespaces(reply)
        if not rows:  # a server has one namespace at least
            said = f": it lists {reply.strip()[:100]!r}" if reply.strip() else ""
            raise TransientError(
                f"cannot find MPS server {SERVER} of the daemon in {spec.dirs.pipe}{said}{_last_words(spec.dirs)}"
            )
        if any(protocol3.is_fault(row.status) for row in rows.values()):
            raise TransientError(
                f"cannot rely on MPS server {SERVER} of {spec.dirs.pipe}: a client's fault keeps new ones out until "
                "all that have the error are gone: end them"
            )
        return rows

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
    return [namespace for namespace in spec.namespaces if not _name_objection(spec.dirs, namespace.name)]


def _name_objection(dirs: DaemonDirs, name: str) -> str:
    """Why there can't be a namespace of this name. Names come from the plugin, too, and become paths."""
    if not protocol3.is_name(name):
        return "its name is not made of a-z, 0-9 and _, at most 64 of them"
    if (length := len(namespace_socket(dirs, name).encode())) > SOCKET_PATH_MAX:
        return f"its socket's path would have {length} bytes, more than {SOCKET_PATH_MAX}: set a shorter mps.runRoot"
    return ""


def _objections(spec: DaemonSpec, rows: Mapping[str, NamespaceRow], failures: Mapping[str, str]) -> dict[str, str]:
    """Why wanted namespaces can't be relied on, by name.

    Args:
        failures: what the daemon said against setting the limits of one; empty when nothing.
    """
    found = {}
    for namespace in spec.namespaces:
        row, failure = rows.get(namespace.name), failures.get(namespace.name, "")
        if objection := _name_objection(spec.dirs, namespace.name) or _objection(namespace, row, failure):
            found[namespace.name] = objection
        elif not _is_socket(path := namespace_socket(spec.dirs, namespace.name)):
            found[namespace.name] = f"its socket {path} is not there"
    return found


def _objection(namespace: Namespace, row: NamespaceRow | None, failure: str) -> str:
    said = f": the MPS control daemon says: {failure}" if failure else ""
    if row is None:
        return f"it is not there{said}"
    has = f"memory {row.limit}, threads {row.percent} %"
    if not protocol3.has_limits(row, namespace):
        if failure:
            return f"its limits ({has}) can't be changed, as a rule because a client of it lives{said}"
        return f"its limits read back as {has}, which is not what was set"
    if failure and not protocol3.is_exact(row):
        return f"its limits ({has}) may be rounded and can't be set anew, as a rule because a client of it lives{said}"
    return ""


def _default_note(rows: Mapping[str, NamespaceRow]) -> str:
    row = rows.get(DEFAULT.name)
    if row is None or protocol3.has_limits(row, DEFAULT):
        return ""
    return f"MPS namespace {DEFAULT.name} is not capped: memory {row.limit}, threads {row.percent} %"


def _link(spec: DaemonSpec, refused: Collection[str], keep: Iterable[str]) -> dict[str, str]:
    """Links the sockets of all but `refused` where containers mount them; why one can't be linked, by name."""
    failed = {}
    for namespace in spec.namespaces:
        if namespace.name not in refused:
            try:
                directories.link_socket(spec.dirs, namespace.name)
            except TransientError as error:
                failed[namespace.name] = str(error)
    directories.prune_links(spec.dirs, {*keep, *(namespace.name for namespace in spec.namespaces)})
    return failed


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


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
    """The end of the server's log: what became of a server is said nowhere else."""
    try:
        with open(dirs.server_log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    last = [line.strip() for line in lines if line.strip()][-3:]
    return f"; it logged last: {'; '.join(last)}" if last else ""
