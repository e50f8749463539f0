"""Looks at the kubelet: who holds what, which GPUs are other plugins', what runs without a record of ours."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.holders.model import Shares
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.places import KubeletPlaces, pod_exists
from deviceplugin.kubelet.podresources import Containers, PodResourcesError
from deviceplugin.kubelet.reasons import KubeletCode
from deviceplugin.reconcile.adoption import Adoption
from deviceplugin.reconcile.firstlook import FirstLook
from deviceplugin.reconcile.foreign import InitHolders, foreign_holders, reservations
from deviceplugin.reconcile.observation import observation, stale_shares
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason

log = get_logger("plugin")

NAMING_S = 0.5
NOT_ASKED = Reason(KubeletCode.NOT_ASKED_YET, "not asked yet")


class Kubelet(Protocol):
    """PodResources; raises PodResourcesError."""

    def list(self) -> Containers: ...


class KubeletSocket(Protocol):
    """Where the kubelet takes registrations, see SocketFile."""

    @property
    def born_unix_s(self) -> float: ...
    def look(self) -> int | None: ...


class Observer:
    """One look at a time, whoever asks. `containers` are those that the kubelet showed last: all but plain init
    containers. The errors are None where kubelet and checkpoint tell."""

    def __init__(
        self,
        broker: Broker,
        kubelet: Kubelet,
        kubelet_socket: KubeletSocket,
        places: KubeletPlaces,
        first_look: FirstLook,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._kubelet, self._kubelet_socket = broker, kubelet, kubelet_socket
        self._places, self._first_look, self._monotonic = places, first_look, monotonic
        self._adoption = Adoption(broker)
        self._init_holders = InitHolders()
        self._lock = threading.Lock()
        self._observed_s = float("-inf")
        self._named_s = 0.0
        self._kubelet_seen: int | None = None
        self._foreign: dict[str, Reason] = {}
        self._removed: frozenset[str] = frozenset()
        """Of the pods that hold something, those that were gone at the last look."""
        self.containers: Containers = {}
        self.stale: frozenset[Shares] = frozenset()
        """Shares that the kubelet's checkpoint holds for pods that are gone, and nobody else does."""
        self.kubelet_error: Reason | None = NOT_ASKED
        self.checkpoint_error: Reason | None = None

    def observe(self, newer_than_s: float = 0.0) -> bool:
        """Looks at the kubelet once. False when it does not answer: then nothing is concluded.

        Args:
            newer_than_s: a look that is younger will do.
        """
        with self._lock:
            if self._monotonic() - self._observed_s < newer_than_s:
                return True
            self._notice_kubelet()
            judged = self._broker.judgeable()
            try:
                containers = self._kubelet.list()
            except PodResourcesError as error:
                self._note_kubelet(Reason(KubeletCode.PODS_NOT_SHOWN, str(error)))
                return False
            if self._notice_kubelet():
                return False  # whose answer it was can't be told
            self._note_kubelet(None)
            entries = self._read_checkpoint()
            seen = observation(containers, entries, self.pod_exists, self._holding_pods())
            self._removed = seen.removed
            uuids = {gpu.info.uuid for gpu in self._broker.node.gpus}
            reserved = reservations(containers, self._broker.node.config.annotations, uuids)
            ours = self._broker.resource_names()
            by_init = self._init_holders.look(seen, ours, uuids - reserved.keys())
            foreign = {**by_init, **foreign_holders(containers, ours, uuids, reserved)}
            self._note_foreign(foreign)
            self.stale = stale_shares(seen, entries or (), ours)
            self._broker.observe_kubelet(seen, foreign, judged, frozenset(reserved))
            recorded = self._adoption.adopt(seen)
            self._first_look.adopted(checkpoint=entries is not None, recorded=recorded)
            self.containers = containers
            self._observed_s = self._monotonic()
            return True

    def name_holders(self) -> None:
        """Looks if an allocation's pod is not known yet, but not more often than every NAMING_S."""
        now_s = self._monotonic()
        if now_s - self._named_s >= NAMING_S and self._broker.has_unnamed():
            self._named_s = now_s
            self.observe()

    def to_rewrite(self) -> set[str | Shares]:
        """What only the kubelet's checkpoint keeps alive, or what is of pods that are gone."""
        return {*self._broker.checkpoint_only(), *self.stale, *self._init_holders.entries}

    def pod_exists(self, uid: str) -> bool:
        """Whether the kubelet has a directory of the pod."""
        return pod_exists(self._places.pods, uid)

    def pods_went(self) -> bool:
        """Whether a pod that holds something is gone since the last look."""
        return any(not self.pod_exists(uid) for uid in self._holding_pods() - self._removed)

    def _notice_kubelet(self) -> bool:
        """Whether another kubelet runs than at the last look; the broker is told. Looked at with every observation,
        not only when somebody hints: a young kubelet shows half of its pods."""
        now = self._kubelet_socket.look()
        if now is None or now == self._kubelet_seen:
            return False
        if self._kubelet_seen is not None:
            log.info("the kubelet restarted")
        self._kubelet_seen = now
        self._broker.kubelet_restarted(age_s=max(0.0, time.time() - self._kubelet_socket.born_unix_s))
        return True

    def _read_checkpoint(self) -> list[checkpoint.Entry] | None:
        self.checkpoint_error = None
        try:
            return checkpoint.read(self._places.device_plugins)
        except checkpoint.CheckpointError as error:
            self.checkpoint_error = Reason(KubeletCode.CHECKPOINT_NOT_READ, str(error))
            return None

    def _holding_pods(self) -> set[str]:
        return {uid for uids in self._broker.pods().values() for uid in uids}

    def _note_kubelet(self, error: Reason | None) -> None:
        if error is not None and error != self.kubelet_error:
            log.warning("the kubelet does not show its pods", code=error.code, error=error.message)
        self.kubelet_error = error

    def _note_foreign(self, foreign: dict[str, Reason]) -> None:
        for gpu in foreign.keys() - self._foreign.keys():
            log.warning("a GPU is held by another plugin", gpu=gpu, code=foreign[gpu].code, reason=foreign[gpu])
        for gpu in self._foreign.keys() - foreign.keys():
            log.info("a GPU is no longer held by another plugin", gpu=gpu)
        self._foreign = foreign
