"""Which socket is bound at a path: when it is a new one, and when only its mode or owner changed."""

import os
import threading


class SocketFile:
    """Tells the file at a path from every other one that was ever there. Thread-safe.

    A bind makes a new inode, always; chmod, chown and utimes change times only. But a new inode may have the number of
    the one before (tmpfs and ext4 give freed numbers out again at once), so the last one seen is kept open, which keeps
    its number from being given out. O_PATH neither connects nor needs a right to the file (open(2)).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._found = (0, 0)
        self._number = 0
        self.born_unix_s = 0.0
        """When the last one seen was bound."""

    def look(self) -> int | None:
        """The number of the file that is there: 1 for the first one seen, another for every other; None: none is."""
        with self._lock:
            try:
                found = os.stat(self.path)
                if self._fd < 0 or (found.st_dev, found.st_ino) != self._found:
                    self._keep()
            except OSError:
                return None
            return self._number

    def close(self) -> None:
        """Lets the file go; the next look counts on."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _keep(self) -> None:
        try:
            fd = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError:  # no descriptor left: its number must do until there is one
            fd, found = -1, os.stat(self.path)
        else:
            found = os.fstat(fd)
        if self._fd >= 0:
            os.close(self._fd)
        if (found.st_dev, found.st_ino) != self._found:
            self._number += 1
            self.born_unix_s = found.st_mtime
        self._fd, self._found = fd, (found.st_dev, found.st_ino)

    def __del__(self) -> None:
        self.close()
