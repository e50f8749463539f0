"""`gpufrac selftest`: proves on this node that memory limits hold, by processes that go over them."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import groupby

import click

from deviceplugin.cli.gpuname import choose, complete_gpu, names_of_mpsd
from deviceplugin.cli.node import Node, look
from deviceplugin.cli.options import node_options, run_root_of
from deviceplugin.cli.output import Failure, failures, print_json, print_table, say
from deviceplugin.cli.signals import ignore_signals, interrupt, on_signals
from deviceplugin.selftest import plan, record, run
from mpsd import simulated
from mpsd.common.lockfile import open_lock, try_lock
from mpsd.common.socketpath import mpsd_socket
from mpsd.config.model import Enforcement
from mpsd.gpu.model import Mode
from mpsd.localapi.client import MpsdClient

VARIABLE = "GPUFRAC_CUDA_CLIENT"


@click.command(epilog="Example: gpufrac selftest --gpu 0 --cuda-client /usr/local/bin/cuda-allocate")
@click.option(
    "--gpu", "gpus", multiple=True, metavar="GPU", shell_complete=complete_gpu, help="Only this one; may be repeated."
)
@click.option(
    "--cuda-client",
    envvar=VARIABLE,
    metavar="PROGRAM",
    help="On a real node: a CUDA program that is run as `PROGRAM --allocate BYTES --hold`. It allocates device memory "
    "on device 0, prints the bytes granted or the name of the CUDA error, and ends when standard input ends.",
)
@node_options
@failures
def selftest(
    gpus: tuple[str, ...], cuda_client: str | None, config_path: str | None, run_root: str | None, output: str
) -> None:
    """Prove that memory limits hold: per GPU, mode and level that this node promises.

    Processes of our own allocate below and above limits, and are to be granted or refused. That takes seconds and up to
    4Gi of a GPU, or the size of a free share, only where so much is not granted to anybody; no pod is touched, and a
    GPU that is bound to one mode is not used in the other. A pod that comes meanwhile starts a little later.

    What can't be tried now is named with the reason. The result is kept and shown by `gpufrac status`.

    Exit code 1 when a limit does not hold, and when nothing could be proven.
    """
    root = run_root_of(config_path, run_root)
    node = look(root)
    snapshot, plugin = node.need_mpsd(), node.need_plugin()
    claimed = plan.claims(plugin.resources)
    if not claimed:
        raise Failure("cannot prove anything: no resource that is offered promises a limit: see `gpufrac resources`")
    simulation = os.path.dirname(snapshot.cgroup_root) if snapshot.backend == "simulated" else ""
    cgroup: run.Cgroup = simulated.cgroup(simulation, run.NAME) if simulation else run.RealCgroup(snapshot.cgroup_root)
    client = run.Client(simulated.cuda_command(simulation), {}) if simulation else _real_client(cuda_client)
    known = names_of_mpsd(snapshot)
    chosen = [gpu.uuid for gpu in (choose(gpus, known) if gpus else sorted(known))]
    with _alone(root), on_signals(interrupt):
        results = _run(MpsdClient(mpsd_socket(root)), client, cgroup, _facts(node, chosen), claimed)
    done = record.Record(
        unix_s=time.time(), driver=snapshot.driver_version or "unknown", version=version("gpufrac"), results=results
    )
    if plugin.state_root:
        record.store(plugin.state_root, done)
    _show(done, output)
    found = record.verdicts(results)
    sys.exit(1 if any(v.failed for v in found) or not any(v.proven for v in found) else 0)


def _real_client(cuda_client: str | None) -> run.Client:
    if not cuda_client:
        raise Failure(
            "cannot prove anything on a real GPU without a CUDA program, and gpufrac has none: name one with "
            f"--cuda-client or {VARIABLE}, see `gpufrac selftest --help`"
        )
    if os.geteuid() != 0:
        raise Failure("cannot put processes into a cgroup: run it as root on the node")
    return run.real_client(shlex.split(cuda_client))


def _facts(node: Node, chosen: Sequence[str]) -> list[plan.GpuFacts]:
    accounts = {account.uuid: account for account in node.need_plugin().gpus}
    gpus = {gpu.info.uuid: gpu for gpu in node.need_mpsd().gpus}
    return [plan.facts(gpus[uuid], accounts.get(uuid), run.ways(gpus[uuid])) for uuid in chosen]


def _run(
    mpsd: run.Limits,
    client: run.Client,
    cgroup: run.Cgroup,
    gpus: Sequence[plan.GpuFacts],
    claimed: Mapping[Mode, Enforcement],
) -> tuple[record.Result, ...]:
    uuids = [gpu.uuid for gpu in gpus]
    results = []
    run.clean_up(mpsd, cgroup, uuids)  # what one that was killed left
    try:
        for gpu in gpus:
            todo = list(plan.trials(gpu, claimed))
            for trial in todo:
                if not trial.in_cgroup or trial.why:
                    found = trial.why or run.attempt(client, cgroup, gpu.uuid, trial)
                    results.append(record.judge(gpu, trial, found))
            limited = [trial for trial in todo if trial.in_cgroup and not trial.why]
            if limited:
                with run.limited(mpsd, cgroup, gpu) as trouble:
                    if trouble:  # the same for all: one of each mode says it
                        limited = [next(group) for _, group in groupby(limited, lambda trial: trial.mode)]
                    for trial in limited:
                        found = trouble or run.attempt(client, cgroup, gpu.uuid, trial)
                        results.append(record.judge(gpu, trial, found))
    finally:
        ignore_signals()
        run.clean_up(mpsd, cgroup, uuids)
    return tuple(results)


@contextmanager
def _alone(root: str) -> Iterator[None]:
    """Two at once would share a cgroup, and one's memory would spoil the other's results."""
    fd = open_lock(f"{root}/selftest.lock")
    try:
        if not try_lock(fd):
            raise Failure("cannot start: another self-test runs on this node; try again when it has ended")
        yield
    finally:
        os.close(fd)


def _show(done: record.Record, output: str) -> None:
    if output == "json":
        print_json(record.document(done))
        return
    words = {True: "yes", False: "NO", None: "-"}
    rows = [(r.index, r.mode, r.level, r.what, r.expected, r.found, words[r.ok]) for r in done.results]
    print_table(("GPU", "MODE", "LEVEL", "WHAT", "EXPECTED", "FOUND", "OK"), rows, "There is no GPU.")
    say()
    for verdict in record.verdicts(done.results):
        say(f"{verdict.mode} {verdict.level}: {_words(verdict)}")


def _words(verdict: record.Verdict) -> str:
    parts = (("DOES NOT HOLD", verdict.failed), ("proven", verdict.proven), ("not proven", verdict.unproven))
    return "; ".join(f"{word} on GPU {', '.join(map(str, indices))}" for word, indices in parts if indices)
