"""Makes the world match the broker: CDI files, mpsd's desired state, the kubelet's view, released allocations.

Two threads. The *attacher* (attacher.py) reacts at once: it writes and withdraws CDI files (the permission to start,
files.py), pushes the desired state and publishes lists. The *observer* looks at the kubelet every few seconds
(observer.py), releases what is gone (releases.py) and checks that containers are held to what they were granted
(enforced.py, hardlimits.py). Both compare desired with observed; a lost hint costs seconds only.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.holders.model import Shares
from deviceplugin.kubelet.places import KubeletPlaces
from deviceplugin.plan.start import Grant
from deviceplugin.reconcile.attacher import Attacher
from deviceplugin.reconcile.enforced import EnforcementCheck
from deviceplugin.reconcile.files import PermissionFiles, SpecFiles
from deviceplugin.reconcile.firstlook import FirstLook
from deviceplugin.reconcile.hardlimits import LimitKeeper, MarkedCgroup
from deviceplugin.reconcile.lastowners import LastOwners
from deviceplugin.reconcile.observer import Kubelet, KubeletSocket, Observer
from deviceplugin.reconcile.releases import Releases
from deviceplugin.reconcile.report import Report
from deviceplugin.reconcile.sharenews import ShareNews
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger
from mpsd.common.processes import PodProcess
from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason
from mpsd.common.threads import GuardedThread, Mishaps
from mpsd.events.teller import SILENT, Teller
from mpsd.localapi.reasons import ClientsCode
from mpsd.localapi.snapshot import Desired, GpuClients, LimitQuery, LimitReading

log = get_logger("plugin")

OBSERVE_S = 5.0
"""How often the kubelet is looked at while allocations live; SLOW_OBSERVE_S while there are none."""
SLOW_OBSERVE_S = 15.0
SETTLE_S = 1.0
"""After a grant the kubelet is looked at this soon, so that its pod is known by name."""
CLIENTS_S = 10.0
PRESSED_CLIENTS_S = 2.0
"""How long mpsd may take to look up GPU processes; the shorter one while an Allocate waits for it."""


ATTACH_MOST_S, OBSERVE_MOST_S = 60.0, 180.0
"""More than a round of each thread and the pause behind it last, also where mpsd, kubelet and runtime all hang: every
call of theirs has a deadline."""


class Mpsd(Protocol):
    """The calls made to mpsd; they raise GpufracError."""

    def apply(self, desired: Desired) -> None: ...
    def desired(self) -> Desired: ...
    def clients(self, uuids: Sequence[str], timeout_s: float) -> Mapping[str, GpuClients]: ...
    def limits(self, queries: Sequence[LimitQuery]) -> Sequence[LimitReading]: ...
    def set_limits(self, gpu: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> LimitReading: ...


class Keeper:
    """Owns both threads, and the parts that they run.

    Args:
        pod_processes: one look at all processes of pods, by pod UID.
        marked_cgroups: one look at all cgroups of containers with our marker, below a root.
        blind: why processes of containers can't be seen at all, empty when they can.
        housekeeping: called by the observer after every look.
        teller: is told of shares.
    """

    def __init__(
        self,
        broker: Broker,
        specs: SpecFiles,
        mpsd: Mpsd,
        kubelet: Kubelet,
        *,
        places: KubeletPlaces,
        kubelet_socket: KubeletSocket,
        pod_processes: Callable[[], Mapping[str, list[PodProcess]]],
        marked_cgroups: Callable[[str], Iterable[MarkedCgroup]],
        blind: str = "",
        housekeeping: Callable[[], None] = lambda: None,
        teller: Teller = SILENT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._mpsd, self._housekeeping = broker, mpsd, housekeeping
        self._stop, self._look = threading.Event(), threading.Event()
        self._first_look = FirstLook(broker, mpsd)
        self._observer = Observer(broker, kubelet, kubelet_socket, places, self._first_look, monotonic=monotonic)
        self._last_owners = LastOwners(
            broker,
            look_up=lambda uuids: self._look_up(uuids, pressed=True),
            pod_processes=pod_processes,
            pod_exists=self._observer.pod_exists,
        )
        self._files = PermissionFiles(broker, specs, monotonic=monotonic)
        self._share_news = ShareNews(broker, self._files, teller, lambda: self._attacher.held_back, monotonic=monotonic)
        self._attacher = Attacher(
            broker,
            self._files,
            mpsd,
            self._first_look,
            self._last_owners,
            on_round=self._share_news.look,
            monotonic=monotonic,
        )
        self._releases = Releases(broker, self._files, self._last_owners, self._look_up)
        self._resent: set[str | Shares] = set()
        self._limits = LimitKeeper(broker, mpsd, marked_cgroups, monotonic=monotonic)
        self._enforced = EnforcementCheck(
            broker,
            pods_directory=places.pods,
            pod_processes=pod_processes,
            look_up=lambda uuids: self._look_up(uuids, pressed=False),
            blind=blind,
            monotonic=monotonic,
        )
        self._attaching, self._observing = Pulse("attacher", ATTACH_MOST_S), Pulse("observer", OBSERVE_MOST_S)
        self._threads = [
            GuardedThread(self._attach_loop, self._attaching.name),
            GuardedThread(self._observe_loop, self._observing.name),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops both threads. CDI files stay: containers may start while we restart."""
        self._stop.set()
        self._look.set()
        self._broker.wake()
        self._files.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def report(self) -> Report:
        """What the parts found last."""
        return Report(
            kubelet_error=self._observer.kubelet_error,
            checkpoint_error=self._observer.checkpoint_error,
            spec_error=self._files.error,
            spec_objections=self._files.objections,
            stale=self._observer.stale,
            published=self._files.written,
            unenforced=self._enforced.found.unenforced,
            doubts=self._enforced.found.doubts,
            release_blocked=self._releases.blocked,
            held_back=self._attacher.held_back,
            limits=self._limits.report,
            limit_drifts=self._limits.drifts,
        )

    @property
    def pulses(self) -> tuple[Pulse, ...]:
        """Of both threads: whether they go round."""
        return self._attaching, self._observing

    # --- hints -------------------------------------------------------------------------------------------------------

    def mpsd_returned(self) -> None:
        """A (new) mpsd answers: it gets the whole desired state again."""
        self._attacher.push_again()
        if not self._first_look.looked().all:
            self.look()

    def look(self) -> None:
        """Look at the kubelet soon."""
        self._look.set()

    def guard(self) -> None:
        """Somebody else changed a file in the CDI directories: whether it concerns us is looked at now."""
        self._files.guard()
        self._broker.wake()

    def hint_pods(self) -> None:
        """Something may have changed about pods: looks at the kubelet soon if one that holds something is gone."""
        if self._observer.pods_went():
            self.look()

    # --- what front ends ask -----------------------------------------------------------------------------------------

    def wait_attached(self, key: str, timeout_s: float) -> Grant | None:
        """Waits for the CDI file of a live allocation as it is planned now, the permission to start; what it says, None
        after the time."""
        return self._files.wait(key, timeout_s)

    def held_back(self, key: str) -> Reason | None:
        """Whose processes an allocation waits for that may start otherwise."""
        return self._attacher.held_back.get(key)

    def recheck(self, *, release: bool = True) -> None:
        """While an Allocate waits: looks at the kubelet once and, before a refusal, lets go at once of what is gone."""
        seen = self.observe()
        if unseen := self._broker.unseen():
            self._broker.observe_started(self._last_owners.have_run(unseen))
        if seen and release:
            self.collect(pressed=True)

    def containers_of(self, namespace: str, pod: str) -> frozenset[str]:
        """The containers of a pod that the kubelet showed last: all but plain init containers."""
        return frozenset(name for where, of, name in self._observer.containers if (where, of) == (namespace, pod))

    def name_holders(self) -> None:
        """See Observer."""
        self._observer.name_holders()

    def observe(self, newer_than_s: float = 0.0) -> bool:
        """See Observer."""
        return self._observer.observe(newer_than_s)

    # --- attacher ----------------------------------------------------------------------------------------------------

    def _attach_loop(self) -> None:
        mishaps = Mishaps("attacher", "the attacher failed and goes on", log)
        wait_s = 0.0
        while not self._stop.is_set():
            self._attaching.beat()
            granted = self._broker.wait_dirty(wait_s)
            if self._stop.is_set():
                return
            try:
                wait_s = self._attacher.round()
                if granted:
                    self._look.set()
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
                wait_s = 1.0

    def note_ledger(self) -> None:
        """See Attacher."""
        self._attacher.note_ledger()

    def attach(self) -> float | None:
        """See Attacher."""
        return self._attacher.attach()

    # --- observer ----------------------------------------------------------------------------------------------------

    def _observe_loop(self) -> None:
        mishaps = Mishaps("observer", "the observer failed and goes on", log)
        while not self._stop.is_set():
            self._observing.beat()
            try:
                if self.observe():
                    self.collect()
                self.check_markers()
                self.check_limits()
                self._housekeeping()
                mishaps.none()
            except Exception as error:  # noqa: BLE001 - it is logged
                mishaps.note(error)
            idle = not self._broker.allocations()
            if self._look.wait(SLOW_OBSERVE_S if idle else OBSERVE_S):
                self._look.clear()
                self._stop.wait(SETTLE_S)

    def collect(self, *, pressed: bool = False) -> None:
        """Releases what nobody holds, and has the kubelet rewrite its checkpoint once where that is stale."""
        self._releases.collect(pressed=pressed)
        stale = self._observer.to_rewrite()
        if stale - self._resent:
            self._broker.resend()
        self._resent = stale

    def check_markers(self) -> None:
        """Finds containers that are not held to what was granted, as far as their processes show."""
        self._enforced.look(self._files.written, self._observer.containers)

    def check_limits(self) -> None:
        """Finds containers whose hard limit is not in force, and sets it again."""
        self._limits.look()

    def _look_up(self, uuids: Sequence[str], pressed: bool) -> Mapping[str, GpuClients]:
        """Who uses these GPUs now."""
        try:
            return self._mpsd.clients(uuids, PRESSED_CLIENTS_S if pressed else CLIENTS_S)
        except GpufracError as error:
            return dict.fromkeys(uuids, GpuClients(error=str(error), error_code=ClientsCode.MPSD_AWAY))
