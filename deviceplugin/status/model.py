"""What the plugin shows on its local socket: values. How they are made is in status.py; commands read these alone."""

import msgspec

from deviceplugin.annotated.status import AnnotatedStatus
from deviceplugin.kubernetes.model import KubernetesState
from deviceplugin.plan.faults import FaultDomain
from mpsd.common.reason import Reason, reason_of

RENAME = "camel"


class AllocationStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """One allocation. `state`: attached (its container may start, or runs), waiting (it may not start now, see reason;
    one that runs goes on), leaving (its pod is gone; it is named still). `enforcement` is what holds for the container
    as found, `granted_enforcement` as planned. Bytes are per GPU; `used_bytes` is the most on any of them, as read back
    or shown by the driver last, None where that is not known. `burst` says whether it borrows memory beyond its
    request, empty where it may not. `pod_uids`: the pods seen to hold it, the newest last. `claimed_by`: processes of
    other pods that call themselves its own. `reduced` says that and why it has less than its annotations ask for.
    `over_limit` says that and how far its processes are beyond its limit, where no hard limit holds them.
    `fault_domain`: who is hit when whose process faults; None from an older plugin."""

    key: str
    resource: str
    device_ids: tuple[str, ...] = msgspec.field(name="deviceIDs")
    group: str
    gpus: tuple[str, ...]
    request_bytes: int
    limit_bytes: int
    mode: str
    enforcement: str
    thread_percent: int | None
    namespace: str
    pod: str
    container: str
    pod_uids: tuple[str, ...] = msgspec.field(name="podUIDs")
    claimed_by: str
    state: str
    reason: str
    created_unix_s: float
    adopted: bool
    reason_code: str = ""
    granted_enforcement: str = ""
    used_bytes: int | None = None
    burst: str = ""
    reduced: str = ""
    reduced_code: str = ""
    over_limit: str = ""
    over_limit_code: str = ""
    fault_domain: FaultDomain | None = None


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """One resource: what is listed, what can still be had (`free`), and why not more. `healthy` is what the kubelet is
    told, shares that are held included; `waiting`: shares that the kubelet still holds for pods that are gone.
    `reasons`: GPU UUID or group -> reason. `enforcement` is the level that holds wherever it is offered, `not_hard` why
    that is not hard."""

    name: str
    mode: str
    enforcement: str
    minimum: str
    registration: str
    registration_error: str
    listed: int
    healthy: int
    held: int
    free: int
    reason: str
    reasons: dict[str, str]
    registration_error_code: str = ""
    reason_code: str = ""
    reason_codes: dict[str, str] = {}
    not_hard: str = ""
    not_hard_code: str = ""
    waiting: int = 0

    @property
    def why(self) -> Reason | None:
        """Why nothing more can be had, by `OfferCode` or `EnforcementCode`."""
        return reason_of(self.reason, self.reason_code)


class GpuAccount(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """What is granted on one GPU. Negative `free_bytes`: over-committed. `group` is the declared group it is in, empty
    for a GPU alone; `drained` says since when an operator drains it and why, `reason` why it takes nothing new.
    `limit_bytes` is the sum of limits, above `usable_bytes` where shares may borrow more than there is. `serves` says
    who may have parts of it: resources, annotated pods, or both; `kept` why resources take nothing there while
    annotated pods may. `shared`: whether it is ours to share at all; `excluded`: the config leaves it out. `domain`:
    the GPUs of the MPS daemon that serves it, itself among them. `hit_together`: how many containers a fault there hits
    at most."""

    uuid: str
    index: int
    group: str
    drained: str
    usable_bytes: int
    granted_bytes: int
    free_bytes: int
    allocations: int
    mode: str | None
    reason: str
    reason_code: str = ""
    limit_bytes: int = 0
    serves: str = "resources"
    kept: str = ""
    kept_code: str = ""
    shared: bool = True
    excluded: bool = False
    domain: tuple[str, ...] = ()
    hit_together: int = 0

    @property
    def why(self) -> Reason | None:
        """Why it takes nothing new, by `OfferCode` or as mpsd says."""
        return reason_of(self.reason, self.reason_code)


class PluginStatus(msgspec.Struct, frozen=True, kw_only=True, rename=RENAME):
    """The plugin process as a whole; every error is empty when there is none. `gone_drained`: drains of GPUs that are
    no longer on the node, by UUID. `hard_limits` says whether limits can be hard on this node, or each piece that is
    missing; `limit_drifts` how often one was found not in force. `state_root` is where the node keeps what must outlive
    it. `runtime` is the container runtime's name and version, empty where it is not known. `annotated` is None where
    the config has no `annotations`. `cdi_objections`: files of others that define CDI devices of ours. `mpsd_instance`
    and `mpsd_generation` are of the snapshot of mpsd's that was heard last; `lists_are_new`: it and all else that
    is known is in the lists."""

    pid: int
    started_unix_s: float
    mpsd_error: str
    kubelet_error: str
    checkpoint_error: str
    cdi_error: str
    config_error: str
    config_restart_needed: str
    gpu_devices: str
    gpu_devices_reason: str
    problems: tuple[str, ...]
    gpus: tuple[GpuAccount, ...]
    gone_drained: dict[str, str]
    resources: tuple[ResourceStatus, ...]
    allocations: tuple[AllocationStatus, ...]
    hard_limits: str = ""
    limit_drifts: int = 0
    state_root: str = ""
    runtime: str = ""
    mpsd_error_code: str = ""
    cdi_error_code: str = ""
    annotated: AnnotatedStatus | None = None
    kubernetes: KubernetesState | None = None
    cdi_objections: tuple[str, ...] = ()
    kubelet_error_code: str = ""
    checkpoint_error_code: str = ""
    config_error_code: str = ""
    gpu_devices_reason_code: str = ""
    hard_limits_code: str = ""
    problem_codes: tuple[str, ...] = ()
    cdi_objection_codes: tuple[str, ...] = ()
    refusals: dict[str, dict[str, int]] = {}
    """Resource -> code -> how many Allocates were refused for it since the plugin started."""
    mpsd_instance: str = ""
    mpsd_generation: int = 0
    lists_are_new: bool = True
    one_domain: tuple[str, ...] = ()
    """GPUs that are one domain from the start (`annotations.domains: node`)."""
    metrics: Reason | None = None
    """Why no metrics are served, None while they are, or are off."""
