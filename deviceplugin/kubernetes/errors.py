"""What can go wrong with the API server. The class says what a caller can do; none of them stops the plugin."""

import re
from typing import ClassVar

from mpsd.common.errors import TransientError
from mpsd.common.pacing import Failure

MAX_TEXT = 300
"""How much of what the server says is kept."""
MAX_RETRY_AFTER_S = 300.0
_LACKS_RIGHT = re.compile(r'cannot \w+ resource "')


class ApiError(TransientError):
    """Base of them all. `retry_after_s`: how long the server asks to be left alone, None where it doesn't say."""

    failure: ClassVar[Failure] = Failure.BUSY

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class AccessError(ApiError):
    """Nothing says where the server is or who we are. Heals when files or settings are put right."""

    failure = Failure.REFUSED


class UnreachableError(ApiError):
    """No answer: not there, not in time, or cut off."""

    failure = Failure.AWAY


class AbortedError(UnreachableError):
    """We gave up ourselves: something closes."""


class NonsenseError(ApiError):
    """It answered what no API server says."""


class UnauthorizedError(ApiError):
    """401: it doesn't know us, also not with the token as it is now."""

    failure = Failure.REFUSED


class ForbiddenError(ApiError):
    """403: it knows us, and refuses. Mostly, but not always, since we lack a right."""

    failure = Failure.REFUSED

    @property
    def lacks_right(self) -> bool:
        """Whether RBAC refused, not a quota, an admission plugin or a namespace that goes away."""
        return _LACKS_RIGHT.search(str(self)) is not None


class NotFoundError(ApiError):
    """404."""

    failure = Failure.REFUSED


class ConflictError(ApiError):
    """409: an object of that name is there already, or was changed meanwhile."""


class GoneError(ApiError):
    """410: what was asked for is too long ago; begin with a list."""


class BusyError(ApiError):
    """429."""


class ServerError(ApiError):
    """5xx."""


class RejectedError(ApiError):
    """Another refusal, such as 422: the same request will be refused again."""

    failure = Failure.REFUSED


_CLASSES: dict[int, type[ApiError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    429: BusyError,
}


def error_of(code: int, text: str, retry_after_s: float | None = None) -> ApiError:
    """The error of an HTTP status.

    Args:
        text: what was asked and what the server said, fit for a log.
    """
    if 300 <= code < 400:
        return NonsenseError(text)  # an API server redirects nobody, and a token follows no redirect
    fallback = ServerError if code >= 500 else RejectedError
    after_s = None if retry_after_s is None else min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S)
    return _CLASSES.get(code, fallback)(text, retry_after_s=after_s)


def shown(text: str, limit: int = MAX_TEXT) -> str:
    """What a server said, on one line and cut."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
