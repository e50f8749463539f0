"""What values can be that come back from disk or over a socket: checked wherever a struct that names them is decoded.

They are as wide as the world may be, and never wider than what is safe to use: names become paths, sizes limits.
"""

from typing import Annotated

from msgspec import Meta

from mpsd.common.quantity import MAX_VALUE

Bytes = Annotated[int, Meta(ge=0, le=MAX_VALUE)]
LimitBytes = Annotated[int, Meta(ge=1, le=MAX_VALUE)]
"""A limit of nothing would be none."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
Percent = Annotated[int, Meta(ge=1, le=100)]
Pid = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""0: none. Below that a signal would go to groups of processes."""
MpsProtocol = Annotated[int, Meta(ge=2, le=3)]
UnixSeconds = Annotated[float, Meta(ge=0, le=253402300799)]
"""Up to the last second of the year 9999."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]{0,94}\Z")]
"""A GPU's UUID, the name of a group, a key: a plain file name."""
NameOrNone = Annotated[str, Meta(pattern=r"^(?:[A-Za-z0-9][-A-Za-z0-9_.]{0,94})?\Z")]
Line = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z")]
"""Text on one line that leaves a terminal alone."""
Path = Annotated[str, Meta(max_length=4096, pattern=r"^/[^\x00-\x1f\x7f]*\Z")]
"""Absolute."""
