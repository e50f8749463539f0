"""A program, run by its path as `python -I -S launcher.py [OPTION VALUE]... -- [PROGRAM ARGUMENT...]`.

Does what its options say, in their order, and becomes PROGRAM: so a daemon is in its cgroups and namespaces before it
exists, without code between fork and exec of a process with threads. It needs nothing of the host it goes to, not even
a shell, and imports nothing of ours. Umask, working directory, limits and descriptors stay.

    --enter FILE    joins the namespace of /proc/<pid>/ns/...
    --join FILE     joins the cgroup of this cgroup.procs
    --shm DIR       shows DIR at /dev/shm, in a mount namespace of its own that still follows the mounts of the old one
    --set K=V       sets a variable of PROGRAM's environment, which has no others
"""

import os
import signal
import sys

ENTER, JOIN, RUN = 98, 97, 99
"""Exit codes: can't enter a namespace or mount, can't join a cgroup, can't run the program."""

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_SLAVE = 0x20000, 0x1000, 0x4000, 0x80000


def main(arguments: list[str]) -> int:
    """Enters cgroups and mount namespace as told, and becomes the program."""
    environment: dict[str, str] = {}
    directory = os.getcwd()
    words = iter(arguments)
    for option in words:
        if option == "--":
            break
        value = next(words)
        try:
            if option == "--set":
                name, _, text = value.partition("=")
                environment[name] = text
            elif option == "--join":
                _write(value, b"0")
            elif option == "--enter":
                _enter(value)
            elif option == "--shm":
                _show_shared_memory(value)
            else:
                return _fail(2, f"cannot take the option {option}")
        except OSError as error:
            if option == "--join":
                return _fail(JOIN, f"cannot join the cgroup {os.path.dirname(value)}: {error.strerror}")
            if option == "--enter":
                return _fail(ENTER, f"cannot enter the namespace {value}: {error.strerror}")
            return _fail(ENTER, f"cannot mount {value} at /dev/shm: {error.strerror}")
    program = list(words)
    if not program:
        return 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so in PROGRAM
    try:
        os.chdir(directory)  # entering a mount namespace moved us to its root
        os.execvpe(program[0], program, environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        return _fail(RUN, f"cannot run {program[0]}: {error.strerror}")


def _fail(code: int, text: str) -> int:
    os.write(2, f"{text}\n".encode(errors="replace"))
    return code


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _enter(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        call("setns", descriptor, 0)
    finally:
        os.close(descriptor)


def _show_shared_memory(directory: str) -> None:
    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    call("mount", os.fsencode(directory), b"/dev/shm", None, _MS_BIND, None)


def call(name: str, *arguments: int | bytes | None) -> None:
    """Calls a function of the C library that returns 0 or -1. Raises OSError."""
    import ctypes  # heavy, and most runs don't need it; os.setns and os.unshare came with Python 3.12

    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(word) if name == "mount" and isinstance(word, int) else word for word in arguments]
    if getattr(libc, name)(*words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # after a change of namespaces Python's own files may be gone
