"""What of a daemon's configuration was read back, and so can be relied on (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsd.common.reason import Reason, code_of, message_of
from mpsd.daemon.controller import Configured
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import MAIN, link_directory, mount_directory
from mpsd.daemon.plan import DaemonSpec, namespace_of
from mpsd.localapi.reasons import NamespaceCode
from mpsd.localapi.snapshot import Attached, DesiredAllocation


@dataclass(frozen=True, slots=True)
class InForce:
    """Nothing, for a daemon that was never configured.

    `limit_bytes`: its default limit. `verified`: namespaces by name, as they were read back; `refused`: why others are
    not. `main_linked`: whether its main socket is there for containers.
    """

    limit_bytes: int | None = None
    verified: Mapping[str, Namespace] = field(default_factory=dict)
    refused: Mapping[str, Reason] = field(default_factory=dict)
    main_linked: bool = False

    def of(self, spec: DaemonSpec) -> DaemonSpec:
        """The spec with what was read back and no more: what was never set is no reason to distrust the daemon."""
        namespaces = tuple(n for n in spec.namespaces if self.verified.get(n.name) == n)
        limit_bytes = self.limit_bytes or 0
        return replace(spec, namespaces=namespaces, pinned_limit_bytes=limit_bytes, main_socket=self.main_linked)

    def spoilt(self, asked: DaemonSpec, objections: Mapping[str, Reason]) -> Mapping[str, Reason]:
        """What of the objections to `asked` counts: of what was set otherwise since then they say nothing."""
        named = {namespace.name: namespace for namespace in asked.namespaces}
        return {name: why for name, why in objections.items() if named.get(name) == self.verified.get(name)}

    def without(self, spoilt: Mapping[str, Reason]) -> "InForce":
        """The same less what is not as it was set any more."""
        verified = {name: namespace for name, namespace in self.verified.items() if name not in spoilt}
        return replace(self, verified=verified, refused={**self.refused, **spoilt})

    def attached(self, spec: DaemonSpec, allocation: DesiredAllocation) -> Attached:
        """How the allocation reaches the daemon, and why it can't start now."""
        if allocation.default_socket:
            directory, limit_bytes = link_directory(spec.dirs, MAIN), allocation.limit_bytes
            objection = self._objection_to_main(spec)
        else:
            namespace = namespace_of(allocation)
            directory, limit_bytes = mount_directory(spec.dirs, namespace.name), namespace.limit_bytes
            objection = self._objection_to(namespace)
        return Attached(allocation.key, directory, limit_bytes, message_of(objection), code_of(objection))

    def _objection_to(self, namespace: Namespace) -> Reason | None:
        if self.verified.get(namespace.name) == namespace:
            return None
        pending = Reason(NamespaceCode.PENDING, f"its MPS namespace {namespace.name} is not set up yet")
        return self.refused.get(namespace.name, pending)

    def _objection_to_main(self, spec: DaemonSpec) -> Reason | None:
        if spec.protocol != 3:
            text = f"it needs MPS protocol 3, and the daemon of {spec.name} speaks {spec.protocol}"
            return Reason(NamespaceCode.NEEDS_PROTOCOL_3, text)
        if self.main_linked:
            return None
        return self.refused.get(
            MAIN, Reason(NamespaceCode.PENDING, "the daemon's main socket is not linked for it yet")
        )


def read_back(spec: DaemonSpec, configured: Configured) -> InForce:
    """After a configuration by this spec."""
    return InForce(
        limit_bytes=spec.pinned_limit_bytes,
        verified={n.name: n for n in spec.namespaces if n.name in configured.attached},
        refused=configured.refused,
        main_linked=MAIN in configured.attached,
    )
