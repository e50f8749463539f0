"""A keeper and a broker with every neighbour faked and a clock that is set by hand."""

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cdi.errors import CdiError, SpecFileError
from cdi.model import Spec
from cdi.writer import Applied
from deviceplugin.api import deviceplugin_v1beta1_pb2 as pb
from deviceplugin.grants.broker import Broker
from deviceplugin.grants.drains import Drains
from deviceplugin.grants.ledger import Ledger
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.kubelet.podresources import Containers, PodResourcesError
from deviceplugin.plan.allocation import Allocation
from deviceplugin.plan.ids import device_id
from deviceplugin.reconcile.hardlimits import MarkedCgroup
from deviceplugin.reconcile.keeper import Keeper
from deviceplugin.status.model import PluginStatus
from deviceplugin.status.status import plugin_status
from mpsd.common.errors import NotReachableError, TransientError
from mpsd.common.processes import PodProcess
from mpsd.common.reason import Reason
from mpsd.config.model import NodeConfig
from mpsd.gpu.model import GpuInfo
from mpsd.localapi.snapshot import DaemonStatus, Desired, GpuClient, GpuClients, HardLimits, LimitQuery, LimitReading
from tests.builders import CANNOT, config, fixed, info, reported, resource, snapshot, units, uuid
from tests.heard import Heard

SHARE = device_id(uuid(0), 0)
CONFIG = config(resource("a", fixed(8)), resource("b", fixed(40)), resource("u", units()))


def answer_with(key: str) -> str:
    """A cached answer, as a checkpoint has it."""
    answer = pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=f"gpufrac.dev/allocation=s{key}")])
    return base64.b64encode(answer.SerializeToString()).decode()


class FakeSpecs:
    """A CDI directory in memory that can be full."""

    def __init__(self) -> None:
        self.files: dict[str, Spec] = {}
        self.full = False

    def put(self, identifier: str, spec: Spec) -> bool:
        if self.full:
            raise SpecFileError("write", identifier, "No space left on device")
        self.files[identifier] = spec
        return True

    def remove(self, identifier: str) -> bool:
        return self.files.pop(identifier, None) is not None

    objections: tuple[Reason, ...] = ()

    def is_off(self) -> bool:
        return False

    def apply(self, desired: Mapping[str, Spec]) -> Applied:
        errors: dict[str, CdiError] = {}
        self.files = {key: spec for key, spec in self.files.items() if key in desired}
        for identifier, spec in desired.items():
            try:
                self.put(identifier, spec)
            except CdiError as error:
                errors[identifier] = error
        return Applied(errors=errors)


class FakeMpsd:
    def __init__(self) -> None:
        self.told: list[Desired] = []
        self.on_gpu: dict[str, tuple[GpuClient, ...]] = {}
        self.hung: dict[str, str] = {}
        self.on_clients: Callable[[], object] = lambda: None
        self.limits_of: dict[tuple[str, str], LimitReading] = {}
        """(GPU, cgroup) -> what the driver has there."""
        self.set_calls: list[tuple[str, str, int, int | None]] = []
        self.refuses = ""
        self.down = False

    def apply(self, desired: Desired) -> None:
        if self.down:
            raise NotReachableError("cannot reach mpsd")
        self.told.append(desired)

    def desired(self) -> Desired:
        if self.down:
            raise NotReachableError("cannot reach mpsd")
        return self.told[-1] if self.told else Desired()

    def clients(self, uuids: Sequence[str], timeout_s: float) -> Mapping[str, GpuClients]:
        if self.down:
            raise NotReachableError("cannot reach mpsd")
        self.on_clients()
        return {gpu: GpuClients(clients=self.on_gpu.get(gpu, ()), error=self.hung.get(gpu, "")) for gpu in uuids}

    def limits(self, queries: Sequence[LimitQuery]) -> Sequence[LimitReading]:
        if self.down:
            raise NotReachableError("cannot reach mpsd")
        gone = LimitReading(error="there is no such cgroup")
        return [self.limits_of.get((query.gpu, query.cgroup), gone) for query in queries]

    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading:
        if self.down:
            raise NotReachableError("cannot reach mpsd")
        self.set_calls.append((gpu, cgroup, soft_bytes, hard_bytes))
        if self.refuses:
            raise TransientError(self.refuses)
        used_bytes = self.limits_of[gpu, cgroup].used_bytes
        made = LimitReading(soft_bytes=soft_bytes, hard_bytes=hard_bytes, used_bytes=used_bytes)
        self.limits_of[gpu, cgroup] = made
        return made


class FakeKubelet:
    def __init__(self) -> None:
        self.containers: Containers = {}
        self.down = False
        self.on_list: Callable[[], object] = lambda: None

    def list(self) -> Containers:
        if self.down:
            raise PodResourcesError("cannot list pod resources: connection refused")
        shown = {where: dict(held) for where, held in self.containers.items()}
        self.on_list()
        return shown


class FakeSocket:
    """The registration socket of the kubelet that runs."""

    def __init__(self) -> None:
        self.number, self.born_unix_s = 0, 0.0

    def look(self) -> int | None:
        return self.number


