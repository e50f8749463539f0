import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.host import reexec
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("code", "last", "due"),
    [
        (18, None, True),
        (18, 1000.0, False),
        (18, 700.1, False),
        (18, 700.0, True),
        (18, 1001.0, True),  # the clock was set back: better once too often than never
        (15, None, False),
        (0, None, False),
    ],
)
def test_when_to_begin_anew(code: int, last: float | None, due: bool) -> None:
    assert reexec.reexec_due(code, last, 1000.0) == due


@pytest.mark.parametrize(
    ("environ", "last"), [({}, None), ({reexec.VARIABLE: "12"}, 12.0), ({reexec.VARIABLE: "soon"}, None)]
)
def test_when_it_began_anew_last(environ: dict[str, str], last: float | None) -> None:
    assert reexec.last_reexec(environ) == last


PROGRAM = """
import os, signal, sys, threading
from mpsd.host import reexec
print(os.getpid(), sys.argv[1:], sys.flags.no_site, reexec.last_reexec(os.environ), flush=True)
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), os.path.exists("/proc/self/fd/77"), flush=True)
print(os.environ.pop("NOTIFY_SOCKET"), flush=True)
if reexec.reexec_due(18, reexec.last_reexec(os.environ), 100.0):
    os.dup2(0, 77, inheritable=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    thread = threading.Thread(target=reexec.reexec, args=(100.0, {"NOTIFY_SOCKET": "@x"}))
    thread.start()
    thread.join()
"""


def test_the_same_command_line_in_the_same_process_without_what_it_held(short_tmp: Path) -> None:
    (short_tmp / "program.py").write_text(PROGRAM)
    root = str(Path(reexec.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-S", "program.py", "a b", "--c"],
        cwd=short_tmp,
        env={**os.environ, "PYTHONPATH": root, "NOTIFY_SOCKET": "@x"},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        said = child.communicate(timeout=WAIT_S)[0].splitlines()
    first = f"{child.pid} ['a b', '--c'] 1"
    assert said == [f"{first} None", "[] False", "@x", f"{first} 100.0", "[] False", "@x"]
    assert child.returncode == 0
