"""Pinned memory limits and device lists as MPS knows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 1024 * 1024

_UNITS = {"K": 1024, "M": MIB, "G": 1024 * MIB}


def parse_command_value(text: str) -> int | None:
    """Bytes of `<integer>G` or `<integer>M`, the two suffixes of protocol 2 commands; None for anything else."""
    return None if text.endswith("K") else parse_size(text)


def parse_size(text: str) -> int | None:
    """Bytes of `4G`, `512M` or `1024K`, the sizes of protocol 3; None for anything else."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not (number.isascii() and number.isdigit()):
        return None
    return int(number) * _UNITS[unit]


def parse_environment_value(text: str) -> int | None:
    """As `parse_size`, and what is seen in environments: `512MB`."""
    return parse_size(text.removesuffix("B"))


def parse_environment(text: str) -> list[tuple[str, int | None]]:
    """Entries of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, `<device>=<size>[,...]`; None for a size that is malformed."""
    entries = []
    for entry in text.split(",") if text else ():
        device, separator, size = entry.partition("=")
        entries.append((device, parse_environment_value(size) if separator and device else None))
    return entries


def show_value(limit_bytes: int, text: str, floor_g: bool) -> str:
    """A limit as `get_*_device_pinned_mem_limit` prints it: as set, or rounded down to G from 1 GiB on (595.91.07)."""
    if not floor_g:
        return text
    mib = limit_bytes // MIB
    return f"{mib // 1024}G" if mib >= 1024 else f"{mib}M"


def resolve_device(device: str, visible: Sequence[str]) -> str | None:
    """UUID of a device named by ordinal, UUID or unique prefix of one; None where it is not among the visible ones."""
    if device.isascii() and device.isdigit():
        return visible[int(device)] if int(device) < len(visible) else None
    matches = [uuid for uuid in visible if device.startswith("GPU-") and uuid.startswith(device)]
    return matches[0] if len(matches) == 1 else None


def visible_devices(devices: Sequence[str], spec: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES leaves of these UUIDs, renumbered.

    As in CUDA, the first invalid entry ends the list and a device named twice leaves none.
    """
    if spec is None:
        return list(devices)
    chosen: list[str] = []
    for entry in spec.split(","):
        uuid = resolve_device(entry.strip(), devices)
        if uuid is None:
            break
        if uuid in chosen:
            return []
        chosen.append(uuid)
    return chosen


def server_limits(defaults: Iterable[tuple[str, int]], visible: Sequence[str]) -> dict[str, int]:
    """Limits in force in a server by UUID.

    Ordinals and UUIDs are separate keys: of two for one device the one that was set last wins; a device that is not
    there is ignored (MPS documentation r615).
    """
    limits = {}
    for device, limit_bytes in defaults:
        uuid = resolve_device(device, visible)
        if uuid is not None:
            limits[uuid] = limit_bytes
    return limits


def client_limits(
    server: dict[str, int], own: str | None, visible: Sequence[str], malformed_drops: bool, invisible_drops_server: bool
) -> dict[str, int]:
    """Limits in force in a client by UUID: the server's, lowered by its own environment.

    One entry for a GPU that the process cannot see drops every limit (measured on 615.71.09).
    """
    limits = dict(server)
    lowered = dict(server)
    for device, limit_bytes in parse_environment(own or ""):
        uuid = resolve_device(device, visible)
        if limit_bytes is None:
            if malformed_drops:
                return {}
        elif uuid is None:
            return {} if invisible_drops_server else limits
        else:
            lowered[uuid] = min(limit_bytes, lowered.get(uuid, limit_bytes))
    return lowered
