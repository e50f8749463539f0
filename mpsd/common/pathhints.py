"""Hints that something at a path may have changed, from inotify: never more than hints, whoever uses them looks.

The directories of the whole symlink chain are watched: a ConfigMap volume swaps its `..data` link and never touches the
file, and a directory that is missing shows up in its parent. What the watch needs can be used up, its directory can be
replaced, and the library's threads can end: `arm` looks for all of it, so call it with every look.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.common.log import get_logger

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers.api import BaseObserver

log = get_logger("watch")

_MAX_LINKS: Final = 40


class PathHints:
    """Calls `notice` when something in the chain of a path changes. `arm` and `close` are for one thread.

    Args:
        path: absolute; it may be a link, and may be missing.
        notice: called from a thread of the library; it must not raise or block.
        retry_s: how long to leave inotify alone after it failed.
        instead: what is done while inotify can't be had, for the log: "reading it every 2 s".
        siblings: what is made, moved or deleted beside it is a hint, too.
    """

    def __init__(
        self, path: str, notice: Callable[[], object], *, retry_s: float, instead: str, siblings: bool = False
    ) -> None:
        self._path, self._on_hint, self._siblings = path, notice, siblings
        self._retry_s, self._instead = retry_s, instead
        self._chain = Chain(frozenset(), frozenset())
        self._observer: BaseObserver | None = None
        self._retry_at_s = 0.0
        self._failure = ""

    def arm(self) -> bool:
        """Watches the chain as it is now. Whether hints come; where not, only looking helps."""
        chain = chain_of(self._path)
        if self._observer is not None:
            dead = _dead_thread(self._observer)
            if dead or chain != self._chain:
                self.close()
            if dead:
                self._failed(f"the thread {dead} of the watch ended")
        if self._observer is None and time.monotonic() >= self._retry_at_s:
            self._chain = chain
            self._start()
        return self._observer is not None

    def close(self) -> None:
        """Stops watching; no thread is left."""
        observer, self._observer = self._observer, None
        if observer is not None:
            _stop(observer)

    def _start(self) -> None:
        observer: BaseObserver | None = None
        try:
            from watchdog.observers import Observer

            _prepare_library()
            observer = Observer()
            handler = _handler(self._notice)
            for directory, _, _ in self._chain.directories:
                observer.schedule(handler, directory, event_filter=_event_filter())
            observer.start()
        except Exception as error:  # noqa: BLE001 - no instance, watch or thread left, directory gone, a fault of the library
            if observer is not None:
                _stop(observer)
            self._failed(_explained(error))
            return
        self._observer = observer
        if self._failure:
            self._failure = ""
            log.info("inotify watches again", path=self._path)

    def _failed(self, failure: str) -> None:
        self._retry_at_s = time.monotonic() + self._retry_s
        if failure != self._failure:
            self._failure = failure
            log.warning("inotify can't watch", path=self._path, error=failure, instead=self._instead)

    def _notice(self, event: "FileSystemEvent") -> None:
        """Runs in a thread of the observer, under its lock."""
        entries = self._chain.entries
        gone = event.event_type == "deleted" and event.is_directory
        beside = self._siblings and event.event_type in ("created", "moved", "deleted")
        if gone or beside or event.src_path in entries or event.dest_path in entries:
            self._on_hint()


class Chain(NamedTuple):
    """What must be watched to see every change of a file: `entries` are the links and the file at their end."""

    directories: frozenset[tuple[str, int, int]]
    """path, device, inode: a directory made anew is another one"""
    entries: frozenset[str]


def chain_of(path: str) -> Chain:
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
    return Chain(frozenset(directories), frozenset(entries))


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


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


def _explained(error: Exception) -> str:
    text = str(error) or type(error).__name__
    match getattr(error, "errno", None):
        case errno.EMFILE:
            return f"{text}: raise fs.inotify.max_user_instances"
        case errno.ENOSPC:
            return f"{text}: raise fs.inotify.max_user_watches"
        case _:
            return text


def _prepare_library() -> None:
    """Its own words are about its insides (each stop may log an error that is none): what matters we say. And a reader
    that all observers share (watchdog 7) must live: the library keeps it for ever, also when it ended or never began.
    """
    from watchdog.observers import inotify_c

    logging.getLogger("watchdog").setLevel(logging.CRITICAL)
    shared = getattr(inotify_c, "InotifyFD", None)
    reader = getattr(shared, "_instance", None)
    if isinstance(reader, threading.Thread) and not reader.is_alive():
        setattr(shared, "_instance", None)  # noqa: B010 - not in the types of watchdog 6


def _dead_thread(observer: "BaseObserver") -> str:
    """The class of a thread that a running observer should have and has no more, empty while all live: its own, its
    emitters' and the readers that these have."""
    for emitter in (observer, *observer.emitters):
        mine = [value for value in list(vars(emitter).values()) if isinstance(value, threading.Thread)]
        for thread in (emitter, *mine):
            if not thread.is_alive():
                return type(thread).__name__
    return ""


def _stop(observer: "BaseObserver") -> None:
    """Also for one that did not start: its threads may have."""
    with suppress(Exception):  # what its threads died of may come up again
        observer.stop()
    if observer.ident is not None:
        observer.join()
