"""`gpufrac sim ...`: a simulated node, without GPU, cluster or root."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from deviceplugin.cli.output import Failure, failures, output_option, print_json, say
from deviceplugin.cli.signals import ignore_signals, interrupt, on_signals
from deviceplugin.cli.simoptions import Size, directory_option, node_options, schedule_option
from mpsd.common.errors import ConfigError

if TYPE_CHECKING:
    from deviceplugin.sim.node.node import SimulatedNode
    from deviceplugin.sim.objects.manifests import LoadedPod, Note


@click.group()
def sim() -> None:
    """A simulated node: no GPU, no cluster, no root. Shows what pods would get, and why one would be refused."""


@sim.command(
    short_help="Admit pods on a node of their own, show them.",
    epilog="Example: gpufrac sim run --config node.yaml --gpus 2 pod.yaml",
)
@node_options
@schedule_option
@output_option
@click.argument("manifests", nargs=-1, required=True, metavar="POD.yaml...")
@failures
def run(
    config_path: str | None,
    gpus: int | None,
    gpu_memory: int | None,
    driver: str | None,
    output: str,
    manifests: tuple[str, ...],
    *,
    schedule: bool,
    **kind: Any,
) -> None:
    """Bring up a simulated node, admit the pods of the manifests in order as a cluster would, and take it down.

    Pods, Lists, Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs and CronJobs are read; `-` is standard input,
    and of a directory every .yaml, .yml and .json file in it. What a cluster refuses is refused.
    Annotations of containers are taken as given; with --schedule they are written for pods that ask KAI for fractions.
    A pod for which the node has no room, or whose resource nobody offers there, stays Pending.

    Exit codes: 0 all pods admitted, all their containers started, and none of these runs without the limit or a device
    that it asks for, be it by a misspelt annotation; 1 otherwise; 2 a manifest or the config is not usable.
    """
    from deviceplugin.sim.node import report
    from deviceplugin.sim.objects.manifests import LoadedPod, Note, load_all

    found = load_all(manifests)
    _need_pods(found)
    pods = [item for item in found if isinstance(item, LoadedPod)]
    with _simulated_node(None, config_path, gpus, gpu_memory, driver, pods if schedule else (), **kind) as node:
        result = node.admit(pods, schedule=schedule)
        notes = [str(item) for item in found if isinstance(item, Note)]
    _print(result, notes, output)
    sys.exit(0 if report.all_well(result) else 1)


@sim.command(
    short_help="Keep a simulated node running.", epilog="Example: gpufrac sim up --directory /tmp/node --gpus 2"
)
@directory_option
@node_options
@failures
def up(
    directory: str,
    config_path: str | None,
    gpus: int | None,
    gpu_memory: int | None,
    driver: str | None,
    **kind: Any,
) -> None:
    """Keep a simulated node running in the foreground, until Ctrl-C or SIGTERM.

    `gpufrac sim admit|delete|restart-kubelet|client -d DIR` act on it; `gpufrac status --run-root DIR/run` and
    other commands look at it.
    """
    from deviceplugin.sim.node import control

    directory = os.path.abspath(directory)
    stop = threading.Event()
    with _simulated_node(directory, config_path, gpus, gpu_memory, driver, **kind) as node:
        server = control.server(node)
        server.start()
        try:
            with on_signals(stop.set):
                say(f"The simulated node is up in {directory}. Stop it with Ctrl-C.")
                say(f"Next: gpufrac sim admit -d {directory} pod.yaml")
                while not stop.wait(0.5):
                    node.processes.check()
        finally:
            server.close()


@sim.command(epilog="Example: gpufrac sim admit -d /tmp/node pod.yaml")
@directory_option
@schedule_option
@output_option
@click.argument("manifests", nargs=-1, required=True, metavar="POD.yaml...")
@failures
def admit(directory: str, output: str, manifests: tuple[str, ...], *, schedule: bool) -> None:
    """Admit the pods of manifests on a node that is up. Exit codes as for `sim run`."""
    from deviceplugin.sim.node import report
    from deviceplugin.sim.node.control import ControlClient
    from deviceplugin.sim.objects.manifests import parse_all, read_manifests

    texts = [text for path in manifests for text in read_manifests(path)]
    _need_pods(parse_all(texts))  # the node would say the same, but bytes that are no text don't reach it
    admitted = ControlClient(os.path.abspath(directory)).admit(texts, schedule=schedule)
    _print(admitted.report, list(admitted.notes), output)
    sys.exit(0 if report.all_well(admitted.report) else 1)


@sim.command(epilog="Example: gpufrac sim delete -d /tmp/node web-0")
@directory_option
@click.option("--force", is_flag=True, help="Forget the pods at once; their processes run on until the node goes down.")
@click.argument("pods", nargs=-1, required=True, metavar="[NAMESPACE/]POD|POD.yaml...")
@failures
def delete(directory: str, *, force: bool, pods: tuple[str, ...]) -> None:
    """Delete pods by name, or those of manifests."""
    from deviceplugin.sim.node.control import ControlClient
    from deviceplugin.sim.objects.manifests import SUFFIXES, LoadedPod, load_manifests

    names: list[tuple[str, str]] = []
    for pod in pods:
        if pod == "-" or pod.endswith((*SUFFIXES, "/")):
            names += [
                (item.pod.namespace, item.pod.name) for item in load_manifests(pod) if isinstance(item, LoadedPod)
            ]
        else:
            namespace, _, name = pod.rpartition("/")
            names.append((namespace or "default", name))
    names = list(dict.fromkeys(names))
    ControlClient(os.path.abspath(directory)).delete(names, force=force)
    for namespace, name in names:
        say(f'pod "{name}" deleted from namespace "{namespace}"')


@sim.command(
    "restart-kubelet",
    short_help="Restart the stub kubelet.",
    epilog="Example: gpufrac sim restart-kubelet -d /tmp/node",
)
@directory_option
@failures
def restart_kubelet(directory: str) -> None:
    """Restart the stub kubelet: it forgets all but its checkpoint, plugins register again, pods are admitted again.

    Exit code 1 when a pod failed for it.
    """
    from deviceplugin.sim.node.control import ControlClient

    restarted = ControlClient(os.path.abspath(directory)).restart_kubelet()
    for name, message in restarted.failed.items():
        say(f"{name}: Failed: {message}")
    say(f"The kubelet restarted with {restarted.pods} pods, {len(restarted.failed)} of them failed for it.")
    sys.exit(1 if restarted.failed else 0)


@sim.command(epilog="Example: gpufrac sim client -d /tmp/node web-0/main --allocate 9Gi")
@directory_option
@click.option("--allocate", "size_bytes", type=Size("1"), metavar="SIZE", help="Device memory to allocate, e.g. 9Gi.")
@click.option("--device", type=int, default=0, show_default=True, help="Ordinal of the GPU as the container sees it.")
@click.option("--hold", is_flag=True, help="Keep the memory until standard input ends, SIGTERM, or trouble.")
@click.option("--info", is_flag=True, help="First print what CUDA found, as one line of JSON.")
@click.option("-i", "--empty-env", is_flag=True, help="As `env -i` in the container: with an empty environment.")
@click.option("--env", "changes", metavar="NAME=VALUE", multiple=True, help="As `env NAME=VALUE` in the container.")
@click.argument("target", metavar="[NAMESPACE/]POD/CONTAINER")
@failures
def client(
    directory: str,
    size_bytes: int | None,
    device: int,
    changes: tuple[str, ...],
    target: str,
    *,
    hold: bool,
    info: bool,
    empty_env: bool,
) -> None:
    """Run a simulated CUDA process in a container.

    Prints the bytes granted, or the CUDA error such as CUDA_ERROR_OUT_OF_MEMORY with exit code 1.
    """
    from deviceplugin.sim.node.control import ControlClient

    if device < 0:
        raise click.BadParameter(f"cannot use --device {device}: GPUs are counted from 0")
    parts = target.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise click.BadParameter(f"cannot use {target!r}: write POD/CONTAINER or NAMESPACE/POD/CONTAINER")
    if wrong := [change for change in changes if change.find("=") < 1]:
        raise click.BadParameter(f"cannot use --env {wrong[0]!r}: write NAME=VALUE")
    namespace, pod, container = parts if len(parts) == 3 else ("default", *parts)
    environment = ControlClient(os.path.abspath(directory)).enter(namespace, pod, container)
    from mpsd.sim.cuda.program import cuda_command

    arguments = [*cuda_command(), "--device", str(device)]
    arguments += ["--simulation", environment["GPUFRAC_SIM_DIRECTORY"]]
    arguments += ["--allocate", str(size_bytes)] if size_bytes is not None else []
    arguments += ["--hold"] if hold else []
    arguments += ["--info"] if info else []
    if empty_env:
        # A shell of the container above it, as on a real node: what is known of a process by its ancestors stays known.
        arguments = ["/bin/sh", "-c", _RUN_AND_WAIT, "sh", "/usr/bin/env", "-i", *changes, *arguments]
    else:
        environment |= dict(change.split("=", 1) for change in changes)
    sys.stdout.flush()
    try:
        os.execve(arguments[0], arguments, environment)  # noqa: S606 - our interpreter, a list of arguments
    except (OSError, ValueError) as error:
        raise Failure(f"cannot run the simulated client: {error}") from error


_RUN_AND_WAIT = """
exec 3<&0
"$@" <&3 3<&- & pid=$!
exec 3<&- </dev/null
trap 'kill -TERM $pid 2>/dev/null' TERM INT HUP
wait $pid; status=$?
while kill -0 $pid 2>/dev/null; do wait $pid; status=$?; done
exit $status
"""
"""Runs its arguments as a child with our stdin, and passes on how to end and how it ended."""


def _need_pods(found: "Sequence[LoadedPod | Note]") -> None:
    """Raises ConfigError where manifests lead to no pod at all."""
    from deviceplugin.sim.objects.manifests import LoadedPod

    if not any(isinstance(item, LoadedPod) for item in found):
        raise ConfigError("\n".join(["cannot find a pod in the manifests", *map(str, found)]))


def _print(result: dict[str, Any], notes: list[str], output: str) -> None:
    if output == "json":
        print_json({**result, "notes": notes})
        return
    from deviceplugin.sim.node.report import lines

    for line in lines(result, notes):
        say(line)


@contextmanager
def _simulated_node(
    directory: str | None,
    config_path: str | None,
    gpus: int | None,
    gpu_memory_bytes: int | None,
    driver: str | None,
    scheduled: "Sequence[LoadedPod]" = (),
    *,
    no_dmem: bool,
    no_memory_hook: bool,
    no_nri: bool,
    nri_runtime: tuple[str, str] | None,
) -> "Iterator[SimulatedNode]":
    """A node that is up, and goes down whatever happens. Without a directory it gets a temporary one.

    Args:
        scheduled: pods for the stand-in for KAI: what its admission denies is said before anything is started.
    """
    if no_nri and nri_runtime is not None:
        raise click.UsageError(
            "cannot use --nri-runtime with --no-nri: without NRI a runtime introduces itself to nobody"
        )
    from deviceplugin.sim.node import scheduler
    from deviceplugin.sim.node.config import RUNTIME
    from deviceplugin.sim.node.node import SimulatedNode
    from mpsd.config.load import load_config

    config = load_config(config_path) if config_path is not None else None
    # Short: the path of a socket below it holds 107 bytes.
    place = directory or tempfile.mkdtemp(prefix="gf-", dir="/tmp")
    try:
        node = SimulatedNode(
            place,
            config,
            gpus=gpus,
            gpu_memory_bytes=gpu_memory_bytes,
            driver=driver,
            memory_hook=not no_memory_hook,
            dmem=not no_dmem,
            nri=not no_nri,
            runtime=nri_runtime or RUNTIME,
        )
        scheduler.check(scheduled, node.prefix)
        with on_signals(interrupt):
            try:
                node.start()
                yield node
            finally:
                ignore_signals()
                node.close()
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)
