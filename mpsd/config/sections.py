"""The sections of the config file that stand for themselves: a reader for each key."""

import re
import socket
from collections.abc import Mapping
from typing import Final

import msgspec
import yaml

from mpsd.config.model import (
    SOCKET_NAME_MAX_BYTES,
    CdiConfig,
    Delivery,
    Enforcement,
    GpuDevices,
    KubernetesConfig,
    LeakPolicy,
    MpsConfig,
    NamespaceMount,
    NodeConfig,
    NriConfig,
    SimulatedConfig,
    SimulatedGpu,
    WedgePolicy,
)
from mpsd.config.names import MAX_DOMAIN, is_domain, label
from mpsd.config.selection import UUID_LENGTH
from mpsd.config.value import NATURAL, Readers, Value, did_you_mean, section
from mpsd.gpu.model import MIB

MAX_CLIENT_LIMIT: Final = 60
MAX_SIMULATED_GPUS: Final = 64

_TOOLKIT_NRI_INDEX = "10"
_TWO_DIGITS = re.compile(r"[0-9]{2}")
_DRIVER_VERSION = re.compile(r"[1-9][0-9]{2,3}(?:\.[0-9]{1,4}){1,2}")
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def plain_sections(entries: Mapping[str, Value], default: NodeConfig) -> NodeConfig:
    """`default` with the sections that depend on no other."""
    config = msgspec.structs.replace(
        default,
        mps=_mps(entries.get("mps")),
        cdi=_cdi(entries.get("cdi")),
        simulated=_simulated(entries.get("simulated")),
        nri=section(
            entries.get("nri"),
            NriConfig(),
            {
                "socket": ("socket", lambda v: v.path_text(socket_below="")),
                "name": ("name", lambda v: label(v, "the name of an NRI plugin")),
                "index": ("index", _nri_index),
            },
            "{socket: /var/run/nri/nri.sock}",
        ),
        kubernetes=section(
            entries.get("kubernetes"),
            KubernetesConfig(),
            {"access": ("access", _kubernetes_access), "nodeName": ("node_name", _node_name)},
            "{access: in-cluster}",
        ),
    )
    plugin_socket = f"/{'x' * SOCKET_NAME_MAX_BYTES}"
    sections: dict[str, tuple[Readers, str]] = {
        "memory": ({"reserve": ("memory_reserve_bytes", lambda v: v.size(MIB, or_zero=True))}, "{reserve: 1Gi}"),
        "enforcement": (
            {
                "minimum": ("enforcement_minimum", lambda v: v.choice(Enforcement)),
                "enableDmem": ("enable_dmem", Value.boolean),
                "leaks": ("leaks", lambda v: v.choice(LeakPolicy)),
            },
            "{minimum: hard}",
        ),
        "kubelet": (
            {
                "root": ("kubelet_root", lambda v: v.path_text(socket_below="/pod-resources/kubelet.sock")),
                "devicePlugins": ("kubelet_device_plugins", lambda v: v.path_text(socket_below=plugin_socket)),
            },
            "{root: /var/lib/kubelet}",
        ),
        "metrics": (
            {"address": ("metrics_address", _metrics_address)},
            '{address: "127.0.0.1:9478"}, or {address: ""} for none',
        ),
    }
    for key, (readers, like) in sections.items():
        config = section(entries.get(key), config, readers, like)
    changes = {
        "state_root": entries["stateRoot"].path_text() if "stateRoot" in entries else None,
        "backend": entries["backend"].one_of(("nvml", "simulated")) if "backend" in entries else None,
    }
    return msgspec.structs.replace(config, **{name: value for name, value in changes.items() if value is not None})


