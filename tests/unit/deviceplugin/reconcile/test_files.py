"""When it is looked whether somebody else changed our CDI files."""

from deviceplugin.reconcile.files import GUARD_S, PermissionFiles
from tests.world import FakeSpecs, World


class Specs(FakeSpecs):
    """Somebody changes something during a look, of which we are told, if `meanwhile` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.told: list[PermissionFiles] = []

    def is_off(self) -> bool:
        self.looks += 1
        while self.told:
            self.told.pop().guard()
        return False


def test_no_word_of_a_change_is_lost_during_a_look(world: World) -> None:
    now_s, specs = [0.0], Specs()
    files = PermissionFiles(world.broker, specs, monotonic=lambda: now_s[0])
    assert not files.are_off()
    assert not files.are_off()
    assert specs.looks == 1, "it was looked just now"
    files.guard()
    specs.told.append(files)
    assert not files.are_off()
    assert specs.looks == 2
    assert not files.are_off()
    assert specs.looks == 3, "what was told during the look may have been missed by it"
    assert not files.are_off()
    now_s[0] += GUARD_S
    assert not files.are_off()
    assert specs.looks == 4
