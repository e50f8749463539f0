"""`gpufrac gpus`: every GPU in one line, or all about some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from deviceplugin.cli.faults import gpu_faults, numbers
from deviceplugin.cli.gpuname import GpuName, choose, complete_gpu
from deviceplugin.cli.node import LOG_LINES, Node, log_lines, look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import age, counted, failures, print_json, print_table, say, size
from deviceplugin.plan.view import daemon_reason, daemon_state
from deviceplugin.status.model import GpuAccount
from mpsd.localapi.snapshot import DaemonStatus, GpuStatus
from mpsd.shares.groups import declared_name


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What both processes say of one GPU. `domain`: the GPUs of the MPS daemon that serves it, itself among them."""

    uuid: str
    account: GpuAccount | None
    state: GpuStatus | None
    domain: tuple[str, ...]

    @property
    def name(self) -> GpuName:
        index = self.state.info.index if self.state else self.account.index if self.account else -1
        group = self.account.group if self.account else self.state.group if self.state else ""
        return GpuName(index, self.uuid, declared_name(group, self.uuid))

    @property
    def health(self) -> str | None:
        """Health as mpsd sees it, or what an operator made of a healthy GPU."""
        health = self.state.health if self.state else None
        return "drained" if health in (None, "ok") and self.account and self.account.drained else health

    @property
    def mode(self) -> str:
        """The compute mode it is bound to, or `idle`."""
        return (self.account.mode if self.account else self.state.mode if self.state else None) or "idle"

    @property
    def daemon(self) -> DaemonStatus | None:
        """Its MPS daemon as mpsd sees it, None where mpsd is not heard."""
        return self.state.daemon if self.state else None

    @property
    def reason(self) -> str:
        """Why it takes nothing new; empty when it does."""
        reason = (self.state.not_shared or self.state.reason) if self.state else ""
        if not reason and self.daemon and daemon_state(self.daemon) != "ready":
            reason = daemon_reason(self.daemon)
        return reason or (self.account.reason if self.account else "")


def gpu_facts(node: Node) -> list[GpuFacts]:
    """All GPUs by index (pure)."""
    accounts = {gpu.uuid: gpu for gpu in node.plugin.gpus} if node.plugin else {}
    states = {gpu.info.uuid: gpu for gpu in node.mpsd.gpus} if node.mpsd else {}
    domains: dict[str, tuple[str, ...]] = {}
    for uuid, gpu in states.items():
        domains[gpu.group] = (*domains.get(gpu.group, ()), uuid)
    found = []
    for uuid in {**states, **accounts}:
        account, state = accounts.get(uuid), states.get(uuid)
        domain = domains[state.group] if state is not None else account.domain if account is not None else ()
        found.append(GpuFacts(uuid, account, state, domain))
    return sorted(found, key=lambda gpu: gpu.name)


@click.command(epilog="Example: gpufrac gpus 0")
@click.argument("names", nargs=-1, metavar="[GPU...]", shell_complete=complete_gpu)
@node_options
@failures
def gpus(names: tuple[str, ...], config_path: str | None, run_root: str | None, output: str) -> None:
    """GPUs: health, compute mode, MPS daemon, memory usable, granted and free, and why one takes nothing new.

    With GPU (an index, a UUID, a unique prefix of one, or a group) everything about it, log lines of its MPS daemon
    included while that is in trouble.
    """
    node = look(run_root_of(config_path, run_root))
    node.need_any()
    found = gpu_facts(node)
    index = {gpu.uuid: gpu.name.index for gpu in found}
    if names:
        chosen = choose(names, [gpu.name for gpu in found])
        found = [gpu for gpu in found if gpu.name in chosen]
    if output == "json":
        print_json([{"uuid": gpu.uuid, "account": gpu.account, "state": gpu.state} for gpu in found])
    elif names:
        say("\n\n".join("\n".join(gpu_detail(gpu, index)) for gpu in found))
    else:
        columns, rows = gpu_table(found, index)
        known = f": {node.mpsd.reason}" if node.mpsd and node.mpsd.reason else "."
        print_table(columns, rows, f"No GPU is known{known}")
        for line in log_lines(node.mpsd):
            say(line)
    node.note_down()


def gpu_table(found: Sequence[GpuFacts], index: Mapping[str, int]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Columns and rows of `gpufrac gpus`; groups have a column where there are some, domains where an MPS daemon owns
    several GPUs, and so has whom a GPU serves where annotated pods may have some (pure)."""
    grouped = any(gpu.name.group for gpu in found)
    joined = any(len(gpu.domain) > 1 for gpu in found)
    divided = any(gpu.account and gpu.account.serves != "resources" for gpu in found)
    rows: list[tuple[object, ...]] = []
    for gpu in found:
        account = gpu.account
        rows.append(
            (
                gpu.name.index,
                gpu.uuid,
                *([gpu.name.group] if grouped else []),
                *([numbers(gpu.domain, index, ",")] if joined else []),
                *([account.serves if account else None] if divided else []),
                gpu.state.info.name if gpu.state else None,
                gpu.health,
                f"{daemon_state(gpu.daemon)} v{gpu.daemon.protocol}" if gpu.daemon else None,
                gpu.mode,
                size(account.usable_bytes) if account else None,
                size(account.granted_bytes) if account else None,
                size(account.free_bytes) if account else None,
                account.allocations if account else None,
                gpu.reason or (account.kept if account else None),
            )
        )
    group = tuple(column for column, shown in (("GROUP", grouped), ("DOMAIN", joined), ("SERVES", divided)) if shown)
    memory = ("USABLE", "GRANTED", "FREE")
    return ("GPU", "UUID", *group, "NAME", "HEALTH", "MPS", "MODE", *memory, "ALLOCATIONS", "REASON"), rows


def gpu_detail(gpu: GpuFacts, index: Mapping[str, int]) -> list[str]:
    """Everything about one GPU (pure)."""
    state, account, daemon = gpu.state, gpu.account, gpu.daemon
    facts = [("group", gpu.name.group), ("health", gpu.health), ("mode", gpu.mode)]
    if state:
        facts += [("model", state.info.name), ("compute mode", state.driver_compute_mode)]
    if account:
        facts += [
            ("serves", account.serves if account.serves != "resources" else ""),
            ("resources", account.kept),
            ("drained", account.drained),
            ("usable", size(account.usable_bytes)),
            ("granted", f"{size(account.granted_bytes)} in {counted(account.allocations, 'allocation')}"),
            ("free", size(account.free_bytes)),
            ("faults", gpu_faults(account)),
        ]
    facts.append(("nothing new", gpu.reason))
    if len(gpu.domain) > 1:
        facts.append(("domain", f"GPU {numbers(gpu.domain, index)} have one MPS daemon"))
    if daemon:
        facts += [
            ("MPS daemon", f"{daemon_state(daemon)} since {age(daemon.since_unix_s)}, v{daemon.protocol}"),
            ("", f"pid {daemon.pid or '-'}, {counted(daemon.restarts, 'restart')}"),
            ("its reason", daemon_reason(daemon)),
            ("its limit", size(daemon.pinned_limit_bytes)),
            ("its logs", daemon.log_directory),
        ]
    if state:
        facts.append(("processes", f"{len(state.clients)} (gpufrac clients --gpu {gpu.name.index})"))
    lines = [f"{gpu.name} {gpu.uuid}"]
    lines += [f"  {f'{what}:' if what else '':14} {value}" for what, value in facts if value]
    if daemon and daemon.last_log:
        lines += ["  last log lines:", *(f"    {line}" for line in daemon.last_log[-LOG_LINES:])]
    return lines
