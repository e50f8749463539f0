"""Events on the node."""

from msgspec import structs

from deviceplugin.kubernetes.model import NoEvents
from deviceplugin.status.nodeevents import WEDGED, WedgeNews
from mpsd.localapi.snapshot import Snapshot
from tests.builders import info, ready, snapshot, status


class Told(NoEvents):
    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def node(self, kind: str, reason: str, message: str) -> None:
        self.events.append((kind, reason, message))


def seen(*wedged: int, reason: str = "wedged, no answer within 5 s", group: str = "") -> Snapshot:
    gpus = []
    for index in range(3):
        gpu = info(index)
        name = group or gpu.uuid
        daemon = structs.replace(ready(), name=name, wedged=index in wedged, reason=reason if index in wedged else "")
        gpus.append(status(gpu, group=name, daemon=daemon))
    return snapshot(*gpus)


def test_each_time_that_a_daemon_is_found_wedged_is_told_once() -> None:
    told = Told()
    news = WedgeNews(told)
    news.observe(seen())
    news.observe(seen(1))
    news.observe(seen(1, reason="wedged, no answer within 5 s, 2nd time"))
    assert told.events == [("Warning", WEDGED, "GPU 1: its MPS daemon is wedged: no answer within 5 s")]
    news.observe(seen(1, 2))
    news.observe(seen())
    news.observe(seen(1))
    assert [message[:5] for _, _, message in told.events] == ["GPU 1", "GPU 2", "GPU 1"]


def test_a_daemon_of_several_gpus_is_one() -> None:
    told = Told()
    WedgeNews(told).observe(seen(0, 1, 2, group="all"))
    assert [message for _, _, message in told.events] == ["GPU 0, 1, 2: its MPS daemon is wedged: no answer within 5 s"]


def test_gpus_without_a_daemon_are_none() -> None:
    told = Told()
    WedgeNews(told).observe(snapshot(status(info(0), daemon=None)))
    assert told.events == []
