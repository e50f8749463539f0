"""Where one control daemon keeps its files, and which binary it is (pure)."""

import re
from dataclasses import dataclass

import msgspec

from mpsd.common.socketpath import MAX_SOCKET_PATH_BYTES
from mpsd.config.model import MpsConfig, NamespaceMount
from mpsd.daemon.namespaces import SERVER

MAIN = "_main"
"""The name among namespaces that stands for the daemon's main socket. No share's namespace is called so."""

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH control daemons and front ends get."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class DaemonDirs(msgspec.Struct, frozen=True):
    """Directories of one control daemon: `pipe` below `run_root`, `log` below `log_root`.

    `linked`: containers mount directories of ours for their namespaces, not the daemon's (`mps.namespaceMount`).
    """

    run_root: str
    log_root: str
    pipe: str
    log: str
    linked: bool = False

    @property
    def control_socket(self) -> str:
        """The socket that clients and front ends connect to."""
        return f"{self.pipe}/control"

    @property
    def pid_file(self) -> str:
        """Written by the daemon: its PID as text."""
        return f"{self.pipe}/nvidia-cuda-mps-control.pid"

    @property
    def start_output(self) -> str:
        """What the daemon printed while it started."""
        return f"{self.log}/start.out"

    @property
    def config_file(self) -> str:
        """Protocol 3: what the daemon is started with. Beside the pipe directory, which containers may see."""
        return f"{self.pipe}.toml"

    @property
    def links(self) -> str:
        """Our stable directories for namespaces: no dot is in a daemon's name, so it is no other daemon's."""
        return f"{self.pipe}.ns"

    def links_of(self, home: str) -> str:
        """The same of other GPUs, or a group, that the daemon serves, too."""
        return f"{self.pipe.rpartition('/')[0]}/{_file_name(home)}.ns"

    @property
    def shared_memory(self) -> str:
        """The /dev/shm of the daemon and its clients, where `mps.sharedMemory` asks for one."""
        return f"{self.pipe}.shm"

    @property
    def server_log(self) -> str:
        """Protocol 3: what its server logs (MPS documentation, Logging, r615)."""
        return f"{self.log}/{SERVER}/server.log"


def daemon_dirs(mps: MpsConfig, name: str) -> DaemonDirs:
    """The directories of the daemon of a domain. A `name` that is not fit for a path is replaced by its hash."""
    name = _file_name(name)
    linked = mps.namespace_mount is NamespaceMount.LINKED
    return DaemonDirs(mps.run_root, mps.log_root, f"{mps.run_root}/mps/{name}", f"{mps.log_root}/mps/{name}", linked)


def _file_name(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    import hashlib  # loads OpenSSL, 4 MiB, for a case that real drivers never make

    return f"gpu-{hashlib.sha256(name.encode()).hexdigest()[:20]}"


def namespace_directory(dirs: DaemonDirs, namespace: str) -> str:
    """The directory that the daemon makes for a namespace (MPS v3 namespaces, r615)."""
    return f"{dirs.pipe}/{SERVER}/{namespace}"


def namespace_socket(dirs: DaemonDirs, namespace: str) -> str:
    """Whoever connects there has the limits of the namespace."""
    return f"{namespace_directory(dirs, namespace)}/control"


def link_source(dirs: DaemonDirs, namespace: str) -> str:
    """The socket that our directory for a namespace, or MAIN, has a link of."""
    return dirs.control_socket if namespace == MAIN else namespace_socket(dirs, namespace)


@dataclass(frozen=True, slots=True)
class Link:
    """A directory of ours that containers mount: the same over restarts of the daemon, and over changes of which
    daemon that is. In it is a link to the socket of a namespace, or of MAIN. `home`: see DaemonDirs.links."""

    home: str
    name: str
    namespace: str

    @property
    def directory(self) -> str:
        return f"{self.home}/{self.name}"


def socket_objection(dirs: DaemonDirs) -> str:
    """Why a daemon could not bind its socket there, empty when it can. One that can't exits without saying why."""
    length = len(dirs.control_socket.encode())
    if length <= MAX_SOCKET_PATH_BYTES:
        return ""
    return (
        f"its socket {dirs.control_socket} is {length} bytes long, more than the {MAX_SOCKET_PATH_BYTES} a socket path "
        "may have: choose a shorter mps.runRoot"
    )


def control_binary(mps: MpsConfig) -> str:
    """The control binary to run: an absolute `mps.binary` as it is; otherwise that name in `usr/bin` below a
    `mps.driverRoot` other than `/`, or looked up in PATH."""
    if mps.binary.startswith("/") or mps.driver_root == "/":
        return mps.binary
    return f"{mps.driver_root.rstrip('/')}/usr/bin/{mps.binary}"


def base_environment(mps: MpsConfig) -> tuple[tuple[str, str], ...]:
    """Environment of everything we start from the driver. Below another driver root its libraries are named too."""
    if mps.driver_root == "/":
        return (("PATH", PATH),)
    root = mps.driver_root.rstrip("/")
    libraries = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
    return (
        ("PATH", ":".join(f"{root}{part}" for part in PATH.split(":")) + ":" + PATH),
        ("LD_LIBRARY_PATH", ":".join(f"{root}/{part}" for part in libraries)),
    )
