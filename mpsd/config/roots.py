"""Directories of the config that must not lie in one another (pure)."""

from mpsd.config.model import NodeConfig

_ELSEWHERE = {("mps.logRoot", "mps.runRoot")}
"""Judged with the section that both are in."""


def overlaps(config: NodeConfig) -> list[tuple[str, str, str]]:
    """For each directory that is where it must not be: its key, the key of the other one, and the rule."""
    cdi, run, state, kubelet = config.cdi.directory, config.mps.run_root, config.state_root, config.kubelet_root
    roots = {
        "mps.runRoot": run,
        "mps.logRoot": config.mps.log_root,
        "stateRoot": state,
        "cdi.directory": cdi,
        "kubelet.root": kubelet,
        "kubelet.devicePlugins": config.kubelet_device_plugins,
    }
    kept = {  # directory -> whose it is, and why nothing else may be there
        cdi: ("cdi.directory", "container runtimes read what is in it"),
        f"{run}/mps": ("mps.runRoot", "tenants see what is below its mps/"),
        f"{state}/plugin": ("stateRoot", "its plugin/ is for records alone, and closed to all users but root"),
        config.kubelet_device_plugins: ("kubelet.devicePlugins", "it is the kubelet's"),
        **{
            f"{kubelet}/{name}": ("kubelet.root", f"its {name}/ is the kubelet's") for name in ("pod-resources", "pods")
        },
    }
    return [
        (key, owner, f"must not lie in {owner} ({place}): {why}")
        for key, path in roots.items()
        for place, (owner, why) in kept.items()
        if key != owner and (key, owner) not in _ELSEWHERE and f"{_real(path)}/".startswith(f"{_real(place)}/")
    ]


def _real(path: str) -> str:
    """Every system with /run has /var/run as a link to it."""
    return path.removeprefix("/var") if f"{path}/".startswith("/var/run/") else path
