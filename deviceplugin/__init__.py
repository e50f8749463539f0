"""The plugin process, its command line, and the simulated node."""

import os

# gRPC's core writes lines of its own to standard error, past every logger, some with NUL bytes. What they are about
# reaches us as errors of calls. Read once, when grpc is loaded: so before anything here can import it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
