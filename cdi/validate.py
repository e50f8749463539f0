"""The rules of a CDI spec (pure): each fault is one line that names the field, the value and the rule.

Two levels. `library_faults`: what makes a runtime's library (CDI 1.1.0) ignore a whole file. `writer_faults` adds what
that library lets through although the container then fails or silently gets something else than was meant.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from cdi import names
from cdi.errors import InvalidNameError, shorten
from cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec

HOOK_NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
DEVICE_TYPES = ("b", "c", "u", "p")
MAX_ANNOTATIONS_BYTES = 256 * 1024
_MAX_VENDOR = 253
_MAX_CLASS = 63
_MAX_CLOS_ID_BYTES = 4096
_MAX_UINT32 = 2**32 - 1
_MAX_INT64 = 2**63 - 1
_BIND_TYPES = ("", "bind", "none")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


def library_faults(spec: Spec) -> tuple[str, ...]:
    """Why a runtime would ignore this spec, empty when it would take it."""
    return tuple(_library_faults(spec))


def writer_faults(spec: Spec) -> tuple[str, ...]:
    """Why we do not write this spec, empty when it is fit to be written."""
    return (*_library_faults(spec), *_writer_faults(spec))


def _library_faults(spec: Spec) -> Iterator[str]:
    yield from _name_fault("kind", names.parse_kind, spec.kind)
    yield from _annotation_faults("annotations", spec.annotations)
    yield from _library_edit_faults("containerEdits", spec.container_edits)
    if not spec.devices:
        yield "devices: at least one device is needed"
    for index, device in enumerate(spec.devices):
        where = f"devices[{index}]"
        yield from _name_fault(f"{where}.name", names.check_device, device.name)
        yield from _annotation_faults(f"{where}.annotations", device.annotations)
        if device.container_edits == ContainerEdits():
            yield f"{where}.containerEdits: must not be empty"
        yield from _library_edit_faults(f"{where}.containerEdits", device.container_edits)
    yield from _duplicates("devices", "device name", (d.name for d in spec.devices))


def _name_fault(where: str, check: Callable[[str], object], value: str) -> Iterator[str]:
    try:
        check(value)
    except InvalidNameError as exc:
        yield f"{where}: {shorten(value)}: {exc.rule}"


def _annotation_faults(where: str, annotations: Mapping[str, str]) -> Iterator[str]:
    for key in annotations:
        prefix, separator, name = key.rpartition("/")
        good = _LABEL.fullmatch(name) and (
            not separator or (len(prefix) <= 253 and _SUBDOMAIN.fullmatch(prefix.lower()))
        )
        if not good:
            yield f"{where}: key {shorten(key)}: expected [prefix/]name as for Kubernetes annotations"
    if sum(len(_utf8(k)) + len(_utf8(v)) for k, v in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        yield f"{where}: more than {MAX_ANNOTATIONS_BYTES} bytes"


def _library_edit_faults(where: str, edits: ContainerEdits) -> Iterator[str]:
    yield from _env_faults(f"{where}.env", edits.env)
    for index, node in enumerate(edits.device_nodes):
        yield from _library_node_faults(f"{where}.deviceNodes[{index}]", node)
    for index, mount in enumerate(edits.mounts):
        if not mount.host_path:
            yield f"{where}.mounts[{index}].hostPath: must not be empty"
        if not mount.container_path:
            yield f"{where}.mounts[{index}].containerPath: must not be empty"
    for index, hook in enumerate(edits.hooks):
        yield from _library_hook_faults(f"{where}.hooks[{index}]", hook)
    for index, gid in enumerate(edits.additional_gids):
        yield from _range_fault(f"{where}.additionalGids[{index}]", gid, _MAX_UINT32)
    if edits.intel_rdt is not None:
        yield from _rdt_faults(f"{where}.intelRdt", edits.intel_rdt)
    yield from _net_device_faults(f"{where}.netDevices", edits.net_devices)


def _env_faults(where: str, env: Iterable[str]) -> Iterator[str]:
    for index, entry in enumerate(env):
        if entry.find("=") <= 0:
            yield f"{where}[{index}]: {shorten(entry)}: expected NAME=value"


def _library_node_faults(where: str, node: DeviceNode) -> Iterator[str]:
    if not node.path:
        yield f"{where}.path: must not be empty"
    if node.type not in ("", *DEVICE_TYPES):
        yield f"{where}.type: {shorten(node.type)}: expected one of {', '.join(DEVICE_TYPES)}"
    if node.permissions != "none" and node.permissions.strip("rwm"):
        yield f"{where}.permissions: {shorten(node.permissions)}: expected some of r, w, m, or none"
    yield from _range_fault(f"{where}.major", node.major, _MAX_INT64)
    yield from _range_fault(f"{where}.minor", node.minor, _MAX_INT64)
    for field, value in (("fileMode", node.file_mode), ("uid", node.uid), ("gid", node.gid)):
        if value is not None:
            yield from _range_fault(f"{where}.{field}", value, _MAX_UINT32)


def _library_hook_faults(where: str, hook: Hook) -> Iterator[str]:
    if hook.hook_name not in HOOK_NAMES:
        yield f"{where}.hookName: {shorten(hook.hook_name)}: expected one of {', '.join(HOOK_NAMES)}"
    if not hook.path:
        yield f"{where}.path: must not be empty"
    yield from _env_faults(f"{where}.env", hook.env)


def _rdt_faults(where: str, rdt: IntelRdt) -> Iterator[str]:
    clos = rdt.clos_id
    if clos == "/":
        return
    if clos in (".", "..") or "/" in clos or "\n" in clos or len(_utf8(clos)) >= _MAX_CLOS_ID_BYTES:
        yield f"{where}.closID: {shorten(clos)}: expected a file name, or /"


def _net_device_faults(where: str, devices: tuple[NetDevice, ...]) -> Iterator[str]:
    if any(not d.host_interface_name or not d.name for d in devices):
        yield f"{where}: hostInterfaceName and name must not be empty"
    yield from _duplicates(where, "hostInterfaceName", (d.host_interface_name for d in devices))
    yield from _duplicates(where, "name", (d.name for d in devices))


def _range_fault(where: str, value: int, maximum: int) -> Iterator[str]:
    if not 0 <= value <= maximum:
        shown = value if value.bit_length() <= 128 else "a huge number"
        yield f"{where}: {shown}: expected 0 to {maximum}"


def _duplicates(where: str, what: str, values: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    told: set[str] = set()
    for value in values:
        if value in seen and value not in told:
            told.add(value)
            yield f"{where}: {what} {shorten(value)} appears more than once"
        seen.add(value)


def _writer_faults(spec: Spec) -> Iterator[str]:
    vendor, _, class_name = spec.kind.partition("/")
    if len(vendor) > _MAX_VENDOR or len(class_name) > _MAX_CLASS:
        yield f"kind: the vendor may have {_MAX_VENDOR} characters and the class {_MAX_CLASS}"
    yield from _text_faults(spec)
    yield from _writer_edit_faults("containerEdits", spec.container_edits)
    for index, device in enumerate(spec.devices):
        yield from _writer_edit_faults(f"devices[{index}].containerEdits", device.container_edits)


def _text_faults(spec: Spec) -> Iterator[str]:
    for where, text in _texts(spec):
        if "\0" in text or not _is_utf8(text):
            yield f"{where}: {text[:80]!a}: NUL and text that is not Unicode can't be passed to a container"


def _texts(spec: Spec) -> Iterator[tuple[str, str]]:
    yield from (("annotations", text) for pair in spec.annotations.items() for text in pair)
    yield from _edit_texts("containerEdits", spec.container_edits)
    for index, device in enumerate(spec.devices):
        yield from ((f"devices[{index}].annotations", text) for pair in device.annotations.items() for text in pair)
        yield from _edit_texts(f"devices[{index}].containerEdits", device.container_edits)


def _edit_texts(where: str, edits: ContainerEdits) -> Iterator[tuple[str, str]]:
    yield from ((f"{where}.env", text) for text in edits.env)
    yield from ((f"{where}.deviceNodes", text) for n in edits.device_nodes for text in (n.path, n.host_path))
    yield from (
        (f"{where}.mounts", text) for m in edits.mounts for text in (m.host_path, m.container_path, m.type, *m.options)
    )
    yield from ((f"{where}.hooks", text) for h in edits.hooks for text in (h.path, *h.args, *h.env))
    yield from ((f"{where}.netDevices", text) for d in edits.net_devices for text in (d.host_interface_name, d.name))
    if edits.intel_rdt is not None:
        rdt = edits.intel_rdt
        texts = (rdt.clos_id, rdt.l3_cache_schema, rdt.mem_bw_schema, *rdt.schemata)
        yield from ((f"{where}.intelRdt", text) for text in texts)


def _writer_edit_faults(where: str, edits: ContainerEdits) -> Iterator[str]:
    # The last of two entries would win in silence.
    yield from _duplicates(f"{where}.env", "variable", (entry.partition("=")[0] for entry in edits.env))
    yield from _duplicates(f"{where}.mounts", "containerPath", (m.container_path for m in edits.mounts))
    yield from _duplicates(f"{where}.deviceNodes", "path", (n.path for n in edits.device_nodes))
    for index, mount in enumerate(edits.mounts):
        yield from _writer_mount_faults(f"{where}.mounts[{index}]", mount)
    for index, node in enumerate(edits.device_nodes):
        yield from _writer_node_faults(f"{where}.deviceNodes[{index}]", node)
    for index, hook in enumerate(edits.hooks):
        yield from _path_fault(f"{where}.hooks[{index}].path", hook.path)
        if hook.timeout is not None and not 0 < hook.timeout <= _MAX_INT64:
            yield f"{where}.hooks[{index}].timeout: {hook.timeout}: expected seconds, more than 0"
    if 0 in edits.additional_gids:
        yield f"{where}.additionalGids: runtimes ignore group 0"


def _writer_mount_faults(where: str, mount: Mount) -> Iterator[str]:
    yield from _path_fault(f"{where}.containerPath", mount.container_path)
    if mount.container_path == "/":
        yield f"{where}.containerPath: would hide the whole container"
    if mount.type not in _BIND_TYPES:
        return
    yield from _path_fault(f"{where}.hostPath", mount.host_path)
    if not {"bind", "rbind"}.intersection(mount.options):
        yield f"{where}.options: bind or rbind is needed, runtimes add neither"
    if len({"ro", "rw"}.intersection(mount.options)) != 1:
        yield f"{where}.options: one of ro and rw is needed"


def _writer_node_faults(where: str, node: DeviceNode) -> Iterator[str]:
    yield from _path_fault(f"{where}.path", node.path)
    if node.host_path:
        yield from _path_fault(f"{where}.hostPath", node.host_path)
    if (node.major or node.minor) and node.type not in ("b", "c", "u"):
        yield f"{where}.type: b, c or u is needed with device numbers"
    if node.file_mode is not None and node.file_mode > 0o7777:
        yield f"{where}.fileMode: {node.file_mode}: expected 0 to {0o7777} (decimal of an octal mode)"
    if len(set(node.permissions)) != len(node.permissions) and node.permissions != "none":
        yield f"{where}.permissions: {shorten(node.permissions)}: a letter appears more than once"


def _path_fault(where: str, path: str) -> Iterator[str]:
    """Runtimes compare container paths as text, so anything but the plain form would slip past a replacement."""
    parts = path.split("/")
    if not path.startswith("/") or (path != "/" and not all(parts[1:])) or {".", ".."}.intersection(parts):
        yield f"{where}: {shorten(path)}: expected an absolute path without '//', '.', '..' or a slash at the end"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
