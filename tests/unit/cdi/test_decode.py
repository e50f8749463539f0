"""Files of others: taken and refused as the CDI library 1.1.0 does."""

import json
import subprocess
import sys
from typing import Any

import pytest

from cdi.decode import decode_json, decode_yaml
from cdi.errors import MalformedSpecError
from cdi.model import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from tests.waiting import WAIT_S

TOOLKIT_YAML = b"""
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
    hostPath: /dev/nvidiactl
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args: [nvidia-cdi-hook, create-symlinks]
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  mounts:
  - containerPath: /usr/bin/nvidia-smi
    hostPath: /usr/bin/nvidia-smi
    options: [ro, nosuid, nodev, rbind, rprivate]
devices:
- name: 0
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0, fileMode: 0666, major: 195}]
- name: GPU-5a3c7e1f-0000-4c11-9d5e-0123456789ab
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
"""


def _raw(**fields: Any) -> dict[str, Any]:
    return {
        "cdiVersion": "1.1.0",
        "kind": "ven/cls",
        "devices": [{"name": "d", "containerEdits": {"env": ["A=1"]}}],
    } | fields


def _edits(**fields: Any) -> dict[str, Any]:
    return _raw(devices=[{"name": "d", "containerEdits": fields}])


def test_a_spec_as_the_nvidia_toolkit_writes_it() -> None:
    version, spec = decode_yaml(TOOLKIT_YAML)
    assert version == "0.5.0"
    assert spec == Spec(
        "nvidia.com/gpu",
        (
            Device("0", ContainerEdits(device_nodes=(DeviceNode("/dev/nvidia0", major=195, file_mode=0o666),))),
            Device(
                "GPU-5a3c7e1f-0000-4c11-9d5e-0123456789ab",
                ContainerEdits(device_nodes=(DeviceNode("/dev/nvidia0"),)),
            ),
        ),
        ContainerEdits(
            env=("NVIDIA_VISIBLE_DEVICES=void",),
            device_nodes=(DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"),),
            mounts=(
                Mount("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", ("ro", "nosuid", "nodev", "rbind", "rprivate")),
            ),
            hooks=(Hook("createContainer", "/usr/bin/nvidia-cdi-hook", ("nvidia-cdi-hook", "create-symlinks")),),
        ),
    )


def test_all_fields() -> None:
    rdt = {"closID": "c", "l3CacheSchema": "a", "memBwSchema": "b", "schemata": ["x"], "enableMonitoring": True}
    raw = _edits(intelRdt=rdt, netDevices=[{"hostInterfaceName": "e", "name": "n"}], additionalGids=[0, 5])
    _, spec = decode_json(json.dumps(raw).encode())
    assert spec.devices[0].container_edits == ContainerEdits(
        intel_rdt=IntelRdt("c", "a", "b", ("x",), True), net_devices=(NetDevice("e", "n"),), additional_gids=(0, 5)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"CDIVERSION":"v0.3.0","Kind":"ven/cls","devices":[{"NAME":"d","containeredits":{"Env":["A=1"]}}]}', "d"),
        ('{"cdiVersion":"0.5.0","kind":"ven/cls","devices":[{"name":7,"containerEdits":{"env":["A=1"]}}]}', "7"),
        (
            """{"cdiVersion":"0.3.0","kind":"ven/cls","annotations":null,"containerEdits":null,
                "devices":[{"name":true,"containerEdits":{"env":["A=1"],"mounts":null}}]}""",
            "true",
        ),
    ],
)
def test_what_the_library_lets_pass(text: str, expected: str) -> None:
    assert decode_json(text.encode())[1].devices == (Device(expected, ContainerEdits(env=("A=1",))),)
    assert decode_yaml(text.encode())[1].devices == (Device(expected, ContainerEdits(env=("A=1",))),)


def test_library_is_laxer_than_our_writer() -> None:
    raw = _edits(mounts=[{"hostPath": "a", "containerPath": "b"}], hooks=[{"hookName": "prestart", "path": "x"}])
    assert decode_json(json.dumps(raw).encode())[1].devices[0].container_edits.mounts == (Mount("a", "b"),)


