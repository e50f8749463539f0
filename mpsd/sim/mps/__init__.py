"""An emulator of `nvidia-cuda-mps-control` at the level of its command line: real processes and files.

| protocol 2  | protocol 3                       | what it does                                                 |
|-------------|----------------------------------|--------------------------------------------------------------|
| `frontend2` | `frontend3`                      | the binary as it is called: passes commands on               |
| `control2`  | `control3` with `state3`,        | what a daemon remembers and answers; pure                    |
|             | `grammar3`, `table3`             |                                                              |
|             | `config3`                        | the configuration file                                       |
| `daemon2`   | `daemon3`                        | sockets, clients and servers of a daemon, on top of `daemon` |

Shared: `frontend` (the entry, which chooses the protocol), `console`, `daemon` with `loop`, `options` and `peers`,
`daemonize`, `views` (servers and clients as a daemon knows them), `server` (a process that holds GPUs), `faults`,
`logs`, `watch`, `install`; and with the CUDA client `wire` (how these processes talk), `pinnedlimits` and `switches` of
`mpsd.sim`. Front-end, daemon and server import only light parts of the standard library, so that a call costs
milliseconds.

Sources of the behaviour: NVIDIA MPS documentation r615, nvidia-cuda-mps-control(1), public logs and captures of drivers
535 to 615. What no source tells is one named entry in `switches`; what an operator can break is one in `faults`.
"""
