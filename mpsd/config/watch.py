"""Live reload of the config file: hints from inotify wake a loop, the loop compares bytes.

A change counts once two reads in a row agree, so a file caught half-written, or missing between a delete and a create,
is neither applied nor reported.
"""

import logging
import os
import threading
from collections.abc import Callable

from mpsd.common.pathhints import PathHints
from mpsd.common.threads import GuardedThread
from mpsd.config.load import ConfigErrors, parse_config, read_config
from mpsd.config.model import NodeConfig

logger = logging.getLogger(__name__)

POLL_S = 30.0
"""How often the file is read without a hint, in case one was lost."""
FALLBACK_POLL_S = 2.0
"""The same where there is no inotify."""
SETTLE_S = 0.25
"""Time between the two reads that must agree."""


class ConfigWatcher:
    """Calls `on_change` with each new valid config, `on_error` with the text of each distinct content that is not one.

    A bad file keeps the old config. `on_change` also says that an earlier error is over, then maybe with the config
    that was in force all along. Both are called from the watcher's thread, never at the same time.

    Args:
        path: the config file; it may be a link, and may be missing for now.
        current: the config in force, usually just loaded from `path`: the same in the file is no change. None: the
            first valid content is one.
        poll_s, fallback_poll_s, settle_s: seconds, see the constants of this module.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_change: Callable[[NodeConfig], None],
        on_error: Callable[[str], None],
        *,
        current: NodeConfig | None = None,
        poll_s: float = POLL_S,
        fallback_poll_s: float = FALLBACK_POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._path = os.path.abspath(path)
        self._on_change = on_change
        self._on_error = on_error
        self._config = current
        self._failed = False
        self._seen: bytes | str | None = None
        self._settle_s = settle_s
        self._poll_s, self._fallback_poll_s = poll_s, fallback_poll_s
        self._wake, self._closed = threading.Event(), threading.Event()
        instead = f"reading it every {fallback_poll_s:g} s"
        self._hints = PathHints(self._path, self._wake.set, retry_s=poll_s, instead=instead)
        self._thread = GuardedThread(self._run, "config-watch")

    def start(self) -> None:
        """Starts the thread. A change since `current` was loaded is found at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for it, unless called from a callback. May be called again, or without start()."""
        self._closed.set()
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                interval_s = self._poll_s if self._hints.arm() else self._fallback_poll_s
                self._wake.clear()  # before the read: a change from here on wakes us again
                if self._closed.is_set():
                    break
                self._look()
                if self._wake.wait(interval_s):
                    self._closed.wait(self._settle_s)  # hints come in bursts
        finally:
            self._hints.close()

    def _look(self) -> None:
        """Applies what the file holds, once it is new and has settled."""
        content = _content(self._path)
        while content != self._seen:
            if self._closed.wait(self._settle_s):
                return
            previous, content = content, _content(self._path)
            if content == previous:
                self._seen = content
                self._apply(content)

    def _apply(self, content: bytes | str) -> None:
        error = content if isinstance(content, str) else ""
        if isinstance(content, bytes):
            try:
                config = parse_config(content, self._path)
            except ConfigErrors as errors:
                error = str(errors)
        try:
            if error:
                self._failed = True
                self._on_error(error)
            elif self._failed or config != self._config:
                self._failed, self._config = False, config
                self._on_change(config)
        except Exception:
            logger.exception("cannot pass on a change of %s", self._path)


def _content(path: str) -> bytes | str:
    """The bytes of the file, or the text of why it can't be read."""
    try:
        return read_config(path)
    except ConfigErrors as error:
        return str(error)
