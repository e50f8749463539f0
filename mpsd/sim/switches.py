"""Behaviour of the control daemon that no published source settles, by name: hardware corrects it in one place.

A file `mps-switches/<name>` in the simulation directory overrides the default; it is read when used.

Where a choice had to be made, the default is the one that is harder on the caller. A switch that starts with `3:` is of
protocol 3 alone.

Guessed and without a switch, since a caller must not read them: layouts of ps, device_query, get_device_client_list
(control2), -h and help (frontend2, grammar3), titles and widths of tables other than those of `namespace list` and
`client list` (table3), refusal texts (control3), most log lines of protocol 3 (daemon3).
"""

from mpsd.sim.files import read_text, write_text

AUTO = "auto"

SWITCHES: dict[str, tuple[str, str]] = {
    # name: (default, what is unknown)
    "error-stream": (
        "stderr",
        "stream of texts such as 'Cannot find MPS control daemon process', and of 3's refusals: stdout | stderr",
    ),
    "pid-file-newline": ("yes", "whether the pid file ends with a newline: yes | no"),
    "stale-socket": (
        "reclaim",
        "what a start does with a dead daemon's control socket (sources disagree): reclaim | refuse",
    ),
    "overlong-start-status": ("0", "exit status of -d where the socket path does not fit in 107 bytes"),
    "unknown-flag-status": ("1", "exit status of an unknown flag"),
    "argv-commands": ("no", "whether a command may be given as arguments: yes | no"),
    "foreground-stdin": (
        AUTO,
        "what -f does with its stdin (sources disagree): ignore | commands (its end quits); auto: commands under 3",
    ),
    "sigterm": ("die", "what SIGTERM does to the daemon: die (files stay, servers live on) | quit"),
    "binary-version": (AUTO, "number in the 'binary version' log line and of -v; auto follows the driver"),
    "limit-display": (
        AUTO,
        "how a pinned limit prints: as-set | floor-g; auto: floor-g from driver 595 on (seen there, under protocol 2)",
    ),
    "set-limit-reply": ("", "text after set_default_device_pinned_mem_limit and set_device_pinned_mem_limit"),
    "unset-limit-reply": ("", "text of get_*_device_pinned_mem_limit where none is set"),
    "percentage-range": ("reject", "a thread percentage outside (0, 100]: reject | clamp"),
    "unknown-command-reply": ("Unrecognized command", "text for an unknown command"),
    "bad-argument-reply": ("Invalid argument", "text for a malformed value or a missing word"),
    "bad-server-reply": ("Server not found", "text for a PID that is no server"),
    "bad-client-code": ("1", "number terminate_client prints for a PID that is no client, or was terminated before"),
    "start-server": (
        "starts",
        "start_server where no server is: starts (documented; whether it stays without a client is not) | nothing",
    ),
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
    "old-binary-protocol": (
        "ignore",
        "what a binary older than 615 does with CUDA_MPS_PROTOCOL_VERSION=3: ignore | refuse",
    ),
    "no-daemon-reply-3": ("Cannot connect to the MPS control daemon", "3: text where no daemon runs"),
    "stdin-commands-3": (
        "refuse",
        "3: commands of protocol 2 on the front-end's stdin: refuse | lines (each is `<module> <verb> ...`, or quit)",
    ),
    "unknown-config-key": (
        "refuse",
        "3: an unknown key in the configuration file: refuse to start | ignore | vanish (its server is left out)",
    ),
    "overlong-path-3": (
        "accept",
        "3: a server or namespace whose socket path does not fit: accept (no socket, clients run without MPS) | refuse",
    ),
    "pid-file-3": ("no", "3: whether there is a nvidia-cuda-mps-control.pid: yes | no"),
    "quit-blocks": ("no", "3: whether -q returns when the daemon is gone, or at once: yes | no"),
    "quit-with-clients": ("wait", "3: what -q does while clients are attached: wait | force"),
    "directories-at-exit": (
        "remove",
        "3: directories of servers and namespaces when the daemon quits: remove | stay",
    ),
    "server-start": ("create", "3: when a server's process starts: create | first-client"),
    "server-status-words": (
        "Idle Initializing Ready FAULT",
        "3: status of a server without process, at start, up (documented), after a fatal fault",
    ),
    "server-after-crash": ("restart", "3: a server whose process died after it was up: restart | vanish"),
    "bad-allowed-device": (
        "none",
        "3: what a bad entry after good ones leaves of allowed-devices: none | cut (those before)",
    ),
    "allowed-devices-unset": ("all", "3: what lists print where allowed-devices is not set"),
    "without-context-sharing": (
        "plain",
        "3: a client where contexts are not shared, by default_socket or feature: plain (without MPS) | refuse | share",
    ),
    "memacct-main-socket": (
        "yes",
        "3: a client on the main socket without context sharing is registered for memory accounting: yes | no",
    ),
    "eviction-order": (
        "most-over",
        "3: which of several clients over their soft limits is evicted: most-over | newest",
    ),
    "eviction-retries": (
        "8",
        "3: how often a client that the GPU has no room for asks for an eviction and tries again",
    ),
    "namespace-delete-force": ("stay", "3: clients of a namespace deleted by force: stay | terminate"),
    "namespace-columns": ("5", "3: columns of `namespace list`: 5 (seen on 615) | 7 (documented)"),
    "client-list-layout": (
        "captured",
        "3: rows of `client list`: captured (GPU UUID, `server/namespace (0)`) | documented (ordinal, namespace)",
    ),
    "csv-quotes": ("yes", "3: whether a CSV cell with a comma is quoted: yes | no"),
    "client-terminate-reply": ("", "3: text after client terminate"),
    "client-percentage": (
        "lowers",
        "3: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of a client (sources disagree): lowers | namespace (that one counts)",
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
