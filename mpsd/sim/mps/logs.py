"""control.log and server.log in their documented line format."""

import os
import time


class Log:
    """Appends `[time Component pid] message` lines; survives truncation and rotation by copy, as O_APPEND does."""

    def __init__(self, directory: str, name: str, component: str, echo: bool = False) -> None:
        os.makedirs(directory, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(os.path.join(directory, name), flags, 0o640)
        self._component = component
        self._echo = echo

    def write(self, message: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        line = f"[{stamp}.{int(now % 1 * 1000):03d} {self._component} {os.getpid():5d}] {message}\n".encode()
        try:
            os.write(self._descriptor, line)
            if self._echo:
                os.write(1, line)
        except OSError:
            return  # a full disk or a closed terminal does not stop the daemon
