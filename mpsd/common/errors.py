"""The errors of gpufrac. The class says what a caller can do; facts are in the text, which opens with "cannot"."""


class GpufracError(Exception):
    """Base of every error we raise on purpose. Its text is fit for an operator: no stack trace is shown for it."""


class ConfigError(GpufracError):
    """The configuration or an argument is wrong: stop and tell the user. Exit code 2."""


class TransientError(GpufracError):
    """An effect failed in a way that may heal: retry with backoff."""


class NotReachableError(TransientError):
    """A local process of ours does not answer on its socket. Exit code 3."""


class ProtocolError(GpufracError):
    """A peer spoke nonsense (kubelet, control daemon, local client)."""
