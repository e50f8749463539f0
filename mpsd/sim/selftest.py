"""The self-test's own cgroup on a simulated node."""

from mpsd.sim.driver import SimulatedDriver


class SimulatedCgroup:
    """Directly below the root of the simulated tree."""

    def __init__(self, simulation: str, name: str) -> None:
        self._driver, self._name = SimulatedDriver(simulation), name
        self.directory = f"{self._driver.cgroups.root}/{name}"

    def make(self) -> None:
        """One that is there already stays."""
        self._driver.make_cgroup(self._name)

    def add(self, pid: int) -> None:
        """Moves a process into it."""
        self._driver.cgroups.add(self.directory, pid)

    def remove(self) -> None:
        """None is fine."""
        self._driver.cgroups.remove(self.directory)
