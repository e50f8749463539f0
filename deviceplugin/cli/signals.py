"""What commands that have to tidy up do on Ctrl-C, SIGTERM and SIGHUP."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` for each meanwhile."""
    before = {number: signal.signal(number, lambda *_: action()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """The action that ends a command; tidying up is not interrupted again."""
    ignore_signals()
    raise KeyboardInterrupt


def ignore_signals() -> None:
    """The way down is not interrupted: it would leave things behind."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