BAD = {
    "unknown field": (_raw(extra=1), "extra"),
    "unknown field of a device": (_raw(devices=[{"name": "d", "containerEdits": {"envs": ["A=1"]}}]), "envs"),
    "dropped RDT field": (_edits(intelRdt={"enableCMT": True}), "enableCMT"),
    "no version": ({"kind": "ven/cls", "devices": []}, "cdiVersion: ''"),
    "short version": (_raw(cdiVersion="1.0"), "cdiVersion: '1.0'"),
    "newer version": (_raw(cdiVersion="1.2.0"), "expected a released version, 0.3.0 to 1.1.0"),
    "version that is no text": (_raw(cdiVersion=["1.1.0"]), "cdiVersion"),
    "version below the fields": (
        _raw(cdiVersion="0.3.0", devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}]),
        "0.3.0: its fields need at least 0.5.0",
    ),
    "no kind": ({"cdiVersion": "1.1.0", "devices": []}, "kind"),
    "bad kind": (_raw(kind="gpu"), "expected vendor/class"),
    "no devices": (_raw(devices=[]), "at least one device"),
    "devices of another shape": (_raw(devices={"name": "d"}), "devices"),
    "bad device": (_raw(devices=[{"name": "a/b", "containerEdits": {"env": ["A=1"]}}]), "devices[0].name"),
    "device twice": (_raw(devices=[{"name": "d", "containerEdits": {"env": ["A=1"]}}] * 2), "more than once"),
    "empty edits": (_edits(), "must not be empty"),
    "no edits": (_raw(devices=[{"name": "d"}]), "must not be empty"),
    "bad env": (_edits(env=["A"]), "env[0]"),
    "null env": (_edits(env=[None]), "null"),
    "number beyond 64 bits": (_edits(deviceNodes=[{"path": "/x", "major": 2**63}]), "major"),
    "number as text": (_edits(deviceNodes=[{"path": "/x", "major": "1"}]), "int"),
    "file mode": (_edits(deviceNodes=[{"path": "/x", "fileMode": -1}]), "fileMode"),
    "keys that differ in case only": (_raw(Kind="ven/dd"), "more than once"),
    "no mapping": ([1, 2], "expected a mapping"),
    "text": ("x", "expected a mapping"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_in_both_formats(case: str) -> None:
    raw, text = BAD[case]
    for decode in (decode_json, decode_yaml):
        with pytest.raises(MalformedSpecError) as caught:
            decode(json.dumps(raw).encode())
        assert text in str(caught.value)
        assert str(caught.value).startswith("cannot read CDI spec: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"kind":"a/b","kind":"a/c"}',
        b'{"cdiVersion":"1.1.0","kind":"ven/cls","devices":[{"name":"d","containerEdits":{"env":["A=1"],"env":["B=1"]}}]}',
        b'{"a":NaN}',
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_refused_json(data: bytes) -> None:
    with pytest.raises(MalformedSpecError):
        decode_json(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a: [",
        b"\x00",
        b"a: 1\na: 2\n",
        b"--- a\n--- b\n",
        b"? [a]\n: b\n",
        b"&a {x: *a}\n",
        b"a: !!python/object:os.system x\n",
        b"a: !!timestamp x\n",
        b"a: !!int ''\n",
        b"a: !!bool x\n",
        b"kind: 0x" + b"f" * 8000 + b"\n",
        b"[" * 5_000,
        b"a: &a {x: 1}\nb: {<<: *a}\n",
    ],
)
def test_refused_yaml(data: bytes) -> None:
    with pytest.raises(MalformedSpecError):
        decode_yaml(data)


def test_yaml_aliases_cannot_grow_without_bound() -> None:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(MalformedSpecError, match="more than 200000 values"):
        decode_yaml("\n".join(lines).encode())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("comment", ["", "# ours\n"])
def test_a_json_file_is_read_as_yaml_where_it_is_no_json(encoding: str, comment: str) -> None:
    """As the library reads every file: what it takes for a definition must not escape us."""
    text = comment + json.dumps(_raw())
    assert decode_json(text.encode(encoding)) == decode_json(json.dumps(_raw()).encode())


def test_yaml_dates_and_numbers_become_text() -> None:
    text = b"""
cdiVersion: 0.6.0
kind: ven/cls
annotations: {a: 2024-01-01, b: 5, c: yes}
devices: [{name: 1, containerEdits: {env: [A=1]}}]
"""
    assert decode_yaml(text)[1].annotations == {"a": "2024-01-01", "b": "5", "c": "true"}


def test_yaml_is_imported_only_for_yaml() -> None:
    code = (
        "import sys, cdi.writer, cdi.registry, cdi.inject\n"
        "from cdi.decode import decode_json\n"
        'decode_json(b\'{"cdiVersion":"0.3.0","kind":"ven/cls","devices":[{"name":"d","containerEdits":{"env":["A=1"]}}]}\')\n'
        "print('yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "False\n"
