"""Dead children are waited for: those we started by whoever started them, those that we inherit by us."""

import subprocess
import sys

from tests.waiting import WAIT_S

AS_FIRST_PROCESS = """
import ctypes, os, subprocess
from mpsd.common import processes
from mpsd.daemon import children, process
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans below are ours, as those of PID 1
children.inherits = lambda: True
for _ in range(3):
    parent = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
    orphan = process.identify(int(parent.stdout))
    assert processes.parent(orphan.pid) == os.getpid()
    assert process.kill_and_wait(lambda: [orphan], 20.0) == []
    assert processes.parent(orphan.pid) is None, "a zombie is left"
with children.started(["true"]) as child:
    while process.is_alive(process.identify(child.pid)):
        pass
    assert children.reap() == []  # it is waited for by who started it
    assert child.wait() == 0
print("fine")
"""


def test_a_cycle_of_daemons_leaves_no_zombie_where_mpsd_inherits_orphans() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_FIRST_PROCESS], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
