"""A share pod that waits is explained in its events, by a real plugin against a stub API server."""

from pathlib import Path

from deviceplugin.status.podevents import WAITING
from tests.apiserver import StubApiServer
from tests.e2e.mpsdnode import end
from tests.e2e.pluginnode import SMALL, plugin_node
from tests.waiting import WAIT_S


def test_a_pod_that_waits_for_mpsd_is_told_so(short_tmp: Path) -> None:
    server = StubApiServer(["n1"])
    server.start()
    (short_tmp / "kubeconfig").write_text(server.kubeconfig())
    more = f"kubernetes: {{access: {short_tmp}/kubeconfig, nodeName: n1}}"
    try:
        with plugin_node(short_tmp, more=more) as node:
            node.kubelet.start()
            mpsd = node.mpsd.start()
            node.mpsd.until_ready()
            node.start_plugin()
            node.until(lambda: node.allocatable(SMALL) > 0)
            end(mpsd)
            pod = node.admit("web-0")
            server.add_pod("default", "web-0", node="n1", uid=pod.uid)

            def told() -> list[str]:
                mine = [event for event in server.events() if event["involvedObject"]["uid"] == pod.uid]
                return [event["message"] for event in mine if event["reason"] == WAITING]

            assert server.wait(lambda: bool(told()), WAIT_S), node.log()
            (said,) = told()
            assert said.startswith("main: its container can't (re)start now")
            assert "mpsd does not answer" in said
            assert "unresolvable CDI devices" in said
            assert "CDI device injection failed" in pod.container().message
    finally:
        server.close()
