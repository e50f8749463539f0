"""Where containers mount the sockets of a daemon that serves no other GPUs than theirs."""

from mpsd.daemon.paths import DaemonDirs, Link, namespace_directory


def own_link(dirs: DaemonDirs, namespace: str) -> Link:
    return Link(dirs.links, namespace, namespace)


def link_directory(dirs: DaemonDirs, namespace: str) -> str:
    return own_link(dirs, namespace).directory


def mount_directory(dirs: DaemonDirs, namespace: str) -> str:
    return link_directory(dirs, namespace) if dirs.linked else namespace_directory(dirs, namespace)
