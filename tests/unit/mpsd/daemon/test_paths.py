from mpsd.config.model import MpsConfig, NamespaceMount
from mpsd.daemon.paths import (
    base_environment,
    control_binary,
    daemon_dirs,
    namespace_socket,
    socket_objection,
)
from tests.mpspaths import mount_directory

UUID = "GPU-51000000-0000-4000-8000-000000000000"


def test_directories_fit_a_socket_path() -> None:
    dirs = daemon_dirs(MpsConfig(), UUID)
    assert dirs.control_socket == f"/run/gpufrac/mps/{UUID}/control"
    assert dirs.pid_file == f"/run/gpufrac/mps/{UUID}/nvidia-cuda-mps-control.pid"
    assert socket_objection(dirs) == ""


def test_what_a_container_of_a_namespace_mounts() -> None:
    dirs = daemon_dirs(MpsConfig(), UUID)
    assert namespace_socket(dirs, "a") == f"/run/gpufrac/mps/{UUID}/s/a/control"
    assert mount_directory(dirs, "a") == f"/run/gpufrac/mps/{UUID}.ns/a"
    direct = daemon_dirs(MpsConfig(namespace_mount=NamespaceMount.DAEMON), UUID)
    assert mount_directory(direct, "a") == f"/run/gpufrac/mps/{UUID}/s/a"


def test_what_containers_may_mount_holds_neither_config_nor_links() -> None:
    dirs = daemon_dirs(MpsConfig(), UUID)
    for path in (dirs.config_file, dirs.links):
        assert not path.startswith(f"{dirs.pipe}/")


def test_a_socket_path_may_have_107_bytes() -> None:
    room = 107 - len(f"/mps/{UUID}/control")
    assert socket_objection(daemon_dirs(MpsConfig(run_root="/" + "r" * (room - 1)), UUID)) == ""
    objection = socket_objection(daemon_dirs(MpsConfig(run_root="/" + "r" * room), UUID))
    assert "is 108 bytes long, more than the 107" in objection
    assert "choose a shorter mps.runRoot" in objection


def test_a_name_from_outside_never_leaves_the_root() -> None:
    for name in ("../../etc", "a/b", "", ".", "..", ".hidden", "x" * 65):
        pipe = daemon_dirs(MpsConfig(), name).pipe
        assert pipe.startswith("/run/gpufrac/mps/gpu-")
        assert "/" not in pipe.removeprefix("/run/gpufrac/mps/")


def test_the_binary_of_another_driver_root() -> None:
    assert control_binary(MpsConfig()) == "nvidia-cuda-mps-control"
    assert control_binary(MpsConfig(binary="/opt/x")) == "/opt/x"
    assert control_binary(MpsConfig(driver_root="/run/nvidia/driver")) == (
        "/run/nvidia/driver/usr/bin/nvidia-cuda-mps-control"
    )
    assert control_binary(MpsConfig(driver_root="/run/nvidia/driver/", binary="/opt/x")) == "/opt/x"


def test_environment() -> None:
    assert dict(base_environment(MpsConfig())) == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    other = dict(base_environment(MpsConfig(driver_root="/d")))
    assert other["PATH"].startswith("/d/usr/sbin:/d/usr/bin:")
    assert "/d/usr/lib64" in other["LD_LIBRARY_PATH"].split(":")
