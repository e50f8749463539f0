"""Whether a process lives and can serve, as both answer over their local API: method `health`.

Live: its loops go round, so a restart would mend nothing. Ready: it can do what it is there for. A process that is live
and not ready waits for something else, or for somebody. Why: docs/adr/0025-health.md.
"""

from collections.abc import Iterable

import msgspec

from mpsd.common.notify import Word
from mpsd.common.pulse import Pulse
from mpsd.common.reason import Reason
from mpsd.localapi.reasons import HealthCode


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process. `not_live`: which of its loops is stuck; `not_ready`: what keeps it from serving. Empty: none."""

    pid: int
    not_live: tuple[Reason, ...] = ()
    not_ready: tuple[Reason, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether it can serve: what does not live can't."""
        return not self.not_live and not self.not_ready

    @property
    def word(self) -> Word:
        """The same for systemd: its one line has the first reason."""
        for state, reasons in (("hangs", self.not_live), ("not ready", self.not_ready)):
            if reasons:
                return Word(not self.not_live, f"{state}: {reasons[0].code}: {reasons[0].message}")
        return Word(live=True, line="ready")


def stuck(pulses: Iterable[Pulse]) -> tuple[Reason, ...]:
    """The loops that began no round for longer than a round may last."""
    late = ((pulse, silent_s) for pulse in pulses if (silent_s := pulse.silent_s) > pulse.most_s)
    return tuple(loop_stuck(pulse.name, silent_s) for pulse, silent_s in late)


def loop_stuck(name: str, silent_s: float) -> Reason:
    """Said of one loop."""
    text = f"its loop `{name}` has not gone round for {silent_s:.0f} s: it is hung; see its log and restart it"
    return Reason(HealthCode.LOOP_STUCK, text)
