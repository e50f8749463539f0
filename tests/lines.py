"""Lines that a program says, one after the other, each waited for."""

import os
import select
from typing import IO


def next_line(stream: "IO[str] | None", timeout_s: float) -> str:
    """The next line of a pipe, without blanks around it; what was said before the pipe closed counts, too.

    Read byte by byte: what a reader has in its buffer no select sees.
    """
    assert stream is not None
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([stream], [], [], timeout_s)[0], f"the program says nothing more than {line!r}"
        byte = os.read(stream.fileno(), 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()
