"""Small text files that several processes read while one replaces them. Light: the emulator imports it."""

import os


def read_text(path: str) -> str | None:
    """The text of a file, None where it is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_text(path: str, text: str) -> None:
    """Replaces a file as a whole, so that a reader sees the old text or the new one. Makes missing directories."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(temporary, path)


def remove(path: str) -> None:
    """Removes a file; a missing one is fine."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def names_in(text: str | None, name: str) -> bool:
    """Whether a fault file names `name`: words apart by white space, no words means every name."""
    if text is None:
        return False
    words = text.split()
    return not words or name in words


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22), None where it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def install_root() -> str:
    """The directory that our packages were installed in, for a process that is started without our environment."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def set_process_name(name: str) -> None:
    """The name in ps and /proc/<pid>/comm, which the kernel cuts at 15 characters; without effect where it may not."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        return
