"""An emulator of `nvidia-cuda-mps-control`, protocol 2, at the level of its command line: real processes and files.

Front-end, daemon and server import only light parts of the standard library, so that a call costs milliseconds.
Sources of the behaviour: NVIDIA MPS documentation r615, nvidia-cuda-mps-control(1), public logs of drivers 535 to 595.
What no source tells is one named entry in `switches`; what an operator can break is one named entry in `faults`.
"""
