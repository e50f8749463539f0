"""Live reload of the config file: hints from inotify wake a loop, the loop compares bytes.

A change counts once two reads in a row agree, so a file caught half-written, or missing between a delete and a create,
is neither applied nor reported. The directories of the whole symlink chain are watched: a ConfigMap volume swaps its
`..data` link and never touches the file.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mpsd.config.load import ConfigErrors, parse_config, read_config
from mpsd.config.model import NodeConfig
from mpsd.threads import GuardedThread

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers.api import BaseObserver

logger = logging.getLogger(__name__)

POLL_S = 30.0
"""How often the file is read without a hint, in case one was lost."""
FALLBACK_POLL_S = 2.0
"""The same where inotify is not to be had."""
SETTLE_S = 0.25
"""Time between the two reads that must agree."""

_MAX_LINKS = 40


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
        self._hints = _Hints(self._path, poll_s, fallback_poll_s)
        self._closed = threading.Event()
        self._thread = GuardedThread(self._run, "config-watch")

    def start(self) -> None:
        """Starts the thread. A change since `current` was loaded is found at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for it, unless called from a callback. May be called again, or without start()."""
        self._closed.set()
        self._hints.wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                interval_s = self._hints.arm()
                self._hints.wake.clear()  # before the read: a change from here on wakes us again
                if self._closed.is_set():
                    break
                self._look()
                if self._hints.wake.wait(interval_s):
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


class _Chain(NamedTuple):
    """What must be watched to see every change of a file: `entries` are the links and the file at their end."""

    directories: frozenset[tuple[str, int, int]]
    """path, device, inode: a directory made anew is another one"""
    entries: frozenset[str]


def _chain(path: str) -> _Chain:
    """Follows an absolute path link by link; it ends where something is missing."""
    directories: set[tuple[str, int, int]] = set()
    entries: set[str] = set()
    names = _names(path)
    directory = "/"
    links = 0
    while names:
        entry = os.path.join(directory, names.pop())
        try:
            target = os.readlink(entry)
        except OSError:
            target = ""
        if not target and names and os.path.isdir(entry):
            directory = os.path.normpath(entry)  # `..` is safe to fold: no link is left in front of it
            continue
        try:
            found = os.stat(directory)
        except OSError:
            break
        directories.add((directory, found.st_dev, found.st_ino))
        entries.add(entry)
        links += 1
        if not target or links > _MAX_LINKS:
            break
        names += _names(target)
        directory = "/" if target.startswith("/") else directory
    return _Chain(frozenset(directories), frozenset(entries))


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


class _Hints:
    """Sets `wake` when something in the chain of a path changes. Used by one thread, but for `wake`."""

    def __init__(self, path: str, poll_s: float, fallback_poll_s: float) -> None:
        self.wake = threading.Event()
        self._path = path
        self._poll_s = poll_s
        self._fallback_poll_s = fallback_poll_s
        self._chain = _Chain(frozenset(), frozenset())
        self._observer: BaseObserver | None = None
        self._retry_at_s = 0.0
        self._failure = ""

    def arm(self) -> float:
        """Watches the chain as it is now. Gives the seconds after which to look without a hint."""
        chain = _chain(self._path)
        if self._observer is not None and chain != self._chain:
            self.close()
        if self._observer is None and time.monotonic() >= self._retry_at_s:
            self._chain = chain
            self._start()
        return self._poll_s if self._observer is not None else self._fallback_poll_s

    def close(self) -> None:
        """Stops watching; no thread is left."""
        observer, self._observer = self._observer, None
        if observer is not None:
            _stop(observer)

    def _start(self) -> None:
        observer: BaseObserver | None = None
        try:
            from watchdog.observers import Observer

            observer = Observer()
            handler = _handler(self._notice)
            for directory, _, _ in self._chain.directories:
                observer.schedule(handler, directory, event_filter=_event_filter())
            observer.start()
        except (ImportError, OSError, RuntimeError) as error:  # no instance or watch left, no thread, directory gone
            if observer is not None:
                _stop(observer)
            self._retry_at_s = time.monotonic() + self._poll_s
            if (failure := str(error)) != self._failure:
                self._failure = failure
                logger.warning(
                    "cannot watch %s through inotify (%s): reading it every %g s instead; raising "
                    "fs.inotify.max_user_instances or max_user_watches helps where they are used up",
                    self._path,
                    failure,
                    self._fallback_poll_s,
                )
            return
        self._observer = observer
        if self._failure:
            self._failure = ""
            logger.info("watching %s through inotify again", self._path)

    def _notice(self, event: "FileSystemEvent") -> None:
        """Runs in a thread of the observer, under its lock."""
        entries = self._chain.entries
        gone = event.event_type == "deleted" and event.is_directory
        if gone or event.src_path in entries or event.dest_path in entries:
            self.wake.set()


def _event_filter() -> "list[type[FileSystemEvent]]":
    """Not opened and closed unwritten: our own reads would wake us for ever."""
    from watchdog import events

    return [
        events.FileClosedEvent,
        events.FileCreatedEvent,
        events.FileDeletedEvent,
        events.FileModifiedEvent,
        events.FileMovedEvent,
        events.DirCreatedEvent,
        events.DirDeletedEvent,
        events.DirMovedEvent,
        getattr(events, "FileAttribEvent", events.FileModifiedEvent),  # of its own since watchdog 7
    ]


def _handler(notice: "Callable[[FileSystemEvent], None]") -> "FileSystemEventHandler":
    from watchdog.events import FileSystemEventHandler

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: "FileSystemEvent") -> None:
            notice(event)

    return Handler()


def _stop(observer: "BaseObserver") -> None:
    """Also for one that did not start: its threads may have."""
    observer.stop()
    if observer.ident is not None:
        observer.join()
