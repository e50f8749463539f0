"""How domains, and who is hit together, are told."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from deviceplugin.cli import node as views
from deviceplugin.cli.drain import drain_lines
from deviceplugin.cli.faults import DAEMON_OF_SEVERAL, domain_lines, gpu_faults, hit_text, numbers
from deviceplugin.cli.gpuname import names_of_mpsd, names_of_plugin
from deviceplugin.cli.gpus import gpu_detail, gpu_facts, gpu_table
from deviceplugin.cli.node import Node
from deviceplugin.status import metrics
from mpsd.config.model import AnnotationsConfig, Domains, Enforcement, GpuSelection
from mpsd.gpu.model import GpuHealth, Mode
from mpsd.localapi.snapshot import DaemonState, DaemonStatus, Snapshot
from mpsd.shares.groups import set_name
from tests.builders import config, fixed, info, ready, reported, resource, snapshot, status, told, uuid
from tests.world import World

INDEX = {uuid(n): n for n in range(4)}
CONFIG = config(
    resource("one", fixed(8)),
    resource("two", fixed(8), groups=("pair0",)),
    resource("turns", fixed(8), Mode.TIME_SLICING),
    groups=(("pair0", (0, 1)),),
    shared_groups=("pair0",),
)


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    """Three containers of sm-sharing on GPU 0 and 1, one of them on both; two of time-slicing on GPU 2; nobody on 3."""
    made = World(short_tmp, CONFIG, gpus=4)
    made.daemon = structs.replace(ready(), protocol=3)
    made.tell()
    for pod, (name, share) in {
        "a": ("one", f"{uuid(0)}::0"),
        "b": ("one", f"{uuid(1)}::0"),
        "c": ("two", "pair0::0"),
        "d": ("turns", f"{uuid(2)}::0"),
        "e": ("turns", f"{uuid(2)}::1"),
    }.items():
        made.run(made.grant(name, share), pod=pod)
    made.keeper.observe()
    made.tell()
    yield made
    made.ledger.close()


def told_by_mpsd(world: World) -> Snapshot:
    return snapshot(*reported(CONFIG, world.infos, world.broker.desired(), world.daemon))


def test_status_names_the_gpus_of_a_domain_and_who_is_hit_together(world: World) -> None:
    assert domain_lines(world.picture()) == [
        ("domains", "GPU 0, 1 have one MPS daemon; each other GPU has its own"),
        ("faults", "hit together: 3 containers on GPU 0, 1; hit alone: 2 containers"),
    ]


def test_one_domain_of_all_is_said_plainly(world: World) -> None:
    everything = tuple(map(uuid, range(4)))
    plugin = world.picture()
    gpus = tuple(structs.replace(gpu, domain=everything) for gpu in plugin.gpus)
    joined = structs.replace(plugin, gpus=gpus, one_domain=everything)
    assert domain_lines(joined)[0] == ("domains", "one fault domain: GPU 0, 1, 2, 3 (`annotations.domains: node`)")
    assert domain_lines(structs.replace(plugin, gpus=(), allocations=())) == []


def test_the_config_says_which_gpus_are_one_domain_from_the_start(short_tmp: Path) -> None:
    section = AnnotationsConfig(gpus=GpuSelection(), enforcement=Enforcement.HARD, domains=Domains.NODE)
    made = World(short_tmp, config(annotations=section), gpus=2)
    assert made.picture().one_domain == (), "MPS protocol 2: containers of different GPUs can't share a daemon"
    made.tell(structs.replace(ready(), protocol=3))
    assert domain_lines(made.picture()) == [("domains", "one fault domain: GPU 0, 1 (`annotations.domains: node`)")]
    made.ledger.close()


def test_an_allocation_says_how_many_are_hit_with_it_and_where(world: World) -> None:
    shown = {a.pod: hit_text(a, INDEX) for a in world.picture().allocations}
    assert shown == dict.fromkeys("abc", "3 on GPU 0,1") | dict.fromkeys("de", "alone")
    (older, *_) = world.picture().allocations
    assert hit_text(structs.replace(older, fault_domain=None), INDEX) is None


def test_a_gpu_says_its_domain_and_whom_a_fault_there_hits(world: World) -> None:
    found = gpu_facts(Node(told_by_mpsd(world), None, world.picture(), None))
    columns, rows = gpu_table(found, INDEX)
    at = columns.index("DOMAIN")
    assert [row[at] for row in rows] == ["0,1", "0,1", "2", "3"]
    said = [gpu_faults(gpu) for gpu in world.picture().gpus]
    assert said == [*["hit 3 containers together"] * 2, "hit only the container whose they are", ""]
    detail = "\n".join(gpu_detail(found[0], INDEX))
    assert "GPU 0, 1 have one MPS daemon" in detail
    assert "hit 3 containers together" in detail


@pytest.mark.parametrize("up", ["mpsd", "plugin", "nobody"])
def test_domains_are_known_while_either_process_answers(world: World, up: str) -> None:
    mpsd = told_by_mpsd(world) if up == "mpsd" else None
    plugin = world.picture() if up == "plugin" else None
    found = gpu_facts(Node(mpsd, None, plugin, None))
    assert [numbers(gpu.domain, INDEX) for gpu in found] == ([] if up == "nobody" else ["0, 1", "0, 1", "2", "3"])


def test_a_gpu_that_is_gone_has_its_uuid() -> None:
    assert numbers((uuid(9), uuid(1), uuid(0)), INDEX, ",") == f"0,1,{uuid(9)}"


def test_metrics_count_the_gpus_of_a_domain_and_who_is_hit_together(world: World) -> None:
    lines = metrics.render(world.picture()).splitlines()
    assert f'gpufrac_gpu_domain_gpus{{gpu_uuid="{uuid(1)}"}} 2' in lines
    assert f'gpufrac_gpu_hit_together{{gpu_uuid="{uuid(1)}"}} 3' in lines
    assert f'gpufrac_gpu_hit_together{{gpu_uuid="{uuid(2)}"}} 1' in lines


def formed() -> Snapshot:
    """GPU 0 and 1 have one daemon, though the config does not say so; GPU 2 has its own."""
    name = set_name((uuid(0), uuid(1)))
    dead = DaemonStatus(state=DaemonState.BACKOFF, reason="it died", name=name)
    gpus = [status(info(n), group=name, daemon=dead, health=GpuHealth.OK) for n in (0, 1)]
    return snapshot(*gpus, status(info(2)))


def test_a_domain_that_formed_by_itself_is_called_by_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(formed(), None) == ["GPU 0, 1: its MPS daemon is backoff: it died"]
    assert [gpu.group for gpu in names_of_mpsd(formed())] == ["", "", ""]
    monkeypatch.setattr(views, "look", lambda *_: Node(formed(), None, None, None))
    shown = CliRunner().invoke(views.daemons, []).output
    assert DAEMON_OF_SEVERAL in shown
    assert "gpus_" not in shown.replace(formed().gpus[0].daemon.pipe_directory or "-", "")  # type: ignore[union-attr]


def test_a_drained_gpu_of_a_shared_group_leaves_the_others_their_own(world: World) -> None:
    world.broker.drain(uuid(0), "fan")
    plugin = world.picture()
    reasons = {gpu.index: gpu.reason for gpu in plugin.gpus}
    assert "fan" in reasons[0]
    assert reasons[1] == ""
    chosen = [gpu for gpu in names_of_plugin(plugin) if gpu.index == 0]
    assert drain_lines(plugin, chosen)[1] == (
        f"GPU 1 ({uuid(1)}): takes nothing of group pair0 either, which needs all of its GPUs; whatever needs less it "
        "takes"
    )


def test_a_gpu_of_a_shared_group_takes_something_while_the_group_does(short_tmp: Path) -> None:
    made = World(short_tmp, CONFIG, gpus=2)  # MPS protocol 2: nothing on a GPU of several alone
    assert [gpu.reason for gpu in made.picture().gpus] == ["", ""]
    made.broker.drain(uuid(0), "fan")
    assert all(gpu.reason for gpu in made.picture().gpus)
    made.ledger.close()
