"""Names and annotations as the API server wants them, and its words where they are not (pure)."""

import re
from collections.abc import Mapping

from mpsd.common.quantity import quoted

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_NAME_PART_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_MAX_ANNOTATIONS_BYTES = 256 * 1024


def annotation_problems(annotations: Mapping[str, str], path: str) -> list[str]:
    """The API server's rules for keys (as for labels) and for the size of all. A long container name makes a key of
    that container too long."""
    problems = []
    for key in annotations:
        prefix, slash, name = key.rpartition("/")
        if slash and (not SUBDOMAIN.fullmatch(prefix.lower()) or len(prefix) > 253):
            rule = SUBDOMAIN_RULE if len(prefix) <= 253 else "must be no more than 253 characters"
            problems.append(f"{path}: Invalid value: {quoted(key)}: prefix part {rule}")
        if len(name) > 63:
            problems.append(f"{path}: Invalid value: {quoted(key)}: name part must be no more than 63 characters")
        elif not _NAME_PART.fullmatch(name):
            problems.append(f"{path}: Invalid value: {quoted(key)}: {_NAME_PART_RULE}")
    size_bytes = sum(len(_utf8(key)) + len(_utf8(value)) for key, value in annotations.items())
    if size_bytes > _MAX_ANNOTATIONS_BYTES:
        problems.append(f"{path}: Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes")
    return problems


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold half of a pair
