"""What a pod's annotations ask for one of its containers, and keys that were meant for us but are none (pure).

The contract is the one of the gpu-fractioning operator and KAI's NvFractions: a key is prefix + container's name + one
of SUFFIXES, matched exactly. Tried cases stand in tests/unit/deviceplugin/annotated/; where we are stricter, in
docs/annotations.md.
"""

import json
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from math import floor

import msgspec

from deviceplugin.annotated.fractions import KAI_FRACTION, is_part_of_gpu
from deviceplugin.annotated.reasons import AnnotationCode, RefusedError
from mpsd.common.quantity import MAX_TEXT, MAX_VALUE, QuantityError, format_bytes, parse_bytes, quoted
from mpsd.gpu.model import MIB, Mode

REQUEST = ".gpu-memory.request"
LIMIT = ".gpu-memory.limit"
MODE = ".gpu-compute.mode"
PORTION = ".gpu-compute.portion"
DEVICES = ".gpus.devices"
SUFFIXES = (REQUEST, LIMIT, MODE, PORTION, DEVICES)

MAX_DEVICES = 128
"""Longest device list we look at: no node has as many GPUs, and annotations may hold 256 KiB."""
MAX_FINDINGS = 16
"""Most findings told of one pod."""

_MAX_BYTES = MAX_VALUE // MIB * MIB
_MAX_KEY_NAME = 63  # of an annotation's key, behind the slash
_MAX_KEY = 253 + len("/") + _MAX_KEY_NAME
_BLANKS = "".join(  # Unicode's White_Space, which the operator trims; str.strip() takes U+001C to U+001F, too
    ("\t\n\v\f\r \x85\xa0\u1680", *map(chr, range(0x2000, 0x200B)), "\u2028\u2029\u202f\u205f\u3000")
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_PERCENT = re.compile(r"([0-9]{1,3})%?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")

_DEFAULT_PREFIX = "nvidia.com/container."
_OLD_PREFIX = "nvidia.com/gpu-memory.container."  # of gpu-fractioning before its 2026 rename
_KAI_PREFIX = "kai.scheduler/container."
_KAI_PORTION_LIMIT = ".gpu-memory.portion.limit"
_UNNAMED = "<container>"
_SEPARATORS = "._-"
_LONGEST_LOOSE = 40  # characters of a misspelt suffix
_LOOSE = re.compile(
    r"gpus?[._-]*(?:"
    r"mem(?:ory)?[._-]*(?P<kai>portion[._-]*)?(?:(?P<request>request)|(?P<limit>limit))"
    r"|compute[._-]*(?:(?P<mode>mode)|(?P<portion>portion)|(?P<compute>request|limit|fraction|share|percent(?:age)?))"
    r"|(?P<devices>device)"
    r")s?$",
    re.IGNORECASE,
)
_LOOSE_SUFFIXES = {"request": REQUEST, "limit": LIMIT, "mode": MODE, "portion": PORTION, "devices": DEVICES}
_COMPUTE_REQUEST = ".gpu-compute.request"
"""What users of KAI write from its 0.20 on; its admission refuses them PORTION, which its binder makes of this. Older
versions refuse both."""
_WHOLE_POD = re.compile(r"gpus?[._-]*(?:(?P<memory>mem(?:ory)?)|(?P<fraction>fraction|portion|share))", re.IGNORECASE)


class ContractError(RefusedError):
    """An annotation that must not be guessed at. `detail` is the rule alone; the container's name is in the key."""

    def __init__(self, key: str, value: str, detail: str) -> None:
        super().__init__(AnnotationCode.BAD_ANNOTATION, f"cannot use annotation {key}: {quoted(value)}: {detail}")
        self.key = key
        self.value = value
        self.detail = detail


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What one container asks for on each of its GPUs. Memory in whole MiB, request <= limit. `thread_percent` is None
    where nothing caps it. `devices` are the entries of the list as written; empty where nobody assigned any.
    `of_total`: a part of the GPU was asked for, and the scheduler made the sizes of the GPU's total memory."""

    request_bytes: int
    limit_bytes: int
    mode: Mode
    thread_percent: int | None = None
    devices: tuple[str, ...] = ()
    of_total: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A key that does not do what its author meant. `nearest` is the legal key to write instead, or beside it; with
    `<container>` in it where that is unknown, and empty where none is near."""

    key: str
    problem: str
    nearest: str = ""

    def __str__(self) -> str:
        return f"annotation {_shown(self.key)} {self.problem}"


def ask_of(annotations: Mapping[str, str], container: str, prefix: str) -> Ask | None:
    """What a container asks for, None when it has no memory key: then its other keys mean nothing.

    Raises:
        ContractError: of the first malformed key, in the order of request, limit, mode, portion, devices.
    """
    keys = {suffix: f"{prefix}{container}{suffix}" for suffix in SUFFIXES}
    found = {suffix: annotations[key] for suffix, key in keys.items() if key in annotations}
    sizes = {suffix: _memory_bytes(keys[suffix], found[suffix]) for suffix in (REQUEST, LIMIT) if suffix in found}
    if not sizes:
        return None
    request_bytes = sizes.get(REQUEST, sizes.get(LIMIT, 0))
    limit_bytes = sizes.get(LIMIT, request_bytes)
    if request_bytes > limit_bytes:
        rule = f"must be at most the limit ({found[LIMIT]} in {keys[LIMIT]}), counted in whole MiB"
        raise ContractError(keys[REQUEST], found[REQUEST], rule)
    mode = _mode(keys[MODE], found[MODE]) if MODE in found else Mode.TIME_SLICING
    percent = _percent(keys[PORTION], found[PORTION]) if PORTION in found else None
    return Ask(
        request_bytes=request_bytes,
        limit_bytes=limit_bytes,
        mode=mode,
        thread_percent=percent if mode is Mode.SM_SHARING else None,
        devices=_devices(keys[DEVICES], found.get(DEVICES, "")),
        of_total=is_part_of_gpu(annotations, container),
    )


def parse_key(key: str, prefix: str) -> tuple[str, str] | None:
    """The container and the suffix of a legal key. A container's name is a DNS label, so it ends at the first dot."""
    if not key.startswith(prefix):
        return None
    container, dot, rest = key[len(prefix) :].partition(".")
    legal = _LABEL.fullmatch(container) and dot + rest in SUFFIXES
    return (container, dot + rest) if legal else None


def findings(
    annotations: Mapping[str, str], prefix: str, containers: Collection[str] | None = None
) -> tuple[Finding, ...]:
    """Keys that look meant for us but are not legal, and legal ones without effect: at most MAX_FINDINGS, in the order
    of the keys. Values are not looked at, but for the mode of a container with a portion.

    Args:
        containers: names of all containers of the pod, None where they are not known yet.
    """
    found: list[Finding] = []
    legal: dict[str, list[str]] = {}
    for key in sorted(annotations):
        parsed = parse_key(key, prefix)
        if parsed is not None:
            legal.setdefault(parsed[0], []).append(parsed[1])
        elif len(found) < MAX_FINDINGS and (finding := _misspelt(key, prefix)) is not None:
            portion = key.removesuffix(_COMPUTE_REQUEST) + PORTION
            if not (key.endswith(_COMPUTE_REQUEST) and portion in annotations):  # its scheduler has acted on it
                found.append(finding)
    for container, suffixes in legal.items():
        if len(found) >= MAX_FINDINGS:
            break
        if containers is None or container in containers:
            found += _without_effect(annotations, prefix, container, suffixes)
        else:
            found += _of_nobody(prefix, container, suffixes, containers)
    return tuple(sorted(found[:MAX_FINDINGS], key=lambda finding: finding.key))


# -- values


def _memory_bytes(key: str, text: str) -> int:
    try:
        size_bytes = parse_bytes(text)
    except QuantityError as error:
        raise ContractError(key, text, f"{error.reason}{_part(text)}") from error
    if size_bytes < MIB:
        bare = text.isdigit() and size_bytes > 0
        meant = f', and a number without a suffix counts bytes; did you mean "{size_bytes}Mi"?' if bare else ""
        raise ContractError(key, text, f"must be at least 1Mi{meant or _part(text)}")
    whole_bytes = -(-size_bytes // MIB) * MIB
    if whole_bytes > _MAX_BYTES:
        raise ContractError(key, text, f"must be at most {format_bytes(_MAX_BYTES)}")
    return whole_bytes


def _part(text: str) -> str:
    """What to do for who asks for a part of a GPU, empty for others."""
    number = text.strip(_BLANKS)[:MAX_TEXT]
    bare = number.removesuffix("%")
    if not _NUMBER.fullmatch(bare) or (bare == number and not 0 < float(number) < 1):
        return ""
    return "; a fraction of a GPU is for the scheduler, which makes memory of it (annotation gpu-fraction)"


def _mode(key: str, text: str) -> Mode:
    try:
        return Mode(text.strip(_BLANKS))
    except ValueError:
        meant = re.sub(r"[\s_-]+", "-", text[:MAX_TEXT].strip().lower())
        suggestion = f'; did you mean "{meant}"?' if meant in tuple(Mode) else ""
        detail = f"must be {Mode.TIME_SLICING} or {Mode.SM_SHARING}{suggestion}"
        raise ContractError(key, text, detail) from None


def _percent(key: str, text: str) -> int:
    """floor(portion * 100) in a double, as the operator does: portions that sum to 1 never sum to more than 100. At
    least 1, as MPS reads 0 as no cap. The operator also takes hexadecimal floats, which no scheduler writes."""
    number = text.strip(_BLANKS)
    # The length first: the pattern takes quadratic time on long runs of digits.
    portion = float(number) if len(number) <= MAX_TEXT and _NUMBER.fullmatch(number) else 0.0
    if not 0 < portion <= 1:
        raise ContractError(key, text, f"must be a decimal number greater than 0 and at most 1{_meant(number)}")
    return max(floor(portion * 100), 1)


def _meant(number: str) -> str:
    """The portion for who wrote a percentage."""
    match = _PERCENT.fullmatch(number)
    return f'; did you mean "{int(match[1]) / 100:g}"?' if match and 1 < int(match[1]) <= 100 else ""


def _devices(key: str, text: str) -> tuple[str, ...]:
    if not text.strip(_BLANKS):
        return ()
    if text.count(",") >= MAX_DEVICES:
        raise ContractError(key, text, f"must name at most {MAX_DEVICES} devices")
    entries = tuple(entry.strip(_BLANKS) for entry in text.split(","))
    if "" in entries:
        raise ContractError(
            key, text, "must be names of devices with one comma between them: one of the names is empty"
        )
    return entries


# -- keys


def _without_effect(annotations: Mapping[str, str], prefix: str, container: str, suffixes: list[str]) -> list[Finding]:
    def finding(suffix: str, problem: str, nearest: str) -> Finding:
        return Finding(key=f"{prefix}{container}{suffix}", problem=f"has no effect {problem}", nearest=nearest)

    if REQUEST in suffixes or LIMIT in suffixes:
        key = f"{prefix}{container}{MODE}"
        if PORTION not in suffixes or annotations.get(key, "").strip(_BLANKS) not in ("", Mode.TIME_SLICING):
            return []
        problem = f"with {Mode.TIME_SLICING}: a portion caps {Mode.SM_SHARING}, which {key} can ask for"
        return [finding(PORTION, problem, key)]
    if suffixes == [MODE]:
        return []  # KAI's reservation pods have this one, and mean no fraction
    key = f"{prefix}{container}{LIMIT}"
    return [finding(suffix, f"without a memory key of the same container: add {key}", key) for suffix in suffixes]


def _of_nobody(prefix: str, container: str, suffixes: list[str], containers: Collection[str]) -> list[Finding]:
    """Of a container that the pod does not have."""
    near = get_close_matches(container, sorted(containers), n=1, cutoff=0.6)
    found = []
    for suffix in suffixes:
        nearest = f"{prefix}{near[0]}{suffix}" if near else ""
        meant = f"; did you mean {nearest}?" if near else f": it has {', '.join(sorted(containers)[:5])}"
        problem = f"has no effect: the pod has no container {container}{meant}"
        found.append(Finding(key=f"{prefix}{container}{suffix}", problem=problem, nearest=nearest))
    return found


def _misspelt(key: str, prefix: str) -> Finding | None:
    """A finding when a key that is not legal looks meant for us."""
    if len(key) > _MAX_KEY:
        return None  # the API server takes no such key
    old = key.lower().startswith(_OLD_PREFIX)
    home = not old and prefix != "" and key[: len(prefix)].lower() == prefix.lower()
    domain, _, name = key.rpartition("/")
    rest = key[len(_OLD_PREFIX) :] if old else key[len(prefix) :] if home else name
    loose = _LOOSE.search(rest[-_LONGEST_LOOSE:])
    if (pods := _of_whole_pod(key, domain, name, prefix)) is not None:
        return pods
    if loose is not None:
        head = rest[: loose.start() - min(_LONGEST_LOOSE, len(rest))]
        suffix = _LOOSE_SUFFIXES.get(loose.lastgroup or "", "")
    elif old or (home and prefix.endswith(tuple(_SEPARATORS))):
        head, _, tail = rest.partition(".")
        suffix = _nearest_suffix(f"{REQUEST.rpartition('.')[0]}.{tail}" if old else tail)
    else:
        return None  # below a prefix such as example.com/ are keys of others, too
    if not home and not old:
        if not _meant_for_us(domain, name, head, prefix):
            return None
        head = _without_word(head, prefix)
    container = head.strip(_SEPARATORS)
    if loose is not None and loose["kai"]:
        return _portion_limit(key, domain, container)
    if loose is not None and loose["compute"]:
        return _compute_request(key, container)
    return _finding(key, prefix, container, suffix, home=home, old=old)


def _meant_for_us(domain: str, name: str, head: str, prefix: str) -> bool:
    """Whether a key that ends much like one of ours is not somebody else's. `head` is what stands before that end."""
    own_domain = prefix.rpartition("/")[0]
    if not domain:
        # KAI's own keys of pods, such as gpu-memory.limit, have nothing before.
        exact = name.lower().endswith(SUFFIXES)
        return head.strip(_SEPARATORS) != "" and (exact or not own_domain)
    return any(_near(domain.lower(), other) for other in _domains(prefix))


def _domains(prefix: str) -> list[str]:
    """Those of keys that are ours or taken for ours."""
    known = (prefix, _DEFAULT_PREFIX, _KAI_PREFIX)
    return [domain for domain in (one.rpartition("/")[0] for one in known) if domain]


def _near(domain: str, other: str) -> bool:
    """Whether two domains differ in one place by two characters at most, or the first lies in the second."""
    if domain.endswith(f".{other}"):
        return True
    shorter = min(len(domain), len(other))
    same = next((i for i in range(shorter) if domain[i] != other[i]), shorter)
    same_end = next((i for i in range(shorter - same) if domain[-1 - i] != other[-1 - i]), shorter - same)
    return max(len(domain), len(other)) - same - same_end <= 2


def _without_word(head: str, prefix: str) -> str:
    """What is left of a wrong prefix and a container's name without the word that stands for the prefix."""
    name = head.strip(_SEPARATORS)
    lower = name.lower()
    own = prefix.rpartition("/")[2].strip(_SEPARATORS).lower()
    for word in sorted({own, "container", "containers"} - {""}, key=len, reverse=True):
        if lower == word or (lower.startswith(word) and lower[len(word)] in _SEPARATORS):
            return name[len(word) :]
    return name


def _nearest_suffix(tail: str) -> str:
    """The suffix most like `tail`, empty when none is like it."""
    plain = {re.sub(r"[._-]", "", suffix): suffix for suffix in SUFFIXES}
    near = get_close_matches(re.sub(r"[._-]", "", tail[:_LONGEST_LOOSE].lower()), plain, n=1, cutoff=0.7)
    return plain[near[0]] if near else ""


def _of_whole_pod(key: str, domain: str, name: str, prefix: str) -> Finding | None:
    """A key for all of a pod, such as nvidia.com/gpu.memory, which is a label of nodes: only KAI has such keys, and
    they have no domain."""
    match = _WHOLE_POD.fullmatch(name) if domain and len(name) <= _LONGEST_LOOSE else None
    if match is None or not any(_near(domain.lower(), other) for other in _domains(prefix)):
        return None
    if match["fraction"]:
        problem = (
            f"is not read: as a key of KAI's scheduler it is {KAI_FRACTION}, which makes keys of a container of it"
        )
        return Finding(key=key, problem=problem, nearest=KAI_FRACTION)
    return _finding(key, prefix, "", LIMIT, home=False, old=False)


def _compute_request(key: str, container: str) -> Finding:
    exact = f"{container}{_COMPUTE_REQUEST}"
    told = "is not read by itself" if container and key.endswith(exact) else "is not read: no such key"
    return Finding(
        key=key,
        problem=f"{told}: what caps compute is {PORTION}, a scheduler's to write: KAI from 0.20 on makes it of "
        f"{_COMPUTE_REQUEST} when it places the pod, and older ones refuse both",
    )


def _portion_limit(key: str, domain: str, container: str) -> Finding | None:
    if domain.lower() == _KAI_PREFIX.partition("/")[0]:
        return None  # KAI's binder turns it into a limit
    nearest = f"{_KAI_PREFIX}{container or _UNNAMED}{_KAI_PORTION_LIMIT}"
    return Finding(key=key, problem=f"is not read: as a key of KAI's scheduler it is {nearest}", nearest=nearest)


def _finding(key: str, prefix: str, container: str, suffix: str, *, home: bool, old: bool) -> Finding:
    lower = container.lower()
    named = bool(_LABEL.fullmatch(lower))
    nearest = f"{prefix}{lower if named else _UNNAMED}{suffix}" if suffix else ""
    if old:
        problem = f"its prefix is an old one, with sizes in decimal MB: keys begin with {prefix} now"
    elif not container:
        problem = "it names no container"
    elif not named:
        problem = "a container's name is lower-case letters, digits and inner dashes"
    elif not suffix:
        problem = f"behind the container's name must come {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    elif nearest.lower() == key.lower():
        problem = "upper and lower case count"
    elif not home and (prefix or "/" in key):
        problem = f"keys begin with {prefix or 'the name of the container'}"
    else:
        problem = "no such key"
    if named and len(nearest.rpartition("/")[2]) > _MAX_KEY_NAME:
        problem += f"; the container's name is too long for {suffix}, as a key has {_MAX_KEY_NAME} characters at most"
        nearest = ""
    meant = f"; did you mean {nearest}?" if nearest else ""
    return Finding(key=key, problem=f"is not read: {problem}{meant}", nearest=nearest)


def _shown(key: str) -> str:
    """A key for one line of a log: its end says more than its middle."""
    return json.dumps(key if len(key) <= 128 else f"{key[:60]}...{key[-65:]}")
