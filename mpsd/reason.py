"""Why something is as it is."""

import msgspec


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is for code, in CamelCase; `message` for people, and nothing reads it."""

    code: str
    message: str