class World:
    """A keeper with fakes around it and a clock that is set by hand."""

    def __init__(self, directory: Path, cfg: NodeConfig = CONFIG, gpus: int = 2, *, blind: str = "") -> None:
        self.now_s = 100.0
        self.blind = blind
        self.infos: list[GpuInfo] = [info(index) for index in range(gpus)]
        self.daemon: DaemonStatus | None = None
        """What mpsd reports of its daemons where a test does not say; None: ready."""
        self.unenforced: dict[str, Reason] = {}
        """What status shows as not enforced, beside what was found."""
        self.hard_limits: HardLimits = CANNOT
        self.cgroups = directory / "cgroup"
        self.marked: list[MarkedCgroup] = []
        self.root = directory / "kubelet"
        (self.root / "device-plugins").mkdir(parents=True)
        (self.root / "pods").mkdir()
        self.kubelet_socket = FakeSocket()
        self.start_kubelet()
        self.write_checkpoint([])
        self.ledger = Ledger(str(directory / "ledger"))
        self.drains_path = str(directory / "drains.json")
        self.broker = self.open_broker(cfg)
        self.specs, self.mpsd, self.kubelet = FakeSpecs(), FakeMpsd(), FakeKubelet()
        self.processes: dict[str, list[PodProcess]] = {}
        self.heard = Heard()
        self.begin()

    def begin(self) -> None:
        self.keeper = Keeper(
            self.broker,
            self.specs,
            self.mpsd,
            self.kubelet,
            places=KubeletPlaces(str(self.root), str(self.root / "device-plugins")),
            kubelet_socket=self.kubelet_socket,
            pod_processes=lambda: self.processes,
            marked_cgroups=lambda root: self.marked,
            blind=self.blind,
            teller=self.heard,
            monotonic=lambda: self.now_s,
        )
        self.tell()
        self.keeper.observe()  # the kubelet that is there when we start
        self.keeper.observe()

    def restart(self) -> None:
        """The plugin starts again, and knows only what is on disk and what a scan of CDI files tells."""
        hard = self.broker.node.hard
        self.broker.close()
        self.broker = self.open_broker(self.broker.node.config)
        self.broker.set_gpu_kind(hard.kind, {}, hard.hooked)
        self.begin()
        self.keeper.attach()

    def open_broker(self, cfg: NodeConfig) -> Broker:
        """A broker of what is on disk, as a plugin that starts has it."""
        return Broker(cfg, self.ledger, Drains(self.drains_path), monotonic=lambda: self.now_s, wall=lambda: self.now_s)

    def start_kubelet(self) -> None:
        """A new kubelet: its registration socket is another file."""
        self.kubelet_socket.number += 1
        self.kubelet_socket.born_unix_s = time.time()

    def tell(self, daemon: DaemonStatus | None = None) -> None:
        """mpsd reports all done that the broker wants."""
        desired = self.broker.desired()
        gpus = reported(self.broker.node.config, self.infos, desired, daemon or self.daemon)
        self.broker.observe_snapshot(snapshot(*gpus, hard_limits=self.hard_limits))

    def grant(self, name: str = "a", *ids: str) -> Allocation:
        outcome = self.broker.allocate(f"gpufrac.dev/{name}", ids or (SHARE,), self.keeper.recheck)
        assert isinstance(outcome, Allocation), outcome
        self.tell()
        self.keeper.attach()
        return outcome

    def start(self, allocation: Allocation, pod_uid: str = "uid-1") -> str:
        """Its container runs, with the limits that the toolkit's hook reads from its CDI file. Its cgroup."""
        edits = self.specs.files[allocation.key].devices[0].container_edits
        env = dict(entry.split("=", 1) for entry in edits.env)
        cgroup = self.cgroups / allocation.key
        cgroup.mkdir(parents=True, exist_ok=True)
        soft, hard = (env.get(f"NVIDIA_GPU_MEMORY_{name}") for name in ("REQUEST", "LIMIT"))
        both = LimitReading(soft_bytes=int(soft) << 20, hard_bytes=int(hard) << 20) if soft and hard else LimitReading()
        self.mpsd.limits_of |= {(gpu, str(cgroup)): both for gpu in allocation.gpus}
        self.marked.append(MarkedCgroup(allocation.key, pod_uid, str(cgroup)))
        return str(cgroup)

    def end(self, cgroup: str) -> None:
        """The container with that cgroup is gone."""
        self.marked = [marked for marked in self.marked if marked.directory != cgroup]
        self.mpsd.limits_of = {place: limit for place, limit in self.mpsd.limits_of.items() if place[1] != cgroup}
        Path(cgroup).rmdir()

    def run(self, allocation: Allocation, pod: str = "pod", container: str = "c") -> None:
        held = self.kubelet.containers.setdefault(("ns", pod, container), {})
        held[allocation.resource] = allocation.device_ids

    def holds(self, *held: tuple[Allocation, str]) -> None:
        """The checkpoint names these allocations with their pods' UIDs, and those pods' directories are there."""
        self.write_checkpoint([self.checkpoint(allocation, uid) for allocation, uid in held])
        for _, uid in held:
            (self.root / "pods" / uid).mkdir(exist_ok=True)

    def write_checkpoint(self, entries: list[dict[str, object]]) -> None:
        path = self.root / "device-plugins" / "kubelet_internal_checkpoint"
        path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 0}))

    def checkpoint(self, allocation: Allocation, uid: str) -> dict[str, object]:
        return {
            "PodUID": uid,
            "ContainerName": "c",
            "ResourceName": allocation.resource,
            "DeviceIDs": {"-1": list(allocation.device_ids)},
            "AllocResp": None,
        }

    def pass_time(self, seconds: float, step_s: float = 5.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + step_s)
            self.keeper.observe()
            self.keeper.collect()
            self.keeper.attach()

    def picture(self) -> PluginStatus:
        """What `gpufrac status` would be told, less the sessions."""
        report = self.keeper.report
        return plugin_status(
            self.broker.inspect(),
            replace(report, unenforced={**report.unenforced, **self.unenforced}),
            {},
            pid=1,
            started_unix_s=0,
            config_error=None,
            config_restart_needed="",
            gpu_devices_reason=None,
            problems=(),
        )
