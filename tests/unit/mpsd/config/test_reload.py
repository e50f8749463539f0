"""What a changed file does in a running process."""

from collections.abc import Iterator

import msgspec
import pytest

from mpsd.config.load import parse_config
from mpsd.config.model import CdiConfig, MpsConfig, NodeConfig
from mpsd.config.reload import TABLE, Process, When, merge
from mpsd.config.show import effective

MINIMAL = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: [{name: x/y, memory: {request: 1Gi}, compute: {mode: sm-sharing}}]
"""
OTHER = """
apiVersion: gpufrac.dev/v1
kind: NodeConfig
resources: [{name: x/z, memory: {request: 2Gi}, compute: {mode: time-slicing}, enforcement: none}]
gpus: {exclude: [7], groups: {pair: {gpus: [0, 1], members: shared}}}
memory: {reserve: 2Gi}
enforcement: {minimum: hard, enableDmem: true, leaks: repair}
mps:
  protocol: "3"
  binary: /opt/control
  driverRoot: /driver
  runRoot: /r
  logRoot: /l
  sharedMemory: true
  clientLimit: 7
  onWedge: report
  prohibitWhileDown: true
  writableMount: true
  namespaceMount: daemon
  logMaxSize: 2Mi
cdi: {directory: /cdi, gpuDevices: envvar, delivery: both}
kubelet: {root: /kubelet, devicePlugins: /plugins}
stateRoot: /state
backend: simulated
simulated: {gpus: [{memory: 16Gi}, {memory: 16Gi}], driver: "615.1.1"}
annotations: {gpus: {include: all}}
nri: {name: other}
kubernetes: {access: in-cluster}
metrics: {address: ""}
"""
NESTED = {"mps": MpsConfig, "cdi": CdiConfig}
"""Sections whose fields take effect apart."""


def fields() -> Iterator[str]:
    for name in NodeConfig.__struct_fields__:
        yield from (f"{name}.{inner}" for inner in NESTED[name].__struct_fields__) if name in NESTED else (name,)


def value_of(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_each_field_is_in_the_table_once() -> None:
    assert sorted(row.field for row in TABLE) == sorted(fields())


def test_the_keys_are_those_of_the_file() -> None:
    shown = effective(parse_config(OTHER, "f"))
    for row in TABLE:
        section, _, key = row.key.partition(".")
        assert section in shown if not key else key in shown[section], row.key


@pytest.mark.parametrize("process", Process)
def test_a_process_keeps_what_waits_for_its_restart_and_takes_the_rest(process: Process) -> None:
    old, new = parse_config(MINIMAL, "f"), parse_config(OTHER, "f")
    merged, waiting = merge(process, old, new)
    for row in TABLE:
        before, after = value_of(old, row.field), value_of(new, row.field)
        assert before != after, row.key
        assert value_of(merged, row.field) == (before if row.when(process).waits else after), row.key
    assert {key.partition(".")[0] for key in waiting} == {
        row.key.partition(".")[0] for row in TABLE if row.when(process).waits
    }
    assert merge(process, merged, merged) == (merged, ())


def test_nobody_keeps_what_nobody_reads() -> None:
    assert not When.UNREAD.waits
    assert all(row.mpsd is not When.UNREAD or row.plugin is not When.UNREAD for row in TABLE)


def test_what_waits_is_named_as_the_file_spells_it() -> None:
    config = parse_config(MINIMAL, "f")
    changed = msgspec.structs.replace(config, mps=MpsConfig(run_root="/r", client_limit=7), state_root="/s")
    assert merge(Process.MPSD, config, changed)[1] == ("mps.runRoot", "mps.clientLimit", "stateRoot")
    assert merge(Process.PLUGIN, config, changed)[1] == ("mps.runRoot", "stateRoot")
