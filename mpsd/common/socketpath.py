"""How long the path of a unix socket may be. No imports: what the MPS emulator's front end loads must start fast."""

MAX_SOCKET_PATH_BYTES = 107
"""sun_path of sockaddr_un holds 108 bytes with the closing zero (unix(7))."""
