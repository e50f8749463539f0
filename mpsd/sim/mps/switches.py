"""Behaviour of the control daemon that no published source settles, by name: hardware corrects it in one place.

A file `mps-switches/<name>` in the simulation directory overrides the default; it is read when used.

Where a choice had to be made, the default is the one that is harder on the caller.
"""

from mpsd.sim.files import read_text, write_text

AUTO = "auto"

SWITCHES: dict[str, tuple[str, str]] = {
    # name: (default, what is unknown)
    "error-stream": (
        "stderr",
        "stream of 'Cannot find MPS control daemon process' and 'An instance ...': stdout | stderr",
    ),
    "pid-file-newline": ("yes", "whether the pid file ends with a newline: yes | no"),
    "stale-socket": (
        "reclaim",
        "what a start does with a dead daemon's control socket (sources disagree): reclaim | refuse",
    ),
    "overlong-start-status": ("0", "exit status of -d where the socket path does not fit in 107 bytes"),
    "unknown-flag-status": ("1", "exit status of an unknown flag"),
    "argv-commands": ("no", "whether a command may be given as arguments: yes | no"),
    "foreground-stdin": ("ignore", "what -f does with its stdin (sources disagree): ignore | commands"),
    "sigterm": ("die", "what SIGTERM does to the daemon: die (files stay, servers live on) | quit"),
    "binary-version": (AUTO, "number in the 'binary version' log line and of -v; auto follows the driver"),
    "limit-display": (
        AUTO,
        "how a pinned limit prints: as-set | floor-g; auto: floor-g from driver 595 on (seen there)",
    ),
    "set-limit-reply": ("", "text after set_default_device_pinned_mem_limit and set_device_pinned_mem_limit"),
    "unset-limit-reply": ("", "text of get_*_device_pinned_mem_limit where none is set"),
    "percentage-range": ("reject", "a thread percentage outside (0, 100]: reject | clamp"),
    "unknown-command-reply": ("Unrecognized command", "text for an unknown command"),
    "bad-argument-reply": ("Invalid argument", "text for a malformed value or a missing word"),
    "bad-server-reply": ("Server not found", "text for a PID that is no server"),
    "bad-client-code": ("1", "number terminate_client prints for a PID that is no client, or was terminated before"),
    "start-server-reply": ("", "text after start_server"),
    "shutdown-server-reply": ("", "text after shutdown_server; it comes at once, the server ends later"),
    "other-uid-blocks": ("yes", "single-user: a waiting client of another UID also holds up later ones: yes | no"),
    "server-start-attempts": (
        "3",
        "failed server starts before waiting clients get MPS_SERVER_NOT_READY; 0: no end (a tight loop)",
    ),
    "server-after-daemon-death": ("stay", "a server whose daemon was killed: stay | until-clients-leave | exit"),
    "max-clients": ("48", "clients of one server (48 documented for Volta and newer, newer drivers up to 60)"),
    "server-context-bytes": ("0", "memory of the server's own context, per GPU"),
    "client-context-bytes": ("0", "memory of a client's context; it counts against the client's limit"),
    "malformed-limit": (
        "drop-all",
        "a malformed entry in a client's CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: drop-all | ignore",
    ),
    "invisible-entry": (
        "drop-all",
        "an entry for an invisible GPU also drops the daemon's limit (measured on r615): drop-all | drop-own",
    ),
    "fix-driver": ("625", "first driver major where a client killed with work in flight leaves the others alone"),
}


def read_switch(simulation: str, name: str) -> str:
    """The value of a switch. Raises KeyError for a name that is not in the table."""
    default = SWITCHES[name][0]
    text = read_text(f"{simulation}/mps-switches/{name}")
    return default if text is None else text.strip()


def set_switch(simulation: str, name: str, value: str) -> None:
    """Overrides a switch for one simulation. Raises KeyError for a name that is not in the table."""
    SWITCHES[name]
    write_text(f"{simulation}/mps-switches/{name}", value + "\n")


def binary_version(simulation: str, driver_version: str) -> str:
    """E.g. `13000`: the CUDA version a driver release came with, as its control daemon logs it."""
    value = read_switch(simulation, "binary-version")
    if value != AUTO:
        return value
    releases = (
        (615, 13040),
        (610, 13030),
        (595, 13020),
        (590, 13010),
        (580, 13000),
        (570, 12080),
        (550, 12040),
        (535, 12020),
    )
    return str(next((cuda for driver, cuda in releases if major(driver_version) >= driver), 12000))


def major(driver_version: str) -> int:
    """Major number of a driver version, 0 where it is none."""
    head = driver_version.split(".", 1)[0]
    return int(head) if head.isdigit() else 0
