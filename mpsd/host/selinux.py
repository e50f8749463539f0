"""SELinux labels of what containers use: without one a confined container can't reach the socket of its daemon."""

import os
from collections.abc import Callable, Iterator

LABEL = b"system_u:object_r:container_file_t:s0"
"""Open to containers of every category, as NVIDIA's device plugin labels its MPS directories."""


def label(directory: str, *, selinux: str = "/sys/fs/selinux", setxattr: Callable[..., None] = os.setxattr) -> str:
    """Labels a directory and all below it, symbolic links themselves and not what they point to.

    Does nothing where SELinux is off. May be called again.

    Returns:
        What could not be labelled and why, empty when all is well.
    """
    if not os.path.exists(f"{selinux}/enforce"):  # the mount point alone is there without SELinux too
        return ""
    failures = []
    for path in _tree(directory):
        try:
            setxattr(path, "security.selinux", LABEL + b"\0", follow_symlinks=False)
        except FileNotFoundError:
            continue  # a socket or pid file that a daemon just replaced
        except OSError as error:
            failures.append(f"{path}: {error.strerror}")
    if not failures:
        return ""
    more = f" ({len(failures) - 1} more)" if len(failures) > 1 else ""
    return (
        f"cannot label {failures[0]}{more}: confined containers can't reach their daemon there: run mpsd privileged, "
        f"and choose a mps.runRoot on a file system with labels, or label it {LABEL.decode()} yourself"
    )


def _tree(path: str) -> Iterator[str]:
    yield path
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _tree(entry.path)
        else:
            yield entry.path
