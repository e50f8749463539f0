"""Where the sockets of the two processes are, and how long the path of one may be.

No imports: commands of the CLI and the MPS emulator's front end load it, and must start fast.
"""

RUN_ROOT = "/run/gpufrac"
"""The default of mps.runRoot."""
MAX_SOCKET_PATH_BYTES = 107
"""sun_path of sockaddr_un holds 108 bytes with the closing zero (unix(7))."""


def mpsd_socket(run_root: str) -> str:
    """mpsd's local API."""
    return f"{run_root}/mpsd.sock"


def plugin_socket(run_root: str) -> str:
    """The plugin's local API."""
    return f"{run_root}/plugin.sock"
