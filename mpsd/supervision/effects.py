"""What a daemon's lifecycle has done on the host: each effect as a value that carries all it needs, run in a lane."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mpsd.common.errors import ConfigError, TransientError
from mpsd.common.reason import Reason
from mpsd.daemon.adopt import DaemonIdentity, ProcessIdentity
from mpsd.daemon.controller import Configured
from mpsd.daemon.host import DaemonHost, ProtocolChoice, Running
from mpsd.daemon.lifecycle import Effect
from mpsd.daemon.plan import DaemonSpec


@dataclass(frozen=True, slots=True)
class Spawn:
    """`choice`: what daemons to be started speak, or why none can be."""

    effect: ClassVar = Effect.SPAWN
    spec: DaemonSpec
    choice: ProtocolChoice

    def run(self, host: DaemonHost) -> Running:
        """Where none can be started, one that runs is adopted all the same."""
        if self.choice.objection is None:
            return host.spawn(self.spec)
        if (running := host.find(self.spec)) is None:
            error = ConfigError if self.choice.unsure is None else TransientError
            raise error(self.choice.objection.message)
        return running


@dataclass(frozen=True, slots=True)
class Configure:
    """`ask_servers`: whether its servers are asked what is in force, too."""

    effect: ClassVar = Effect.CONFIGURE
    spec: DaemonSpec
    ask_servers: bool

    def run(self, host: DaemonHost) -> Configured:
        configured = host.configure(self.spec)
        if self.ask_servers:
            # What was refused holds up its allocation only.
            attached = tuple(n for n in self.spec.namespaces if n.name in configured.attached)
            objections = host.probe(replace(self.spec, namespaces=attached), servers=True)
            configured = configured.without(objections)
        return configured


@dataclass(frozen=True, slots=True)
class Probe:
    """`spec`: what was read back, and no more."""

    effect: ClassVar = Effect.PROBE
    spec: DaemonSpec
    ask_servers: bool

    def run(self, host: DaemonHost) -> Mapping[str, Reason]:
        """Objections to namespaces, by name."""
        return host.probe(self.spec, servers=self.ask_servers)


@dataclass(frozen=True, slots=True)
class Quit:
    effect: ClassVar = Effect.QUIT
    spec: DaemonSpec
    wait_s: float

    def run(self, host: DaemonHost) -> None:
        host.quit(self.spec, self.wait_s)


@dataclass(frozen=True, slots=True)
class Terminate:
    effect: ClassVar = Effect.TERMINATE
    identity: DaemonIdentity | None

    def run(self, host: DaemonHost) -> None:
        if self.identity is not None:
            host.terminate(self.identity)


@dataclass(frozen=True, slots=True)
class Kill:
    effect: ClassVar = Effect.KILL
    spec: DaemonSpec
    identity: DaemonIdentity | None
    servers: tuple[ProcessIdentity, ...]

    def run(self, host: DaemonHost) -> None:
        host.kill(self.spec, self.identity, self.servers)


Work = Spawn | Configure | Probe | Quit | Terminate | Kill
