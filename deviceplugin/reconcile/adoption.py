"""Containers that hold shares of ours without a record: taken in under the keys of their answers."""

from collections.abc import Iterable

from deviceplugin.grants.broker import Broker
from deviceplugin.grants.holders.model import Observation, Shares
from deviceplugin.grants.ledger import LedgerError
from deviceplugin.plan import ids
from deviceplugin.plan.allocation import Allocation, Refusal
from deviceplugin.plan.reasons import OfferCode
from mpsd.common.errors import GpufracError
from mpsd.common.log import get_logger

log = get_logger("plugin")


class Adoption:
    """Says each refusal once. State of one owner."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._refused: dict[Shares, str] = {}

    def adopt(self, seen: Observation) -> bool:
        """Takes in what the kubelet shows, plain init containers among them. False where one could not be recorded,
        which may be over later."""
        held = {**(seen.checkpointed or {}), **seen.listed}
        missing = missing_records(held, self._broker.allocations(), self._broker.resource_names())
        refused: dict[Shares, str] = {}
        recorded = True
        for shares in missing:
            holder = held[shares]
            answered = (seen.checkpointed or {}).get(shares, holder)
            facts = {"resource": shares[0], "pod": f"{holder.namespace}/{holder.pod}", "container": holder.container}
            try:
                outcome = self._broker.adopt(*shares, answered.key)
            except GpufracError as error:
                recorded = recorded and not isinstance(error, LedgerError)
                outcome = Refusal(OfferCode.NO_RECORDS, str(error))
            if isinstance(outcome, Refusal):
                refused[shares] = outcome.message
                if self._refused.get(shares) != outcome.message:
                    facts |= {"code": outcome.code, "reason": outcome.message}
                    log.error("cannot adopt a container that holds our shares", **facts)
            else:
                log.warning("adopted a container that held our shares without a record", key=outcome.key, **facts)
        self._refused = refused
        return recorded


def missing_records(
    listed: Iterable[Shares], allocations: Iterable[Allocation], resources: Iterable[str]
) -> list[Shares]:
    """Containers at the kubelet with shares of ours that no record names (pure)."""
    recorded = {(allocation.resource, allocation.device_ids) for allocation in allocations}
    ours = set(resources)
    return [shares for shares in listed if shares[0] in ours and shares not in recorded and _are_ours(shares[1])]


def _are_ours(device_ids: tuple[str, ...]) -> bool:
    return all(ids.SEPARATOR in identifier for identifier in device_ids)