def _mps(value: Value | None) -> MpsConfig:
    # A control daemon that can't bind its socket exits without a word, so the longest must fit.
    control = f"/mps/{'x' * UUID_LENGTH}/pipe/control"
    mps = section(
        value,
        MpsConfig(),
        {
            "protocol": ("protocol", lambda v: v.one_of(("auto", "2", "3"))),
            "binary": ("binary", _binary),
            "driverRoot": ("driver_root", lambda v: v.path_text(root_allowed=True)),
            "runRoot": ("run_root", lambda v: v.path_text(socket_below=control)),
            "logRoot": ("log_root", Value.path_text),
            "sharedMemory": ("shared_memory", Value.boolean),
            "clientLimit": ("client_limit", lambda v: v.integer(1, MAX_CLIENT_LIMIT)),
            "onWedge": ("on_wedge", lambda v: v.choice(WedgePolicy)),
            "prohibitWhileDown": ("prohibit_while_down", Value.boolean),
            "writableMount": ("writable_mount", Value.boolean),
            "namespaceMount": ("namespace_mount", lambda v: v.choice(NamespaceMount)),
            "logMaxSize": ("log_max_bytes", lambda v: v.size(MIB, round_up=False)),
        },
        "{protocol: auto}",
    )
    pipes = f"{mps.run_root}/mps/"
    if value is not None and (f"{mps.log_root}/mps/".startswith(pipes) or pipes.startswith(f"{mps.log_root}/mps/")):
        value.note(
            "logRoot must not hold the pipe directories of runRoot, nor lie in them: tenants see these", show=False
        )
    return mps


def _binary(value: Value) -> str | None:
    if isinstance(value.node, yaml.ScalarNode) and value.node.value.startswith("/"):
        return value.path_text()
    return value.matching(_PROGRAM, "must be the name of a program or an absolute path")


def _cdi(value: Value | None) -> CdiConfig:
    return section(
        value,
        CdiConfig(),
        {
            "directory": ("directory", Value.path_text),
            "gpuDevices": ("gpu_devices", lambda v: v.choice(GpuDevices)),
            "delivery": ("delivery", lambda v: v.choice(Delivery)),
        },
        "{directory: /var/run/cdi}",
    )


def _simulated(value: Value | None) -> SimulatedConfig:
    rule = 'must be a driver version such as "580.95.05"'
    return section(
        value,
        SimulatedConfig(),
        {
            "gpus": ("gpus", _simulated_gpus),
            "driver": ("driver", lambda v: v.matching(_DRIVER_VERSION, rule)),
        },
        "{gpus: [{memory: 80Gi}]}",
    )


def _simulated_gpus(value: Value) -> tuple[SimulatedGpu, ...] | None:
    items = value.items("GPUs", at_most=MAX_SIMULATED_GPUS, like="[{memory: 80Gi}]")
    if items is None:
        return None
    if not items:
        value.note("must hold at least one GPU, such as {memory: 80Gi}")
    readers: Readers = {"memory": ("memory_bytes", lambda v: v.size(MIB, round_up=False))}
    return tuple(section(item, SimulatedGpu(), readers, "{memory: 80Gi}") for item in items)


def _metrics_address(value: Value) -> str | None:
    rule = 'must be host:port such as 127.0.0.1:9478 or [::1]:9478, or "" for no metrics'
    text = value.text(rule)
    if text is None or text == "":
        return text
    host, _, port = text.rpartition(":")
    if _is_host(host) and NATURAL.fullmatch(port) and 0 <= int(port) <= 65535:
        return text
    meant = f"127.0.0.1:{port}" if not host else f"[{host}]:{port}"
    right = NATURAL.fullmatch(port) and _is_host(meant.rpartition(":")[0])
    value.note(f"{rule}{did_you_mean(meant if right else '')}")
    return None


def _is_host(host: str) -> bool:
    family = socket.AF_INET6 if host[:1] == "[" else socket.AF_INET
    if family is socket.AF_INET and host.strip("0123456789."):
        return bool(_HOST.fullmatch(host))
    try:
        socket.inet_pton(family, host[1:-1] if host[-1:] == "]" else host)
    except (OSError, ValueError):
        return False
    return True


def _nri_index(value: Value) -> str | None:
    rule = "must be two digits such as 50"
    text = value.matching(_TWO_DIGITS, rule)
    if text == _TOOLKIT_NRI_INDEX:
        value.note(f"{rule}, and not 10: the container toolkit's own plugin has that, and equals come in no order")
        return None
    return text


def _kubernetes_access(value: Value) -> str | None:
    if isinstance(value.node, yaml.ScalarNode) and value.node.value.startswith("/"):
        return value.path_text()
    rule = "must be off, in-cluster or the absolute path of a kubeconfig"
    text = value.text(rule)
    if text is None or text in ("off", "in-cluster"):
        return text
    value.note(rule)
    return None


def _node_name(value: Value) -> str | None:
    rule = f'must be the name of a node: at most {MAX_DOMAIN} lower-case letters, digits, dashes and dots, or ""'
    text = value.text(rule)
    if text is None or text == "" or is_domain(text):
        return text
    value.note(rule)
    return None
