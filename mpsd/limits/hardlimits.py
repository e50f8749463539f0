"""Keeps what the node proves about hard memory limits, and watches for guarantees that outlived their containers."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mpsd.common.errors import GpufracError
from mpsd.common.lanes import Lane, Post
from mpsd.common.log import get_logger
from mpsd.common.quantity import format_bytes
from mpsd.common.reason import Reason
from mpsd.config.model import LeakPolicy
from mpsd.gpu.backend import GpuBackend
from mpsd.gpu.model import GpuHealth, GpuInfo, GpuState
from mpsd.limits import cgroups, leaks
from mpsd.limits.leaks import Leak
from mpsd.limits.probe import Probed, probe
from mpsd.localapi.reasons import WarningCode
from mpsd.localapi.snapshot import HardLimits

log = get_logger("mpsd")

AGAIN_S = 60.0
"""Between probes while something is missing, and between looks for leaks while soft limits are in use."""


class _Asked(NamedTuple):
    """What a probe depends on."""

    driver_version: str
    gpus: tuple[str, ...]
    enable_dmem: bool


class HardLimitsKeeper:
    """Of the node. Every method is for the supervisor's thread; kernel and driver are asked in the lane, one job at a
    time: while the driver hangs none piles up, and what was found before stands."""

    def __init__(self, backend: GpuBackend, post: Post, again_s: float = AGAIN_S) -> None:
        self._backend, self._post, self._again_s = backend, post, again_s
        self.lane = Lane("hard-limits")
        self.found = HardLimits()
        self.warnings: tuple[Reason, ...] = ()
        self._asked: _Asked | None = None
        self._infos: tuple[GpuInfo, ...] = ()
        self._policy = LeakPolicy.REPORT
        self._probe_s: float | None = None
        self._look_s: float | None = None
        """When to probe and to look for leaks next (monotonic); None: not until something happens."""
        self._busy = False
        self._leaks: tuple[Leak, ...] = ()
        """Of the last look, each named once it was seen twice."""

    @property
    def deadline_s(self) -> float | None:
        """When `pass_deadline` has something to do; None while a job is under way, which then wakes the loop itself."""
        return None if self._busy else min((d for d in (self._probe_s, self._look_s) if d is not None), default=None)

    def observe(
        self, driver_version: str | None, gpus: Sequence[GpuState], *, enable_dmem: bool, policy: LeakPolicy
    ) -> None:
        """What is seen and wanted now: probes when that makes a difference."""
        self._policy = policy
        self._infos = tuple(state.info for state in gpus)
        well = (GpuHealth.OK, GpuHealth.SICK)  # the others may hang
        uuids = tuple(s.info.uuid for s in gpus if s.health in well and not s.info.mig_enabled)
        if driver_version is None or (self._asked and not uuids and self._asked.driver_version == driver_version):
            return  # nobody to ask: what was found stands
        asked = _Asked(driver_version, uuids, enable_dmem)
        if asked == self._asked:
            return
        if self._asked and self._asked.driver_version != driver_version:
            self.found = HardLimits()
        self._asked, self._probe_s = asked, time.monotonic()
        self.pass_deadline(self._probe_s)

    def soft_limit_seen(self) -> None:
        """A container has a guarantee, so one may leak."""
        if self._look_s is None and self.found.backend == "dmem":
            self._look_s = time.monotonic() + self._again_s

    def pass_deadline(self, now_s: float) -> None:
        """Begins what is due."""
        if self._busy or self._asked is None:
            return
        if self._probe_s is not None and now_s >= self._probe_s:
            self._begin(partial(self._probe, self._asked))
        elif self._look_s is not None and now_s >= self._look_s:
            regions = {cgroups.region_of(info.pci_bus_id): info.uuid for info in self._infos if info.pci_bus_id}
            self._begin(partial(self._look, self._leaks, regions, repair=self._policy is LeakPolicy.REPAIR))

    def _begin(self, job: Callable[[], Callable[[], None]]) -> None:
        self._busy = True
        self.lane.submit(partial(self._run, job))

    def _run(self, job: Callable[[], Callable[[], None]]) -> None:
        try:
            self._post(partial(self._on_done, job()))
        except Exception as error:
            log.exception("looking after hard memory limits failed in an unforeseen way")
            self._post(partial(self._on_done, partial(self._on_failed, str(error))))

    def _on_done(self, result: Callable[[], None]) -> None:
        self._busy = False
        result()
        self.pass_deadline(time.monotonic())

    def _on_failed(self, error: str) -> None:
        now_s = time.monotonic()
        self._probe_s = now_s + self._again_s
        self._look_s = None if self._look_s is None else now_s + self._again_s
        self._warn((Reason(WarningCode.LIMITS_NOT_LOOKED_AFTER, f"cannot look after hard memory limits: {error}"),))

    # --- what the node proves ------------------------------------------------------------------------------------

    def _probe(self, asked: _Asked) -> Callable[[], None]:
        probed = probe(self._backend, asked.driver_version, asked.gpus, enable_dmem=asked.enable_dmem)
        return partial(self._on_probed, asked, probed)

    def _on_probed(self, asked: _Asked, probed: Probed) -> None:
        if asked != self._asked:
            return  # the next probe is due already
        now_s = time.monotonic()
        self._probe_s = now_s + self._again_s if probed.limits.missing or not probed.final else None
        if probed.limits != self.found:
            said = log.warning if self.found.backend and probed.limits.missing else log.info
            said(
                "hard memory limits",
                backend=probed.limits.backend,
                judged_by=probed.judged_by,
                missing="; ".join(probed.limits.missing),
            )
            if probed.limits.backend == "dmem" != self.found.backend:
                self._look_s = now_s  # of the time before us
        self.found = probed.limits

    # --- leaks ---------------------------------------------------------------------------------------------------

    def _look(self, before: tuple[Leak, ...], gpus: dict[str, str], *, repair: bool) -> Callable[[], None]:
        """Looks, gives back what was seen before, too, and looks whether it is gone."""
        root, errors = self._backend.cgroup_root, dict[Leak, str]()
        try:
            trees = leaks.read(root)
            found = tuple(leak for tree in trees for leak in leaks.find(tree))
            standing = leaks.standing(before, found)
            if repair and standing:
                for leak in standing:
                    errors[leak] = self._give_back(leak, gpus.get(leak.region))
                trees = leaks.read(root)
                found = tuple(leak for tree in trees for leak in leaks.find(tree))
                standing = leaks.standing(standing, found)
        except GpufracError as error:
            reason = Reason(WarningCode.LIMITS_NOT_LOOKED_AFTER, str(error))
            return partial(self._on_looked, before, (reason,), again=True)
        warnings = tuple(
            Reason(WarningCode.GUARANTEE_LEAKED, _text(leak, gpus, errors.get(leak, ""))) for leak in standing
        )
        return partial(self._on_looked, found, warnings, again=any(leaks.reserves(tree) for tree in trees))

    def _give_back(self, leak: Leak, uuid: str | None) -> str:
        """Why it could not be given back, empty when it was."""
        if uuid is None:
            return "its GPU is not there"
        try:
            leaks.give_back(self._backend, uuid, leak)
        except GpufracError as error:
            return str(error)
        log.info("gave leaked guarantee back", gpu=uuid, cgroup=leak.cgroup, bytes=leak.lost_bytes)
        return ""

    def _on_looked(self, found: tuple[Leak, ...], warnings: tuple[Reason, ...], *, again: bool) -> None:
        self._leaks = found
        self._look_s = time.monotonic() + self._again_s if again else None
        self._warn(warnings)

    def _warn(self, warnings: tuple[Reason, ...]) -> None:
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("hard memory limits fall short", reason=warning.message)
        self.warnings = warnings


def _text(leak: Leak, gpus: dict[str, str], error: str) -> str:
    what = f"{format_bytes(leak.lost_bytes)} on GPU {gpus.get(leak.region, leak.region)}"
    todo = f"cannot be given back: {error}" if error else "set enforcement.leaks: repair to give it back"
    return f"{what} stays reserved on cgroup {leak.cgroup} for containers that are gone: {todo}"
