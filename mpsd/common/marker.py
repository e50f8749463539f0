"""The variable that tells whose a process is: every container that was granted something carries it."""

from typing import Final

MARKER: Final = "GPUFRAC_ALLOCATION"
"""Set in every container that holds an allocation of ours; its value is the allocation's key."""
