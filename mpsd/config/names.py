"""Names as the API server wants them: labels, domains, extended resources (pure)."""

import re

from mpsd.config.value import Value

MAX_LABEL = 63
MAX_DOMAIN = 253
LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
OURS, NVIDIAS = "gpufrac.dev", "nvidia.com"
"""The domain of names in examples, and that of NVIDIA's device plugin: whole GPUs, parts by MIG, MPS or time-slicing,
and whatever its config renames them to."""
_RESOURCE_BASE = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")


def label(value: Value, what: str) -> str | None:
    """A DNS label (RFC 1123), as the API server wants namespaces to be."""
    rule = f"must be {what}: at most {MAX_LABEL} lower-case letters, digits and inner dashes"
    text = value.matching(LABEL, rule)
    if text is not None and len(text) > MAX_LABEL:
        value.note(rule)
        return None
    return text


def is_domain(text: str) -> bool:
    """Whether it is a DNS subdomain (RFC 1123), as the API server wants names of nodes to be."""
    return len(text) <= MAX_DOMAIN and all(LABEL.fullmatch(label) for label in text.split("."))


def resource_name_rule(name: str) -> str:
    """The rule that an extended resource name breaks, empty when it is fine.

    The API server and the kubelet (1.36.2, tried) take what, behind `requests.`, is a label key outside kubernetes.io.
    """
    prefix, slash, base = name.partition("/")
    if not slash or "/" in base:
        return "must be <domain>/<name> with exactly one slash"
    if "kubernetes.io/" in name:
        return "must not lie in kubernetes.io"
    if prefix == NVIDIAS:
        meant = f"{OURS}/{base}" if _RESOURCE_BASE.fullmatch(base) else f"one in {OURS}"
        return (
            f"must not lie in {NVIDIAS}: names there are NVIDIA's device plugin's, and a kubelet knows one plugin for "
            f"a name, whichever registered last: write {meant}, or a domain of your own"
        )
    if name.startswith("requests."):
        return "must not start with requests."
    if len(prefix) > 253 - len("requests."):
        return "the domain must be at most 244 characters long"
    if not all(LABEL.fullmatch(label) for label in prefix.split(".")):
        return "the domain must be lower-case letters, digits, dashes and dots, such as gpufrac.dev"
    if len(base) > 63:
        return "the part behind the slash must be at most 63 characters long"
    if not _RESOURCE_BASE.fullmatch(base):
        return "the part behind the slash must be letters, digits and inner `-`, `_`, `.`"
    return ""
