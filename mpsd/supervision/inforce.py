"""What of a daemon's configuration was read back, and so can be relied on (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsd.common.reason import Reason, code_of, message_of
from mpsd.daemon.controller import Configured
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import MAIN, Link
from mpsd.daemon.plan import DaemonSpec, link_of, mount_of, namespace_of
from mpsd.localapi.reasons import NamespaceCode
from mpsd.localapi.snapshot import Attached, DesiredAllocation


@dataclass(frozen=True, slots=True)
class InForce:
    """Nothing, for a daemon that was never configured.

    `limit_bytes`: its default limit. `verified`: namespaces by name, as they were read back; `linked`: the directories
    where containers find a socket of it; `refused`: why others are not, by name or directory.
    """

    limit_bytes: int | None = None
    verified: Mapping[str, Namespace] = field(default_factory=dict)
    refused: Mapping[str, Reason] = field(default_factory=dict)
    linked: Mapping[str, Link] = field(default_factory=dict)

    def of(self, spec: DaemonSpec) -> DaemonSpec:
        """The spec with what was read back and no more: what was never set is no reason to distrust the daemon."""
        namespaces = tuple(n for n in spec.namespaces if self.verified.get(n.name) == n)
        links = tuple(link for link in spec.links if self.linked.get(link.directory) == link)
        return replace(spec, namespaces=namespaces, links=links, pinned_limit_bytes=self.limit_bytes or 0)

    def spoilt(self, asked: DaemonSpec, objections: Mapping[str, Reason]) -> Mapping[str, Reason]:
        """What of the objections to `asked` counts: of what was set otherwise since then they say nothing."""
        named = {namespace.name: namespace for namespace in asked.namespaces}
        links = {link.directory: link for link in asked.links}
        return {
            name: why
            for name, why in objections.items()
            if named.get(name) == self.verified.get(name) and links.get(name) == self.linked.get(name)
        }

    def without(self, spoilt: Mapping[str, Reason]) -> "InForce":
        """The same less what is not as it was set any more."""
        verified = {name: namespace for name, namespace in self.verified.items() if name not in spoilt}
        linked = {directory: link for directory, link in self.linked.items() if directory not in spoilt}
        return replace(self, verified=verified, linked=linked, refused={**self.refused, **spoilt})

    def attached(self, spec: DaemonSpec, allocation: DesiredAllocation) -> Attached:
        """How the allocation reaches the daemon, and why it can't start now."""
        directory, why = mount_of(allocation, spec.dirs, spec.name), self._objection(spec, allocation)
        return Attached(allocation.key, directory, allocation.limit_bytes, message_of(why), code_of(why))

    def _objection(self, spec: DaemonSpec, allocation: DesiredAllocation) -> Reason | None:
        if spec.protocol != 3:
            text = f"it needs MPS protocol 3, and the daemon of {spec.name} speaks {spec.protocol}"
            return Reason(NamespaceCode.NEEDS_PROTOCOL_3, text)
        link = link_of(allocation, spec.dirs, spec.name)
        if link is None:
            return self._objection_to(namespace_of(allocation, spec.name))
        own = None if link.namespace == MAIN else self._objection_to(namespace_of(allocation, spec.name))
        return own or self._objection_to_link(link)

    def _objection_to(self, namespace: Namespace) -> Reason | None:
        if self.verified.get(namespace.name) == namespace:
            return None
        pending = Reason(NamespaceCode.PENDING, f"its MPS namespace {namespace.name} is not set up yet")
        return self.refused.get(namespace.name, pending)

    def _objection_to_link(self, link: Link) -> Reason | None:
        if self.linked.get(link.directory) == link:
            return None
        what = "the daemon's main socket" if link.namespace == MAIN else f"its MPS namespace {link.namespace}"
        pending = Reason(NamespaceCode.PENDING, f"{what} is not linked for it yet")
        return self.refused.get(link.directory, pending)


def read_back(spec: DaemonSpec, configured: Configured) -> InForce:
    """After a configuration by this spec."""
    return InForce(
        limit_bytes=spec.pinned_limit_bytes,
        verified={n.name: n for n in spec.namespaces if n.name in configured.attached},
        linked={link.directory: link for link in spec.links if link.directory in configured.attached},
        refused=configured.refused,
    )
