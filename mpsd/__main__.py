"""`python -m mpsd CONFIG`: mpsd alone, without the command line's imports."""

import sys

from mpsd.app import run

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m mpsd CONFIG")
    sys.exit(run(sys.argv[1]))
