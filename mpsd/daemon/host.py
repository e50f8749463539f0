"""The effects of a lifecycle, each one blocking call with deadlines of its own; run by worker threads."""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpsd.common import processes
from mpsd.common.errors import ConfigError, GpufracError, TransientError
from mpsd.common.log import get_logger
from mpsd.common.reason import Reason
from mpsd.config.model import MpsConfig
from mpsd.daemon import dirs as directories
from mpsd.daemon import process, protocol3
from mpsd.daemon.adopt import DaemonIdentity, Evidence, Foreign, Ours, ProcessIdentity, judge
from mpsd.daemon.control import MAX_REPLY_BYTES, ControlClient, FrontEnd, as_it_is
from mpsd.daemon.controller import QUERY_S, Configured, Controller, MpsClients
from mpsd.daemon.controller2 import Controller2
from mpsd.daemon.controller3 import Controller3
from mpsd.daemon.paths import DaemonDirs, base_environment, control_binary, socket_objection
from mpsd.daemon.plan import DaemonSpec
from mpsd.daemon.state import ChosenProtocol, StateFile
from mpsd.localapi.reasons import DaemonCode

log = get_logger("daemon")


class ForeignDaemonError(GpufracError):
    """A control daemon that is not ours lives in our pipe directory: only an operator can tell whether it may end."""


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that lives. `adopted`: it did so before we came; it may speak another protocol or serve other GPUs than
    the spec wants."""

    identity: DaemonIdentity
    adopted: bool


@dataclass(frozen=True, slots=True)
class ProtocolChoice:
    """The protocol that daemons to be started speak. `objection` says why they can't. `unsure` says why the control
    binary did not tell: then it is asked again."""

    protocol: int
    objection: Reason | None = None
    unsure: Reason | None = None


class Place(Protocol):
    """Where daemons are started on this host, and what lies around them there.

    `launch` gives arguments and environment of a process that becomes the daemon, `explain` what went wrong where it
    did not get that far, empty when it did. `reach` gives those of a program of the driver's that talks to one. `leave`
    clears up after one that is gone, `remove` for good. `launch` and `remove` raise TransientError.
    """

    def launch(
        self, name: str, dirs: DaemonDirs, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]: ...
    def explain(self, returncode: int, output: str) -> str: ...
    def reach(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]: ...
    def leave(self, name: str) -> None: ...
    def remove(self, dirs: DaemonDirs) -> None: ...


class DaemonHost(Protocol):
    """What the supervisor has done to daemons. All raise GpufracError with the reason."""

    def protocol(self, driver_version: str) -> ProtocolChoice: ...
    def find(self, spec: DaemonSpec) -> Running | None: ...
    def spawn(self, spec: DaemonSpec) -> Running: ...
    def configure(self, spec: DaemonSpec) -> Configured: ...
    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]: ...
    def hold_server(self, spec: DaemonSpec) -> None: ...
    def clients(self, spec: DaemonSpec) -> MpsClients: ...
    def terminate_client(self, spec: DaemonSpec, pid: int) -> None: ...
    def quit(self, spec: DaemonSpec, timeout_s: float) -> None: ...
    def terminate(self, identity: DaemonIdentity) -> None: ...
    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None: ...
    def remove(self, spec: DaemonSpec, *, homes: bool) -> None: ...


class LocalHost:
    """`DaemonHost` on this node.

    Args:
        query_s: deadline of one command. help_s: of the question which protocols the binary has.
        place: where daemons are started; None for right here, so that they end with whatever mpsd ends with.
        simulated: whether pods are simulated, too.
    """

    START_S = 10.0
    KILL_S = 5.0
    HELP_S = 30.0
    """For the binary to tell its protocols: on a cold disk its first run can take far longer than a command."""

    def __init__(
        self,
        mps: MpsConfig,
        state: StateFile,
        control: ControlClient | None = None,
        *,
        query_s: float = QUERY_S,
        help_s: float = HELP_S,
        place: Place | None = None,
        simulated: bool = False,
    ) -> None:
        self._reach = place.reach if place is not None else as_it_is
        control = control or FrontEnd(mps, self._reach)
        self._mps = mps
        self._binary = control_binary(mps)
        self._state = state
        self._controllers: dict[int, Controller] = {2: Controller2(control, query_s), 3: Controller3(control, query_s)}
        self._help_s = help_s
        self._place = place
        self._simulated = simulated
        self._warned = ""
        self._boot_id = processes.boot_id()

    def protocol(self, driver_version: str) -> ProtocolChoice:
        """The protocol to use with this driver: what the config says, or 3 where driver and binary have it. A binary
        that does not tell is no proof of either: then it is what it told last with this driver, or nothing is started.
        """
        if self._mps.protocol == "2":
            return ProtocolChoice(2)
        if protocol3.driver_major(driver_version) < protocol3.FIRST_DRIVER:
            missing = f"it needs driver {protocol3.FIRST_DRIVER} and this is {driver_version or 'unknown'}"
        else:
            try:
                offered = self._offers_protocol_3()
            except GpufracError as error:
                return self._recorded_protocol(driver_version, str(error))
            chosen = 3 if offered or self._mps.protocol == "3" else 2
            self._record_protocol(driver_version, chosen)
            if offered:
                return ProtocolChoice(3)
            missing = f"{self._binary} does not offer it"
        if self._mps.protocol == "3":
            text = f"MPS protocol 3 can't be used: {missing}: set mps.protocol to auto"
            return ProtocolChoice(3, Reason(DaemonCode.PROTOCOL_NOT_THERE, text))
        return ProtocolChoice(2)

    def _offers_protocol_3(self) -> bool:
        """Raises GpufracError where the binary does not tell."""
        arguments = [self._binary, *protocol3.HELP]
        words, variables = self._reach(arguments, dict(base_environment(self._mps)))
        done = process.run(words, variables, b"", self._help_s, MAX_REPLY_BYTES)
        said = done.output.decode(errors="replace")
        offered = protocol3.is_offered(said, done.returncode)
        if offered is None:
            text = " ".join(said.split())[:200] or "nothing"
            raise TransientError(f"{' '.join(arguments)} said {text} (exit {done.returncode})")
        return offered

    def _recorded_protocol(self, driver_version: str, error: str) -> ProtocolChoice:
        """What to do where the binary does not tell its protocols now."""
        unsure = Reason(DaemonCode.PROTOCOL_NOT_KNOWN, error)
        recorded = self._state.saved.protocol
        usable = recorded is not None and recorded.driver_version == driver_version
        if recorded is not None and usable and self._mps.protocol in ("auto", str(recorded.protocol)):
            return ProtocolChoice(recorded.protocol, unsure=unsure)
        text = (
            f"which MPS protocols the control binary has is not known: {error}; it is asked again, or set mps.protocol "
            "to 2 for good"
        )
        return ProtocolChoice(3, Reason(DaemonCode.PROTOCOL_NOT_KNOWN, text), unsure=unsure)

    def _record_protocol(self, driver_version: str, protocol: int) -> None:
        try:
            self._state.record_protocol(ChosenProtocol(driver_version=driver_version, protocol=protocol))
        except TransientError as error:
            log.warning("the MPS protocol chosen will not be remembered", error=str(error))

    def find(self, spec: DaemonSpec) -> Running | None:
        """The daemon of an earlier mpsd, None when it is gone.

        Raises:
            ForeignDaemonError: a daemon lives there that we can't prove to be ours.
        """
        recorded = self._state.saved.daemons.get(spec.name)
        pids = dict.fromkeys(pid for pid in (recorded and recorded.pid, process.read_pid_file(spec.dirs)) if pid)
        seen = [process.host_candidate(pid, simulated=self._simulated) for pid in pids]
        if not pids and directories.is_served(spec.dirs):
            seen = [process.find_unrecorded(spec.name, spec.dirs.pipe, simulated=self._simulated)]
        candidates = tuple(candidate for candidate in seen if candidate is not None)
        verdict = judge(Evidence(self._boot_id, spec.name, spec.dirs.pipe, recorded, candidates))
        if isinstance(verdict, Foreign):
            raise ForeignDaemonError(
                f"cannot use {spec.dirs.pipe}: the MPS control daemon with pid {verdict.pid} lives there, and "
                f"{verdict.reason}: end it"
            )
        if isinstance(verdict, Ours):
            self._state.record_daemon(spec.name, verdict.identity)
            return Running(verdict.identity, adopted=True)
        return None

    def spawn(self, spec: DaemonSpec) -> Running:
        """The daemon of this spec: the one that lives, or a new one in cleared directories.

        Raises:
            TransientError: it can't be started now.
            ConfigError, ForeignDaemonError: trying again soon won't help.
        """
        if objection := socket_objection(spec.dirs):
            raise ConfigError(f"cannot start the MPS control daemon: {objection}")
        warning = directories.prepare(spec.dirs)
        if warning and warning != self._warned:
            self._warned = warning
            log.warning("MPS pipe directory is closed to host processes", daemon=spec.name, reason=warning)
        if running := self.find(spec):
            return running
        self._end(spec, ())  # servers of a daemon that died keep the GPU from the next
        self._check_listener(spec)
        directories.clear_stale(spec.dirs)
        self._state.record_daemon(spec.name, self._intent(spec))
        self._start(spec)
        identity = process.find_started(spec.name, spec.dirs, self._boot_id, simulated=self._simulated)
        self._state.record_daemon(spec.name, identity)
        return Running(identity, adopted=False)

    def _check_listener(self, spec: DaemonSpec) -> None:
        """Raises ForeignDaemonError where somebody listens on the control socket whose daemon it may be. A process of a
        tenant's pod is none: it could write to the directory (`mps.writableMount`), and its socket goes with the
        rest."""
        pid = directories.listener(spec.dirs)
        if pid is None:
            return
        if pid and processes.in_a_pod_of_others(pid, simulated=self._simulated):
            log.warning(
                "a process of a pod listens in the MPS daemon's place; its socket is removed",
                daemon=spec.name,
                pid=pid,
                pod=processes.pod_uid_of(pid, simulated=self._simulated),
            )
            return
        raise ForeignDaemonError(
            f"cannot use {spec.dirs.pipe}: a process that we did not start listens on {spec.dirs.control_socket}"
            f"{f' (pid {pid})' if pid else ''}: end it"
        )

    def _intent(self, spec: DaemonSpec) -> DaemonIdentity:
        """The record of a daemon about to be started: should we die before it has a PID, it is looked for all the
        same."""
        return DaemonIdentity(
            boot_id=self._boot_id,
            pid=0,
            start_time=0,
            process_group=0,
            pipe_directory=spec.dirs.pipe,
            protocol=spec.protocol,
            gpus=spec.gpus,
        )

    def _start(self, spec: DaemonSpec) -> None:
        controller = self._controllers[spec.protocol]
        controller.prepare(spec)
        multiuser = os.geteuid() == 0 and spec.several_users
        arguments: Sequence[str] = (self._binary, *controller.start_arguments(spec, multiuser=multiuser))
        environment: Mapping[str, str] = dict(spec.environment)
        explain: process.Explain = process.no_explanation
        if self._place is not None:
            arguments, environment = self._place.launch(spec.name, spec.dirs, arguments, environment)
            explain = self._place.explain
        process.start(arguments, environment, spec.dirs, self.START_S, explain)

    def configure(self, spec: DaemonSpec) -> Configured:
        """See Controller, and the next ones too."""
        return self._controllers[spec.protocol].configure(spec)

    def probe(self, spec: DaemonSpec, *, servers: bool) -> Mapping[str, Reason]:
        return self._controllers[spec.protocol].probe(spec, servers=servers)

    def hold_server(self, spec: DaemonSpec) -> None:
        self._controllers[spec.protocol].hold_server(spec)

    def clients(self, spec: DaemonSpec) -> MpsClients:
        return self._controllers[spec.protocol].clients(spec)

    def terminate_client(self, spec: DaemonSpec, pid: int) -> None:
        self._controllers[spec.protocol].terminate_client(spec, pid)

    def quit(self, spec: DaemonSpec, timeout_s: float) -> None:
        self._controllers[spec.protocol].quit(spec, timeout_s)

    def terminate(self, identity: DaemonIdentity) -> None:
        """SIGTERM to the daemon's process group."""
        process.signal_group(identity, signal.SIGTERM)

    def kill(self, spec: DaemonSpec, identity: DaemonIdentity | None, servers: tuple[ProcessIdentity, ...]) -> None:
        """Ends the daemon, its group and every server that survives, and waits until they are gone.

        Raises:
            TransientError: naming what lives on.
        """
        if identity is not None:
            process.signal_group(identity, signal.SIGKILL)
        self._end(spec, servers if identity is None else (identity, *servers))
        self._state.record_daemon(spec.name, None)
        if self._place is not None:
            self._place.leave(spec.name)
        if not directories.is_served(spec.dirs):
            with contextlib.suppress(TransientError):  # the next start says so, if there is one
                directories.clear_stale(spec.dirs)

    def _end(self, spec: DaemonSpec, known: Sequence[ProcessIdentity | DaemonIdentity]) -> None:
        """Ends these and all that have the environment of our daemon."""

        def victims() -> Sequence[ProcessIdentity | DaemonIdentity]:
            return (*known, *process.members(spec.name, spec.dirs.pipe, simulated=self._simulated))

        left = process.kill_and_wait(victims, self.KILL_S)
        if left:
            raise TransientError(f"cannot end pid {', '.join(map(str, left))} of the MPS daemon")

    def remove(self, spec: DaemonSpec, *, homes: bool) -> None:
        """Removes the pipe directory of a daemon that is gone, and with `homes` what containers mount of it."""
        directories.remove(spec.dirs, spec.homes if homes else ())
        if self._place is not None:
            self._place.remove(spec.dirs)
