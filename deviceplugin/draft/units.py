"""Units for systemd, of both processes (pure).

A unit says in its first line which content we gave it, so that one that somebody edited is told from one of an earlier
version. Options are those of systemd 245 and newer; `systemd-analyze verify` holds the tests to them.
"""

import hashlib
import re
from enum import StrEnum

MPSD, PLUGIN = "gpufrac-mpsd.service", "gpufrac-plugin.service"
NAMES = (MPSD, PLUGIN)
"""In the order in which they start."""

KUBELETS = (
    "kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service "
    "snap.microk8s.daemon-kubelite.service"
)
"""Services that have a kubelet in them. What is not there is no error in `Before=`."""

_HEAD = re.compile(r"# Written by gpufrac \S+; content: (?P<digest>[0-9a-f]{64})\n")

_MPSD = """\
[Unit]
Description=gpufrac: GPUs, and their MPS daemons
After=local-fs.target nvidia-persistenced.service
# Ready means that it serves its socket, not that there are GPUs: a kubelet never waits for a driver.
Before={plugin} {kubelets}
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={program} mpsd --config {config}
Restart=always
RestartSec=2
WatchdogSec=60
# It ends daemons that nobody uses, within 40 s.
TimeoutStopSec=60
# Daemons are in cgroups of their own and live on; where none can be made, this spares them, too.
KillMode=process
Delegate=yes
LimitNOFILE=65536
OOMScoreAdjust=-900
UMask=0022
# No sandbox: NVIDIA's daemons inherit it, and must see the host as containers' runtimes do.

[Install]
WantedBy=multi-user.target
"""

_PLUGIN = """\
[Unit]
Description=gpufrac: the kubelet's device plugin
Wants={mpsd}
After={mpsd}
# Registered within a second of the kubelet's start, before pods of before a reboot are admitted anew.
Before={kubelets}
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={program} plugin --config {config}
Restart=always
RestartSec=1
WatchdogSec=240
TimeoutStopSec=30
LimitNOFILE=65536
OOMScoreAdjust=-900
UMask=0022
# Root, as directories of kubelet and runtime are root's; the two capabilities are for a look at processes of others.
CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH
NoNewPrivileges=yes
ProtectSystem=full
# Where others may define CDI devices of ours, which are set aside.
ReadWritePaths=-/etc/cdi
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6

[Install]
WantedBy=multi-user.target
"""


class Owner(StrEnum):
    """Whose a unit file is, by its content."""

    NOBODY = "it is not there"
    OURS = "it is as gpufrac wrote it"
    EDITED = "gpufrac wrote it, and somebody edited it"
    FOREIGN = "gpufrac did not write it"


def units(program: tuple[str, ...], config: str, version: str) -> dict[str, str]:
    """Both units by file name.

    Args:
        program: the command that runs gpufrac, its first word an absolute path.
        config: absolute path of the node's config.
    """
    values = {
        "program": " ".join(quoted(word) for word in program),
        "config": quoted(config),
        "mpsd": MPSD,
        "plugin": PLUGIN,
        "kubelets": KUBELETS,
    }
    bodies = {MPSD: _MPSD.format(**values), PLUGIN: _PLUGIN.format(**values)}
    return {
        name: f"# Written by gpufrac {version}; content: {_digest(body)}\n# To change it: systemctl edit {name}\n{body}"
        for name, body in bodies.items()
    }


def owner(text: str | None) -> Owner:
    """Whose a file with this text is; None: there is none."""
    if text is None:
        return Owner.NOBODY
    head = _HEAD.match(text)
    if head is None:
        return Owner.FOREIGN
    body = text[head.end() :].partition("\n")[2]
    return Owner.OURS if _digest(body) == head["digest"] else Owner.EDITED


def quoted(word: str) -> str:
    """A word of a command line as systemd.service(5) reads it: specifiers and variables stand for themselves."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if re.search(r"[\s\"'\\;]", word) else escaped


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
