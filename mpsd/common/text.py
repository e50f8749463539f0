"""Texts from outside (names of pods, environments, paths, what others' programs print) for a terminal or a log (pure).

What is unprintable can start a line, move the cursor or turn the direction of what follows.
"""

import json


def plain(text: str) -> str:
    """The text with everything unprintable escaped: controls, line and paragraph separators, direction marks, lone
    surrogates. One line, and the same for what is plain already."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def plain_lines(text: str) -> str:
    """The same of each line of a text whose line breaks are our own."""
    return "\n".join(plain(line) for line in text.split("\n"))


def one_line(text: str) -> str:
    """The words of a text of any length and form, a blank apart, escaped as `plain` does."""
    return plain(" ".join(text.split()))


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1] if ord(char) not in range(0x7F, 0xA0) else f"\\u{ord(char):04x}"
