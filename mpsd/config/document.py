"""A file -> its YAML nodes: what is no UTF-8, no YAML, or too large, with the line it begins in."""

import os
import stat
from typing import Any, Final

import yaml

from mpsd.common.quantity import format_bytes
from mpsd.config import syntax
from mpsd.config.model import KIND
from mpsd.config.problems import file_error

MAX_FILE_BYTES: Final = 1 << 20

_MAX_DEPTH = 16
_MAX_NODES = 20_000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_config(path: str) -> bytes:
    """The bytes of a regular file of at most MAX_FILE_BYTES; never blocks on a pipe.

    Raises:
        ConfigErrors: it can't be read, and why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(kind):
                raise file_error(path, "cannot be read: it is a directory, name the file in it")
            if not stat.S_ISREG(kind):
                raise file_error(path, "cannot be read: it is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise file_error(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise file_error(path, f"cannot be read: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise file_error(path, f"cannot be read: it is larger than {format_bytes(MAX_FILE_BYTES)}")
    return data


def checked_text(content: str | bytes, source: str) -> str:
    """The content as text. Raises ConfigErrors where it is no plain UTF-8, has a NUL, or more than MAX_FILE_BYTES."""
    if isinstance(content, bytes):
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise file_error(source, "must be UTF-8: this looks like UTF-16")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise file_error(source, "must be UTF-8", content.count(b"\n", 0, error.start) + 1) from error
    else:
        text = content
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise file_error(source, "must be UTF-8", text.count("\n", 0, error.start) + 1) from error
    if len(text) > MAX_FILE_BYTES:
        raise file_error(source, f"must not be larger than {format_bytes(MAX_FILE_BYTES)}")
    if text.startswith("\ufeff"):
        raise file_error(source, "must not start with a byte order mark: save it as plain UTF-8", 1)
    if (position := text.find("\0")) >= 0:
        raise file_error(source, "must not contain NUL characters", text.count("\n", 0, position) + 1)
    return text


def compose(text: str, source: str, what: str = KIND) -> yaml.Node:
    """The one document of the text, a `what`. Bounded before the tree is built: its composer recurses."""
    if found := syntax.template(text):
        raise file_error(source, *found)
    try:
        _check_shape(text, source)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise file_error(source, *syntax.explain(error, text, _LOADER)) from error
    except yaml.YAMLError as error:
        raise file_error(source, f"is not valid YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise file_error(source, f"is empty: it must hold a {what}")
    return root


def _check_shape(text: str, source: str) -> None:
    depth = nodes = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise file_error(source, "must hold one YAML document, a second one starts here", line)
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if nodes > _MAX_NODES:
                raise file_error(source, f"must not hold more than {_MAX_NODES} YAML values", line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise file_error(source, f"must not be nested deeper than {_MAX_DEPTH} levels", line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
