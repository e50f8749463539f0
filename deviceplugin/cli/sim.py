"""`gpufrac sim ...`: a simulated node, without GPU, cluster or root."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deviceplugin.cli.output import Failure, failures, output_option, print_json
from mpsd.errors import ConfigError

if TYPE_CHECKING:
    from deviceplugin.sim.manifests import LoadedPod, Note
    from deviceplugin.sim.node import SimulatedNode

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A Kubernetes quantity, in bytes."""

    name = "size"

    def __init__(self, minimum: str) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from mpsd.quantity import QuantityError, parse_bytes

        if isinstance(value, int):
            return value
        try:
            size_bytes = parse_bytes(value)
        except QuantityError as error:
            self.fail(str(error), param, ctx)
        if size_bytes < parse_bytes(self._minimum):
            self.fail(f"cannot use {value}: must be at least {self._minimum}, such as 80Gi", param, ctx)
        return size_bytes


class DriverVersion(click.ParamType[str]):
    """Such as 580.95.05."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        parts = str(value).split(".")
        if not (2 <= len(parts) <= 3 and all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts)):
            self.fail(f"cannot use {value!r}: must be a driver version such as 580.95.05", param, ctx)
        return str(value)


def node_options(command: F) -> F:
    """What kind of node to simulate."""
    for option in (
        click.option("--driver", type=DriverVersion(), metavar="VERSION", help="Driver version. Default: 580.95.05."),
        click.option("--gpu-memory", type=Size("1Mi"), metavar="SIZE", help="Memory of each GPU. Default: 80Gi."),
        click.option(
            "--gpus",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Number of GPUs. Default: 1, or as many as the config names by index.",
        ),
        click.option(
            "--config",
            "config_path",
            metavar="FILE",
            help="The config to try; its paths and backend are replaced. Default: gpufrac.dev/gpu-8gi, gpu-16gi and "
            "memory-gib, all sm-sharing.",
        ),
    ):
        command = option(command)
    return command


directory_option = click.option(
    "-d", "--directory", required=True, metavar="DIR", help="The directory of the node.", type=click.Path()
)


@click.group()
def sim() -> None:
    """A simulated node: no GPU, no cluster, no root. Shows what pods would get, and why one would be refused."""


@sim.command(epilog="Example: gpufrac sim run --config node.yaml --gpus 2 pod.yaml")
@node_options
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
) -> None:
    """Bring up a simulated node, admit the pods of the manifests in order as the kubelet would, and take it down.

    Pods, Lists, Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs and CronJobs are read; `-` is standard input.
    Exit codes: 0 all pods admitted, 1 some refused, 2 a manifest or the config is not usable.
    """
    from deviceplugin.sim import report
    from deviceplugin.sim.manifests import LoadedPod, Note, load_all

    found = load_all(manifests)
    _need_pods(found)
    with _simulated_node(None, config_path, gpus, gpu_memory, driver) as node:
        result = node.admit([item for item in found if isinstance(item, LoadedPod)])
        notes = [str(item) for item in found if isinstance(item, Note)]
    _print(result, notes, output)
    sys.exit(0 if report.all_well(result) else 1)


@sim.command(epilog="Example: gpufrac sim up --directory /tmp/node --gpus 2")
@directory_option
@node_options
@failures
def up(directory: str, config_path: str | None, gpus: int | None, gpu_memory: int | None, driver: str | None) -> None:
    """Keep a simulated node running in the foreground, until Ctrl-C or SIGTERM.

    `gpufrac sim admit|delete|restart-kubelet|client -d DIR` act on it; `gpufrac status --run-root DIR/run` and
    other commands look at it.
    """
    from deviceplugin.sim import control

    directory = os.path.abspath(directory)
    stop = threading.Event()
    with _simulated_node(directory, config_path, gpus, gpu_memory, driver) as node:
        server = control.server(node)
        server.start()
        try:
            with _on_signals(stop.set):
                click.echo(f"The simulated node is up in {directory}. Stop it with Ctrl-C.")
                click.echo(f"Next: gpufrac sim admit -d {directory} pod.yaml")
                while not stop.wait(0.5):
                    node.check()
        finally:
            server.close()


@sim.command(epilog="Example: gpufrac sim admit -d /tmp/node pod.yaml")
@directory_option
@output_option
@click.argument("manifests", nargs=-1, required=True, metavar="POD.yaml...")
@failures
def admit(directory: str, output: str, manifests: tuple[str, ...]) -> None:
    """Admit the pods of manifests on a node that is up. Exit codes as for `sim run`."""
    from deviceplugin.sim import report
    from deviceplugin.sim.control import ControlClient
    from deviceplugin.sim.manifests import parse_all, read_manifest

    texts = [("<stdin>" if path == "-" else path, read_manifest(path)) for path in manifests]
    _need_pods(parse_all(texts))  # the node would say the same, but bytes that are no text don't reach it
    admitted = ControlClient(os.path.abspath(directory)).admit(texts)
    _print(admitted.report, list(admitted.notes), output)
    sys.exit(0 if report.all_well(admitted.report) else 1)


@sim.command(epilog="Example: gpufrac sim delete -d /tmp/node web-0")
@directory_option
@click.option("--force", is_flag=True, help="Forget the pods at once; their processes run on until the node goes down.")
@click.argument("pods", nargs=-1, required=True, metavar="[NAMESPACE/]POD|POD.yaml...")
@failures
def delete(directory: str, *, force: bool, pods: tuple[str, ...]) -> None:
    """Delete pods by name, or those of manifests."""
    from deviceplugin.sim.control import ControlClient
    from deviceplugin.sim.manifests import LoadedPod, load_manifests

    names: list[tuple[str, str]] = []
    for pod in pods:
        if pod == "-" or pod.endswith((".yaml", ".yml", ".json")):
            names += [
                (item.pod.namespace, item.pod.name) for item in load_manifests(pod) if isinstance(item, LoadedPod)
            ]
        else:
            namespace, _, name = pod.rpartition("/")
            names.append((namespace or "default", name))
    names = list(dict.fromkeys(names))
    ControlClient(os.path.abspath(directory)).delete(names, force=force)
    for namespace, name in names:
        click.echo(f'pod "{name}" deleted from namespace "{namespace}"')


@sim.command("restart-kubelet", epilog="Example: gpufrac sim restart-kubelet -d /tmp/node")
@directory_option
@failures
def restart_kubelet(directory: str) -> None:
    """Restart the stub kubelet: it forgets all but its checkpoint, plugins register again, pods are admitted again.

    Exit code 1 when a pod failed for it.
    """
    from deviceplugin.sim.control import ControlClient

    restarted = ControlClient(os.path.abspath(directory)).restart_kubelet()
    for name, message in restarted.failed.items():
        click.echo(f"{name}: Failed: {message}")
    click.echo(f"The kubelet restarted with {restarted.pods} pods, {len(restarted.failed)} of them failed for it.")
    sys.exit(1 if restarted.failed else 0)


@sim.command(epilog="Example: gpufrac sim client -d /tmp/node web-0/main --allocate 9Gi")
@directory_option
@click.option("--allocate", "size_bytes", type=Size("1"), metavar="SIZE", help="Device memory to allocate, e.g. 9Gi.")
@click.option("--device", type=int, default=0, show_default=True, help="Ordinal of the GPU as the container sees it.")
@click.option("--hold", is_flag=True, help="Keep the memory until standard input ends, SIGTERM, or trouble.")
@click.option("--info", is_flag=True, help="First print what CUDA found, as one line of JSON.")
@click.argument("target", metavar="[NAMESPACE/]POD/CONTAINER")
@failures
def client(directory: str, size_bytes: int | None, device: int, target: str, *, hold: bool, info: bool) -> None:
    """Run a simulated CUDA process with a container's environment.

    Prints the bytes granted, or the CUDA error such as CUDA_ERROR_OUT_OF_MEMORY with exit code 1.
    """
    from deviceplugin.sim.control import ControlClient

    parts = target.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise click.BadParameter(f"cannot use {target!r}: write POD/CONTAINER or NAMESPACE/POD/CONTAINER")
    namespace, pod, container = parts if len(parts) == 3 else ("default", *parts)
    environment = ControlClient(os.path.abspath(directory)).client_environment(namespace, pod, container)
    import mpsd

    # The pod's environment must not reach our interpreter (-E), and our package need not be installed in it.
    root = os.path.dirname(os.path.dirname(os.path.abspath(mpsd.__file__)))
    code = f"import sys; sys.path.append({root!r}); from mpsd.sim.cuda import main; sys.exit(main())"
    arguments = [sys.executable, "-E", "-c", code, "--device", str(device)]
    arguments += ["--allocate", str(size_bytes)] if size_bytes is not None else []
    arguments += ["--hold"] if hold else []
    arguments += ["--info"] if info else []
    sys.stdout.flush()
    try:
        os.execve(sys.executable, arguments, environment)  # noqa: S606 - our interpreter, a list of arguments
    except (OSError, ValueError) as error:
        raise Failure(f"cannot run the simulated client: {error}") from error


def _need_pods(found: "Sequence[LoadedPod | Note]") -> None:
    """Raises ConfigError where manifests lead to no pod at all."""
    from deviceplugin.sim.manifests import LoadedPod

    if not any(isinstance(item, LoadedPod) for item in found):
        raise ConfigError("\n".join(["cannot find a pod in the manifests", *map(str, found)]))


def _print(result: dict[str, Any], notes: list[str], output: str) -> None:
    if output == "json":
        print_json({**result, "notes": notes})
        return
    from deviceplugin.sim.report import lines

    for line in lines(result, notes):
        click.echo(line)


@contextmanager
def _simulated_node(
    directory: str | None, config_path: str | None, gpus: int | None, gpu_memory_bytes: int | None, driver: str | None
) -> "Iterator[SimulatedNode]":
    """A node that is up, and goes down whatever happens. Without a directory it gets a temporary one."""
    from deviceplugin.sim.node import SimulatedNode
    from mpsd.config.load import load_config

    config = load_config(config_path) if config_path is not None else None
    # Short: the path of a socket below it holds 107 bytes.
    place = directory or tempfile.mkdtemp(prefix="gf-", dir="/tmp")
    try:
        node = SimulatedNode(place, config, gpus=gpus, gpu_memory_bytes=gpu_memory_bytes, driver=driver)
        with _on_signals(_interrupt):
            try:
                node.start()
                yield node
            finally:
                _ignore_signals()
                node.close()
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` for Ctrl-C, SIGTERM and SIGHUP meanwhile."""
    before = {number: signal.signal(number, lambda *_: action()) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """The way down is not interrupted: it would leave processes behind."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
