"""Texts from outside can't write on a terminal what they like."""

import json

import pytest

from mpsd.common.text import one_line, plain, plain_lines

HOSTILE = ["a\u202eb", "a\nb", "a\r\x1b[2Jb", "a\x9b2Jb", "a\u2028b", "a\u200bb", "\udc80", "\U000e0041", "\x7f"]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_unprintable_is_escaped_and_can_be_read_back(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable()
    assert shown.isascii()
    assert json.loads(f'"{shown}"') == text
    assert plain(shown) == shown


@pytest.mark.parametrize("text", ["", "web-0", "größe 8 Gi", "日本", "back\\slash"])
def test_what_is_printable_stays(text: str) -> None:
    assert plain(text) == text


def test_lines_of_our_own_stay_lines() -> None:
    assert plain_lines("a\nb\u202e\n") == "a\nb\\u202e\n"


def test_one_line_has_the_words_of_all_lines() -> None:
    assert one_line(" a\n b\t\tc\u202e\n") == "a b c\\u202e"
