"""The runtime's side of NRI with one plugin behind it that does what a test says."""

from collections.abc import Callable

from deviceplugin.nri.model import Adjustment, Container, Pod
from deviceplugin.sim.runtime.nri import NriError
from deviceplugin.sim.runtime.sandboxes import Inventory, Nri


class ScriptedNri:
    """Everything it is asked is recorded: (what, pod or container name, container ID)."""

    def __init__(self) -> None:
        self.plugins: tuple[str, ...] = ("50-scripted",)
        self.calls: list[tuple[str, str, str]] = []
        self.created: list[tuple[Pod, Container]] = []
        self.starting: list[Container] = []
        self.adjustment = Adjustment()
        self.refusals: dict[str, str] = {}
        """What is asked -> why it is refused."""
        self.on_start: Callable[[Container], None] = lambda container: None
        self.inventory: Callable[[], Inventory] = lambda: ((), ())
        self.serving = False

    def factory(self, inventory: Callable[[], Inventory]) -> Nri:
        self.inventory = inventory
        return self

    @property
    def asked(self) -> list[str]:
        """What was asked, and of whom."""
        return [f"{what} {name}" for what, name, _ in self.calls]

    def start(self) -> None:
        self.serving = True

    def close(self) -> None:
        self.serving = False

    def wait_plugin(self, timeout_s: float) -> bool:
        return bool(self.plugins)

    def run_pod(self, pod: Pod) -> None:
        self._ask("run", pod)

    def stop_pod(self, pod: Pod) -> None:
        self._ask("stop", pod)

    def remove_pod(self, pod: Pod) -> None:
        self._ask("remove-pod", pod)

    def create_container(self, pod: Pod, container: Container) -> Adjustment:
        self.created.append((pod, container))
        self._ask("create", container)
        return self.adjustment

    def start_container(self, pod: Pod, container: Container) -> None:
        self.starting.append(container)
        self.on_start(container)
        self._ask("start", container)

    def stop_container(self, pod: Pod, container: Container) -> None:
        self._ask("stop-container", container)

    def remove_container(self, pod: Pod, container: Container) -> None:
        self._ask("remove", container)

    def _ask(self, what: str, whom: Pod | Container) -> None:
        self.calls.append((what, whom.name, whom.id))
        if what in self.refusals:
            raise NriError(self.refusals[what])
