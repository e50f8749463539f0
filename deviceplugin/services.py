"""Everything the plugin process does beside serving the kubelet; started once it has registered."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cdi.registry import DEFAULT_DIRECTORIES
from cdi.writer import SpecDirectory
from deviceplugin.grants import lastknown
from deviceplugin.grants.broker import Broker
from deviceplugin.kubelet.places import kubelet_places
from deviceplugin.kubelet.podresources import PodResourcesClient
from deviceplugin.kubelet.sessions import Sessions
from deviceplugin.kubelet.watch import DirectoryWatch
from deviceplugin.kubernetes.endings import Endings
from deviceplugin.kubernetes.frontend import OFF, KubernetesApi
from deviceplugin.kubernetes.model import NodeReadiness
from deviceplugin.plan import render
from deviceplugin.reconcile.gpudevices import DeviceChooser
from deviceplugin.reconcile.hardlimits import marked_cgroups
from deviceplugin.reconcile.keeper import Keeper
from deviceplugin.reconcile.mpsdwatch import MpsdWatch
from deviceplugin.reconcile.runtimelook import RuntimeLook
from deviceplugin.reconcile.specguard import SpecGuard
from deviceplugin.status import needs
from deviceplugin.status.happenings import AllocationNews
from deviceplugin.status.health import not_ready
from deviceplugin.status.methods import methods
from deviceplugin.status.metrics import render as render_metrics
from deviceplugin.status.metricsserver import MetricsServer
from deviceplugin.status.model import PluginStatus
from deviceplugin.status.nodeevents import WedgeNews
from deviceplugin.status.podevents import PodNews
from deviceplugin.status.reasons import ProcessCode
from deviceplugin.status.status import allocation_statuses, plugin_status
from mpsd import simulated
from mpsd.common import threads
from mpsd.common.log import get_logger
from mpsd.common.processes import processes_of_pods
from mpsd.common.reason import Reason, message_of
from mpsd.common.socketfile import SocketFile
from mpsd.config.model import NodeConfig
from mpsd.config.reload import Process, merge
from mpsd.config.watch import ConfigWatcher
from mpsd.events.recorder import Recorder
from mpsd.localapi.call import call
from mpsd.localapi.client import MpsdClient
from mpsd.localapi.health import Health, stuck
from mpsd.localapi.reasons import ConfigCode
from mpsd.localapi.server import LocalServer
from mpsd.localapi.snapshot import Snapshot

if TYPE_CHECKING:
    from deviceplugin.annotated.service import AnnotatedPods
    from deviceplugin.kubernetes.model import PodRef
    from deviceplugin.nri.model import Runtime

log = get_logger("plugin")

TERMINATE_S = 20.0


class Part(Protocol):
    """Something of the process that runs until closed."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Services:
    """Keeper, mpsd watcher, config reload, local API and metrics of one plugin process."""

    def __init__(
        self,
        config_path: str,
        broker: Broker,
        sessions: Sessions,
        devices: DeviceChooser,
        known_path: str,
        known: lastknown.LastKnown,
        recorder: Recorder,
    ) -> None:
        config = broker.node.config
        self._broker, self._sessions, self._devices, self._recorder = broker, sessions, devices, recorder
        self._started_unix_s = time.time()
        places = kubelet_places(config)
        self._kubelet_socket = SocketFile(places.registration_socket)
        self._kubelet_seen: int | None = None
        self._kubelet = PodResourcesClient(places.pod_resources_socket, places.missing)
        specs = SpecDirectory(config.cdi.directory, render.VENDOR, render.CLASS)
        specs.collect_temp_files()
        self._specs = SpecGuard(specs, DEFAULT_DIRECTORIES, render.device_name)
        mpsd = MpsdClient(config.mpsd_socket)
        self._keeper = Keeper(
            broker,
            self._specs,
            mpsd,
            self._kubelet,
            places=places,
            kubelet_socket=self._kubelet_socket,
            pod_processes=partial(processes_of_pods, simulated=config.backend == "simulated"),
            marked_cgroups=partial(marked_cgroups, simulated=simulated.cgroups_of(config)),
            blind="" if config.backend == "simulated" else needs.sees_no_containers(),
            housekeeping=self._housekeeping,
            teller=recorder,
        )
        # What is no business of ours, we say nothing of: another agent may.
        readiness = self._readiness if config.annotations is not None else None
        self._kubernetes = KubernetesApi(config.kubernetes, readiness=readiness, on_deleting=self._on_deleting)
        self._pod_news = PodNews(self._kubernetes.events)
        self._allocation_news = AllocationNews(recorder)
        self._endings = Endings(broker, self._terminate) if config.kubernetes.access != OFF else None
        self._annotated = self._annotated_pods(config)
        annotated = self._annotated
        self._runtime = RuntimeLook(config, broker, lambda: annotated.runtime if annotated is not None else None)
        self._wedges = WedgeNews(self._kubernetes.events)
        self._mpsd_watch = MpsdWatch(
            mpsd,
            broker,
            devices,
            known_path,
            known,
            on_snapshot=self._on_snapshot,
            on_return=self._keeper.mpsd_returned,
        )
        for lack in needs.lacks(config):
            log.warning("the plugin lacks what it needs", code=lack.code, reason=lack.message)
        self._config_error: Reason | None = None
        self._restart_needed = ""
        self._parts: list[Part] = [
            self._mpsd_watch,
            self._keeper,
            LocalServer(config.plugin_socket, methods(broker, self.status, self.health)),
            DirectoryWatch(places.device_plugins, self._kubelet_hint),
            ConfigWatcher(config_path, self._on_config, self._on_config_error, current=config),
            *([self._endings] if self._endings is not None else []),
            *([self._annotated] if self._annotated is not None else []),
            self._kubernetes,  # ends before they do: schedulers hear of our end before it comes
        ]
        probes = {"/healthz": lambda: stuck(self._keeper.pulses), "/readyz": self._not_ready}
        address = config.metrics_address
        self._metrics = MetricsServer(address, self._exposition, probes) if address else None
        if self._metrics is not None:
            self._parts.append(self._metrics)
        self._running: list[Part] = []

    def start(self) -> None:
        """Starts all parts. What fails is raised; `close` ends what has started."""
        self._recorder.start()
        for part in self._parts:
            self._running.append(part)
            part.start()

    def close(self) -> None:
        """Stops all parts, the last one first; allocations and CDI files stay."""
        self._mpsd_watch.close()  # it ends with its call, so it is told first
        for part in reversed(self._running):
            part.close()
        self._kubelet.close()
        self._kubelet_socket.close()
        self._specs.close()

    def recheck(self, *, release: bool = True) -> None:
        """See Keeper.recheck."""
        self._keeper.recheck(release=release)

    def status(self) -> PluginStatus:
        """The plugin as it is now; a young allocation is looked up at the kubelet first, so that its pod has a name."""
        self._keeper.name_holders()
        return self._picture()

    def health(self) -> Health:
        """Whether the keeper's threads go round, and whether a pod could be served now."""
        return Health(pid=os.getpid(), not_live=stuck(self._keeper.pulses), not_ready=not_ready(self._picture()))

    def _not_ready(self) -> tuple[Reason, ...]:
        """Where a loop hangs, it may hold what the look at the rest would wait for."""
        return stuck(self._keeper.pulses) or self.health().not_ready

    def _exposition(self) -> str:
        """The metrics. They name no pods: the kubelet is not asked, so that no scraper waits for it, or it for them."""
        return render_metrics(self._picture(), threads.failures())

    def _picture(self) -> PluginStatus:
        config = self._broker.node.config
        unwritable = filter(None, [self._broker.ledger_error])
        unusable = (Reason(ProcessCode.RECORD_NOT_USABLE, problem) for problem in self._broker.problems)
        runtime = self._runtime.runtime
        return plugin_status(
            self._broker.inspect(),
            self._keeper.report,
            self._sessions.by_resource(),
            pid=os.getpid(),
            started_unix_s=self._started_unix_s,
            config_error=self._config_error,
            config_restart_needed=self._restart_needed,
            gpu_devices_reason=self._devices.choice.reason,
            problems=(*needs.lacks(config), *unusable, *unwritable),
            state_root=config.state_root,
            runtime=f"{runtime.name} {runtime.version}" if runtime is not None else "",
            annotated=self._annotated.status(self._readiness()) if self._annotated is not None else None,
            kubernetes=self._kubernetes.state,
            metrics=self._metrics.problem if self._metrics is not None else None,
            refusals=self._sessions.refusals.counts,
        )

    def _annotated_pods(self, config: NodeConfig) -> "AnnotatedPods | None":
        """What only nodes with annotated pods load."""
        if config.annotations is None:
            return None
        from deviceplugin.annotated.frontend import AnnotatedFrontend
        from deviceplugin.annotated.service import AnnotatedPods
        from deviceplugin.annotated.starting import START_S
        from deviceplugin.kubelet.cri import inventory, stop_container

        frontend = AnnotatedFrontend(
            self._broker,
            config.annotations,
            self._keeper,
            MpsdClient(config.mpsd_socket, timeout_s=START_S / 2),
            self._kubernetes.events,
            stop_container=partial(stop_container, config.annotations.cri_socket),
            list_all=partial(inventory, config.annotations.cri_socket),
            restart_policy=self._kubernetes.pods.restart_policy,
            unguarded=_unguarded(config),
            running_pods=partial(processes_of_pods, simulated=config.backend == "simulated"),
            on_change=self._kubernetes.wake,
            teller=self._recorder,
        )
        return AnnotatedPods(config.annotations, config.nri, frontend)

    def _readiness(self) -> NodeReadiness:
        """Of a node with annotated pods."""
        from deviceplugin.annotated.readiness import readiness

        annotated, broker = self._annotated, self._broker
        assert annotated is not None
        return readiness(
            annotated.config,
            annotated.frontend.report,
            session_error=annotated.session_error,
            mpsd_error=message_of(broker.node.absence),
            hard=broker.node.hard,
            driver_version=broker.node.driver_version,
            ledger_error=message_of(broker.ledger_error),
        )

    def _on_deleting(self, pod: "PodRef", grace_s: float) -> None:
        assert self._endings is not None
        self._endings.deleting(pod.uid, grace_s)

    def _terminate(self, keys: Sequence[str], pod_uids: Sequence[str]) -> None:
        params = {"keys": list(keys), "pod_uids": list(pod_uids), "kill": False, "force": False}
        call(self._broker.node.config.mpsd_socket, "terminate", params, object, TERMINATE_S)

    def _housekeeping(self) -> None:
        self._devices.choose_if_due()
        self._runtime.look()
        self._sessions.sync()
        allocations = allocation_statuses(self._broker.inspect(), self._keeper.report)
        self._pod_news.observe(allocations)
        self._allocation_news.observe(allocations)

    def _kubelet_hint(self) -> None:
        now = self._kubelet_socket.look()
        if now is not None and now != self._kubelet_seen:
            self._kubelet_seen = now
            self._keeper.look()
        self._sessions.hint()
        self._keeper.hint_pods()
        if self._devices.specs_changed():
            self._keeper.guard()  # a copy of one of our files lets its container start
            self._keeper.look()  # and choose

    def _on_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._wedges.observe(snapshot)
        self._kubernetes.wake()

    def _on_config(self, config: NodeConfig) -> None:
        effective, ignored = merge(Process.PLUGIN, self._broker.node.config, config)
        self._config_error, self._restart_needed = None, ", ".join(ignored)
        self._broker.apply_config(effective)
        self._broker.publish()
        self._devices.choose()
        self._sessions.sync()
        log.info("config reloaded", resources=len(config.resources), restart_needed=self._restart_needed)

    def _on_config_error(self, error: str) -> None:
        self._config_error = Reason(ConfigCode.REFUSED, error)
        log.error("the new config is not usable; the old one stays in force", error=error)


def _unguarded(config: NodeConfig) -> "Callable[[Runtime], str]":
    """Looks whether the container runtime waits for us; a simulated one has no files."""
    from deviceplugin.annotated.required import runtime_configs, unguarded

    simulated = config.backend == "simulated"
    return lambda runtime: "" if simulated else unguarded(runtime, config.nri.name, runtime_configs(runtime))
