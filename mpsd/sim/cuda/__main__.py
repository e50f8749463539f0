"""`python -m mpsd.sim.cuda`: see `program`."""

from mpsd.sim.cuda.program import main

raise SystemExit(main())
