"""What probes say about one GPU, over time (pure): `Track` in, observation in, `Track` out.

Trouble is seen at once and forgotten slowly: a GPU that was lost or sick is OK again after `recover_probes` good
probes in a row, a sick one moreover only `quiet_s` after its last critical XID. A hung call is different: it says
nothing about the GPU once it has returned, so UNRESPONSIVE ends with it.
"""

from dataclasses import dataclass, replace

from mpsd.common.reason import Reason, joined
from mpsd.gpu.model import ComputeMode, GpuHealth, GpuInfo, GpuProcess, GpuState
from mpsd.gpu.reasons import GpuCode


@dataclass(frozen=True, slots=True)
class Policy:
    """`recover_probes` good probes end LOST or SICK, `failing_probes` failed ones in a row begin SICK."""

    recover_probes: int = 2
    failing_probes: int = 2
    quiet_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One good probe, begun at `read_s` (monotonic). `processes_told`: the driver lists processes at all. `recovery`:
    what it asks for to make the GPU well, empty for nothing."""

    info: GpuInfo
    compute_mode: ComputeMode
    processes: tuple[GpuProcess, ...]
    read_s: float | None = None
    processes_told: bool = True
    recovery: str = ""


@dataclass(frozen=True, slots=True)
class Track:
    """One GPU. `reading` is the last good one, None until then; `trouble` is LOST, SICK or None.

    `reason` is that of the trouble, and `asked` what the driver asked for meanwhile, which the reason says, too.
    `silent` is why it does not answer at this time, None when it does. Times are monotonic seconds.
    """

    reading: Reading | None = None
    trouble: GpuHealth | None = None
    reason: Reason | None = None
    asked: tuple[str, ...] = ()
    good_probes: int = 0
    failed_probes: int = 0
    last_xid_s: float | None = None
    silent: Reason | None = None

    @property
    def state(self) -> GpuState | None:
        """What to publish; None while nothing is known. LOST outranks UNRESPONSIVE, that outranks SICK."""
        if self.reading is None:
            return None
        health, reason = self.trouble or GpuHealth.OK, self.reason
        if self.silent is not None and health is not GpuHealth.LOST:
            health, reason = GpuHealth.UNRESPONSIVE, self.silent
        return GpuState(
            info=self.reading.info,
            health=health,
            reason=reason,
            compute_mode=self.reading.compute_mode,
            processes=self.reading.processes,
            processes_told=self.reading.processes_told,
            read_s=self.reading.read_s,
        )


def answered(track: Track, reading: Reading, now_s: float, policy: Policy) -> Track:
    """A good probe. It is published at once, also of a GPU that is still in trouble."""
    track = replace(track, reading=reading, good_probes=track.good_probes + 1, failed_probes=0, silent=None)
    if reading.recovery:
        return _asking(track, reading.recovery)
    quiet = track.last_xid_s is None or now_s - track.last_xid_s >= policy.quiet_s
    if track.trouble is None or (track.good_probes >= policy.recover_probes and quiet):
        return Track(reading=reading)
    return track


def _asking(track: Track, recovery: str) -> Track:
    """It answers, and the driver asks for something: nothing new should start on it before that was done."""
    known, asked = (track.reason, track.asked) if track.trouble is not None else (None, ())
    if recovery not in asked:
        known, asked = joined([known, Reason(GpuCode.RECOVERY_ASKED, recovery)]), (*asked, recovery)
    return replace(track, trouble=GpuHealth.SICK, reason=known, asked=asked, good_probes=0)


def failed(track: Track, reason: Reason, policy: Policy) -> Track:
    """A probe that failed for another reason than loss. One alone may be a hiccup and changes nothing visible."""
    track = replace(track, good_probes=0, failed_probes=track.failed_probes + 1, silent=None)
    if track.trouble is None and track.failed_probes >= policy.failing_probes:
        return replace(track, trouble=GpuHealth.SICK, reason=reason, asked=())
    return track


def lost(track: Track, reason: Reason) -> Track:
    """The GPU is gone. The first reason stays: later ones only say again that it is missing."""
    track = replace(track, good_probes=0, failed_probes=0, silent=None)
    return track if track.trouble is GpuHealth.LOST else replace(track, trouble=GpuHealth.LOST, reason=reason, asked=())


def xid_seen(track: Track, reason: Reason, now_s: float) -> Track:
    """A critical XID. On a lost GPU it changes no more than the time of quiet."""
    track = replace(track, good_probes=0, last_xid_s=now_s)
    if track.trouble is GpuHealth.LOST:
        return track
    return replace(track, trouble=GpuHealth.SICK, reason=reason, asked=())


def silenced(track: Track, reason: Reason) -> Track:
    """A call hangs, or the driver as a whole does not answer."""
    return replace(track, good_probes=0, silent=reason)


def hang_text(call: str, hung_s: float, deadline_s: float) -> str:
    """E.g. `driver call processes() has not returned for over 20 s`.

    The time is rounded down to a doubling of the deadline, so that a call hanging for hours makes a dozen news, not
    one per probe.
    """
    shown_s = deadline_s
    while hung_s >= 2 * shown_s:
        shown_s *= 2
    return f"driver call {call}() has not returned for over {shown_s:g} s"
