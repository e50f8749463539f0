"""What `gpufrac status` prints: both processes in some lines, and everything that needs attention."""

from importlib.metadata import version

from deviceplugin.annotated.status import AnnotatedStatus
from deviceplugin.cli.faults import domain_lines
from deviceplugin.cli.node import Node, daemons_of, eviction_lines, log_lines
from deviceplugin.cli.output import age, gib, print_json, say, shortened, size, some
from deviceplugin.plan.view import daemon_state
from deviceplugin.selftest import record
from deviceplugin.status.attention import attention
from deviceplugin.status.reasons import AttentionCode
from mpsd.common.errors import GpufracError
from mpsd.common.reason import Reason, code_of, message_of


def show(node: Node, output: str) -> None:
    """Prints all of it."""
    driver = node.mpsd.driver_version if node.mpsd else None
    tested, failed = _tested(node, driver)
    lines = _attention(node, failed)
    if output == "json":
        print_json(
            {
                "mpsd": {"up": node.mpsd is not None, **_two_fields(node.mpsd_error), "snapshot": node.mpsd},
                "plugin": {"up": node.plugin is not None, **_two_fields(node.plugin_error), "status": node.plugin},
                "selftest": record.document(tested) if tested else None,
                "attention": [line.message for line in lines],
                "attentionCodes": [line.code for line in lines],
            }
        )
        return
    for name, value in overview(node):
        say(f"{name + ':':13} {value}")
    if node.plugin:
        unknown = message_of(failed) if tested is None else ""
        say(f"{'selftest:':13} {unknown or record.line(tested, driver, version('gpufrac'))}")
    say()
    if lines:
        say(f"Needs attention ({len(lines)}):")
        for reason in lines:
            say(f"  ! {shortened(reason.message)}")
    else:
        say("Nothing needs attention.")
    for line in (*eviction_lines(node.mpsd), *log_lines(node.mpsd)):
        say(line)


def needs_attention(node: Node) -> list[Reason]:
    """What an operator should look at, most serious first."""
    return _attention(node, _tested(node, node.mpsd.driver_version if node.mpsd else None)[1])


def _attention(node: Node, failed_test: Reason | None) -> list[Reason]:
    return attention(node.mpsd, node.plugin, (node.mpsd_error, node.plugin_error, failed_test))


def _two_fields(error: Reason | None) -> dict[str, str]:
    return {"error": message_of(error), "errorCode": code_of(error)}


def overview(node: Node) -> list[tuple[str, str]]:
    """The first lines of status (pure)."""
    snapshot, plugin = node.mpsd, node.plugin
    lines = [("mpsd", _up(snapshot.started_unix_s) if snapshot else "DOWN"), ("plugin", "DOWN")]
    if snapshot:
        daemons = daemons_of(snapshot)
        ready = sum(1 for daemon, _ in daemons if daemon_state(daemon) == "ready")
        protocols = sorted({f"v{daemon.protocol}" for daemon, _ in daemons})
        well = sum(1 for gpu in snapshot.gpus if gpu.health == "ok")
        drained = sum(1 for gpu in plugin.gpus if gpu.drained) if plugin else 0
        excluded = sum(1 for gpu in snapshot.gpus if gpu.excluded)
        counts = ((drained, "drained"), (excluded, "excluded by the config"))
        aside = [f"{count} {what}" for count, what in counts if count]
        lines += [
            ("driver", f"{snapshot.driver_version or 'unknown'} ({snapshot.backend})"),
            ("GPUs", ", ".join([f"{len(snapshot.gpus)}, {well} ok", *aside])),
            ("MPS daemons", f"{ready} ready of {len(daemons)}{f', MPS {some(protocols)}' if protocols else ''}"),
        ]
    if plugin:
        lines[1] = ("plugin", f"{_up(plugin.started_unix_s)}, pid {plugin.pid}")
        registered = sum(1 for resource in plugin.resources if resource.registration == "registered")
        usable = sum(max(0, gpu.usable_bytes) for gpu in plugin.gpus if gpu.shared or gpu.granted_bytes)
        granted = sum(gpu.granted_bytes for gpu in plugin.gpus)
        lines += [
            ("resources", f"{len(plugin.resources)}, {registered} registered at the kubelet"),
            ("allocations", f"{len(plugin.allocations)}, {gib(granted)} of {gib(usable)}Gi usable granted"),
            ("GPU devices", plugin.gpu_devices),
            ("hard limits", plugin.hard_limits),
        ]
        if plugin.annotated is not None:
            lines.append(("annotations", annotated_line(plugin.annotated)))
        lines += domain_lines(plugin)
        over = [gpu for gpu in plugin.gpus if gpu.limit_bytes > gpu.usable_bytes]
        if over:
            sums = (f"{size(gpu.limit_bytes)} of {size(gpu.usable_bytes)} on GPU {gpu.index}" for gpu in over)
            lines.append(("burst", f"limits add up to {', '.join(sums)}"))
    return lines


def annotated_line(annotated: AnnotatedStatus) -> str:
    """Annotated pods in one line (pure)."""
    at = f"at {annotated.runtime}" if annotated.runtime else "at no container runtime"
    ready = {"True": "ready", "False": "NOT ready"}.get(annotated.readiness, annotated.readiness)
    alone = f"; unguarded while gpufrac is away: {annotated.unguarded}" if annotated.unguarded else ""
    return f"{ready}, {at}, device lists believed: {annotated.trust}{alone}"


def _tested(node: Node, driver: str | None) -> tuple[record.Record | None, Reason | None]:
    """The last self-test, and what must be known of it."""
    if node.plugin is None or not node.plugin.state_root:
        return None, None
    try:
        tested = record.load(node.plugin.state_root)
    except GpufracError as error:
        return None, Reason(AttentionCode.SELF_TEST_NOT_READ, str(error))
    alarm = record.alarm(tested, driver)
    return tested, Reason(AttentionCode.SELF_TEST_FAILED, alarm) if alarm else None


def _up(started_unix_s: float) -> str:
    return f"up {age(started_unix_s)}" if started_unix_s else "up"
