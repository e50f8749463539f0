"""Namespaces are made to be as wanted, whatever the daemon has and refuses, and only what was read back counts."""

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mpsd.common.errors import ProtocolError, TransientError
from mpsd.common.reason import message_of
from mpsd.config.model import GIB, MpsConfig, NamespaceMount
from mpsd.daemon import dirs as directories
from mpsd.daemon import protocol3
from mpsd.daemon.controller import Configured, NotAClientError
from mpsd.daemon.controller3 import Controller3
from mpsd.daemon.namespaces import Namespace
from mpsd.daemon.paths import MAIN, DaemonDirs, daemon_dirs, namespace_socket
from mpsd.daemon.plan import DaemonSpec
from tests.mpspaths import link_directory, mount_directory, own_link
from tests.reasons import messages
from tests.unit.mpsd.daemon.fakes import Daemon3, refusal

A, B = Namespace("a", 8 * GIB, 25), Namespace("b", 4 * GIB)
ODD = Namespace("odd", 8 * GIB + GIB // 2)


def floor_g(limit: str) -> str:
    """How driver 595 shows limits under protocol 2; what protocol 3 does is unknown."""
    return f"{int(limit[:-1]) // 1024}G" if limit.endswith("M") and int(limit[:-1]) >= 1024 else limit


class Node:
    """One daemon that runs and its controller."""

    def __init__(self, root: Path, mount: NamespaceMount = NamespaceMount.DAEMON) -> None:
        self.mps = MpsConfig(run_root=f"{root}/run", log_root=f"{root}/log", namespace_mount=mount)
        self.dirs = daemon_dirs(self.mps, "GPU-1")
        directories.prepare(self.dirs)
        self.daemon = Daemon3(self.dirs)
        self.controller = Controller3(self.daemon)

    def spec(self, *namespaces: Namespace) -> DaemonSpec:
        links = tuple(own_link(self.dirs, n.name) for n in namespaces) if self.dirs.linked else ()
        return DaemonSpec("GPU-1", ("GPU-1",), 3, GIB, self.dirs, (), namespaces, links, (self.dirs.links,))

    def start(self, *namespaces: Namespace) -> None:
        """As if started with a config file of these."""
        self.controller.prepare(self.spec(*namespaces))
        for namespace in namespaces:
            self.daemon.add(namespace.name, f"{namespace.limit_bytes >> 20}M", str(namespace.thread_percent or 100))


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


def test_start_arguments_name_the_file_that_prepare_writes(node: Node) -> None:
    arguments = node.controller.start_arguments(node.spec(A), multiuser=True)
    assert arguments == ("-p", "3", "-d", "-m", "-a", node.dirs.config_file)
    assert "-m" not in node.controller.start_arguments(node.spec(A), multiuser=False)
    node.controller.prepare(node.spec(A, B))
    assert Path(node.dirs.config_file).read_text() == protocol3.config((A, B))
    assert stat.S_IMODE(os.stat(node.dirs.config_file).st_mode) == 0o600
    os.unlink(node.dirs.config_file)
    shutil.rmtree(f"{node.dirs.run_root}/mps")
    with pytest.raises(TransientError, match=r"cannot write .*GPU-1\.toml: No such file or directory"):
        node.controller.prepare(node.spec(A))


@pytest.mark.parametrize("show", [str, floor_g])
def test_what_the_config_file_gave_is_read_once_and_left_alone(node: Node, show: Callable[[str], str]) -> None:
    node.daemon.show = show
    node.start(A, B, ODD)
    configured = node.controller.configure(node.spec(A, B, ODD))
    assert configured == Configured(None, frozenset({"a", "b", "odd"}), {})
    assert node.daemon.calls == [protocol3.LIST_NAMESPACES]


@pytest.mark.parametrize("show", [str, floor_g])
def test_missing_ones_are_made_and_stay(node: Node, show: Callable[[str], str]) -> None:
    node.daemon.show = show
    node.start(A)
    for changes in (["create odd", "set odd"], []):
        assert node.controller.configure(node.spec(A, ODD)).attached == {"a", "odd"}
        assert node.daemon.changes() == changes
    assert Path(node.dirs.config_file).read_text() == protocol3.config((A, ODD))


def test_wrong_ones_are_set_and_unwanted_ones_deleted(node: Node) -> None:
    node.start(replace(A, limit_bytes=GIB), replace(B, thread_percent=50), ODD)
    assert node.controller.configure(node.spec(A, B)).attached == {"a", "b"}
    assert node.daemon.changes() == ["set a", "set b", "delete odd"]
    assert node.daemon.namespaces == {"default": ("64M", "1"), "a": ("8192M", "25"), "b": ("4096M", "100")}


def test_nothing_is_changed_or_deleted_while_a_client_lives_and_all_is_afterwards(node: Node) -> None:
    node.start(replace(A, limit_bytes=GIB), B)
    node.daemon.busy = {"a", "b"}
    configured = node.controller.configure(node.spec(A))
    assert configured.attached == set()
    assert messages(configured.refused) == {
        "a": "its limits (memory 1024M, threads 25.00 %) can't be changed, as a rule because a client of it lives: "
        "the MPS control daemon says: a has active clients"
    }
    assert set(node.daemon.namespaces) == {"default", "a", "b"}
    node.daemon.busy.clear()
    assert node.controller.configure(node.spec(A)).attached == {"a"}
    assert set(node.daemon.namespaces) == {"default", "a"}


def test_what_reads_as_wanted_after_rounding_only_is_set_again(node: Node) -> None:
    """8704M shows as 8G, and so does the 8192M that is wanted now: a client would get more than it may have."""
    node.daemon.show = floor_g
    node.start(replace(A, limit_bytes=ODD.limit_bytes))
    node.daemon.busy = {"a"}
    for _ in range(2):
        refused = node.controller.configure(node.spec(A)).refused
        assert "(memory 8G, threads 25.00 %) may be rounded and can't be set anew" in refused["a"].message
    node.daemon.busy.clear()
    assert node.controller.configure(node.spec(A)).attached == {"a"}
    assert node.daemon.namespaces["a"] == ("8192M", "25")


def test_a_refused_create_is_settled_by_looking(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.daemon.fail["create"] = refusal("exists")
    assert messages(node.controller.configure(node.spec(A)).refused) == {
        "a": "it is not there: the MPS control daemon says: a: exists or not"
    }
    asked = node.daemon.call

    def call(dirs: DaemonDirs, arguments: Sequence[str], timeout_s: float) -> str:
        if arguments[1] == "create":  # somebody made it since our list
            node.daemon.add("a")
        return asked(dirs, arguments, timeout_s)

    monkeypatch.setattr(node.daemon, "call", call)
    assert node.controller.configure(node.spec(A)).attached == {"a"}


def test_only_what_was_read_back_counts(node: Node) -> None:
    node.start(A)
    node.daemon.show = lambda limit: "unlimited"
    refused = messages(node.controller.configure(node.spec(A)).refused)
    assert refused == {"a": "its limits read back as memory unlimited, threads 25.00 %, which is not what was set"}


def test_a_namespace_without_its_socket_takes_nobody(node: Node) -> None:
    node.daemon.make_socket = False
    node.start(A)
    refused = node.controller.configure(node.spec(A)).refused
    assert messages(refused) == {"a": f"its socket {namespace_socket(node.dirs, 'a')} is not there"}
    os.makedirs(os.path.dirname(namespace_socket(node.dirs, "a")))
    Path(namespace_socket(node.dirs, "a")).write_text("no socket")
    assert "a" in node.controller.configure(node.spec(A)).refused
    assert messages(node.controller.probe(node.spec(A, B), servers=False)) == {
        "a": f"its socket {namespace_socket(node.dirs, 'a')} is not there",
        "b": "it is not there",
    }


def unlink(path: str) -> None:
    os.unlink(path)


def link_away(path: str) -> None:
    os.rename(path, f"{path}.mine")
    os.symlink(f"{path}.mine", path)


def put_directory(path: str) -> None:
    os.unlink(path)
    os.makedirs(f"{path}/deep")


@pytest.mark.parametrize("spoil", [unlink, link_away, put_directory])
def test_a_namespace_whose_tenant_spoilt_its_socket_is_made_anew_and_no_other(
    node: Node, spoil: Callable[[str], None]
) -> None:
    node.start(A, B)
    node.controller.configure(node.spec(A, B))
    path = namespace_socket(node.dirs, "a")
    spoil(path)
    assert messages(node.controller.probe(node.spec(A, B), servers=True)) == {"a": f"its socket {path} is not there"}
    node.daemon.busy = {"a"}
    configured = node.controller.configure(node.spec(A, B))
    assert configured.attached == {"b"}
    assert configured.refused["a"].message.startswith("its socket was removed: end its clients: ")
    node.daemon.busy.clear()
    node.daemon.changes()
    assert node.controller.configure(node.spec(A, B)).attached == {"a", "b"}
    assert node.daemon.changes() == ["delete a", "create a", "set a"]
    assert messages(node.controller.probe(node.spec(A, B), servers=True)) == {}


def test_a_socket_that_is_still_to_come_is_waited_for(node: Node) -> None:
    node.daemon.make_socket = False
    node.start(A)
    assert "a" in node.controller.configure(node.spec(A)).refused
    node.daemon.make_socket = True
    node.daemon.add("a", "8192M", "25")
    assert node.controller.configure(node.spec(A)).attached == {"a"}
    assert node.daemon.changes() == []


@pytest.mark.parametrize("name", ["../../x", "a b", "A", "", "x" * 65, 'a"]\n[servers.t'])
def test_a_name_that_mps_does_not_take_is_never_sent_or_written(node: Node, name: str) -> None:
    node.start(A)
    spec = node.spec(A, replace(B, name=name))
    configured = node.controller.configure(spec)
    assert configured.attached == {"a"}
    assert configured.refused.keys() == {name}
    node.controller.prepare(spec)
    assert node.daemon.changes() == []
    assert Path(node.dirs.config_file).read_text() == protocol3.config((A,))


def test_a_socket_path_that_is_too_long_is_refused(short_tmp: Path) -> None:
    deep = Node(short_tmp / ("y" * 30))
    name = "x" * 64
    refused = deep.controller.configure(deep.spec(replace(A, name=name))).refused
    assert "more than 107: set a shorter mps.runRoot" in refused[name].message
    assert deep.daemon.changes() == []


def test_the_default_namespace_is_capped_and_kept(node: Node) -> None:
    node.daemon.add("default")
    assert message_of(node.controller.configure(node.spec()).note) == ""
    assert node.daemon.namespaces == {"default": ("64M", "1")}
    node.daemon.add("default")
    node.daemon.busy = {"default"}
    note = node.controller.configure(node.spec()).note
    assert message_of(note) == "MPS namespace default is not capped: memory unlimited, threads 100.00 %"


@pytest.mark.parametrize("verb", ["create", "set", "delete", "list"])
def test_a_daemon_that_does_not_answer_ends_the_configuration(node: Node, verb: str) -> None:
    node.start(B)
    node.daemon.fail[verb] = TransientError("cannot get an answer")
    with pytest.raises(TransientError, match="cannot get an answer"):
        node.controller.configure(node.spec(A))


def lose_server(node: Node) -> None:
    node.daemon.namespaces.clear()


def refuse_lost(node: Node) -> None:
    node.daemon.namespaces.clear()
    node.daemon.fail["list"] = refusal("Server not found")


def refuse_list(node: Node) -> None:
    node.daemon.fail["list"] = refusal("Not now")


def talk_nonsense(node: Node) -> None:
    node.daemon.others[protocol3.LIST_NAMESPACES] = "Internal error\n"


def fault(node: Node) -> None:
    node.daemon.status = "FAULT"


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        (lose_server, "^its MPS server is gone; it logged last: Failed: 7; no CUDA-capable device is detected$"),
        (refuse_lost, "^its MPS server is gone; it logged last: Failed: 7; no CUDA-capable device is detected$"),
        (refuse_list, "Not now .*; it logged last: Failed: 7; no CUDA-capable device is detected$"),
        (talk_nonsense, "^its MPS server is gone: it lists 'Internal error'; it logged last: .*no CUDA"),
        (fault, "cannot rely on MPS server s .*: a client's fault keeps new ones out"),
    ],
)
def test_a_lost_server_is_told_with_its_last_words(node: Node, trouble: Callable[[Node], None], text: str) -> None:
    node.start(A)
    os.makedirs(os.path.dirname(node.dirs.server_log))
    head = "[2026-01-02 03:04:05.678 Server     5] "
    routine = "".join(f"{head}{text}\n" for text in ("Server has started", "Client {PID: 7, Context ID: 1} connected"))
    telling = f"{head}Failed: {'6' * 300}\n{head}Failed: 7\n{routine}no CUDA-capable device is detected\n\n"
    Path(node.dirs.server_log).write_text("old error\n" * 2000 + telling)
    trouble(node)
    with pytest.raises(TransientError, match=text):
        node.controller.configure(node.spec(A))
    with pytest.raises(TransientError, match=text):
        node.controller.probe(node.spec(A), servers=False)


def test_a_probe_is_one_process_and_sees_each_expected_namespace(node: Node) -> None:
    node.start(A, B, ODD)
    assert messages(node.controller.probe(node.spec(A, B), servers=True)) == {}
    assert node.daemon.calls == [protocol3.LIST_NAMESPACES]
    node.daemon.add("a", "1G", "25")
    assert messages(node.controller.probe(node.spec(B), servers=True)) == {}
    del node.daemon.namespaces["b"]
    node.daemon.add("default", "1G", "1")
    assert messages(node.controller.probe(node.spec(A, B), servers=True)) == {
        "a": "its limits read back as memory 1G, threads 25.00 %, which is not what was set",
        "b": "it is not there",
        "default": "its limits read back as memory 1G, threads 1.00 %, which is not what was set",
    }


def test_links_follow_the_daemons_sockets_in_directories_that_stay(short_tmp: Path) -> None:
    node = Node(short_tmp, NamespaceMount.LINKED)
    node.start(A, B)
    mounted = mount_directory(node.dirs, "a")
    for _ in range(2):
        assert node.controller.configure(node.spec(A)).attached == {"a", mounted}
        assert os.path.samefile(f"{mounted}/control", namespace_socket(node.dirs, "a"))
        assert os.listdir(node.dirs.links) == ["a"]
        inode = os.stat(mounted).st_ino
        directories.clear_stale(node.dirs)  # the daemon dies, and another one comes
        node.start(A)
    assert os.stat(mounted).st_ino == inode
    node.daemon.busy, directory = {"a"}, os.listdir(node.dirs.links)
    node.controller.configure(node.spec())
    assert os.listdir(node.dirs.links) == directory
    node.daemon.busy.clear()
    for _ in range(2):
        node.controller.configure(node.spec())
    assert os.listdir(node.dirs.links) == []


@pytest.mark.parametrize("mount", list(NamespaceMount))
def test_the_main_socket_is_linked_while_somebody_is_to_reach_it(short_tmp: Path, mount: NamespaceMount) -> None:
    node = Node(short_tmp, mount)
    node.start(A)
    link = Path(link_directory(node.dirs, MAIN))
    attached = frozenset({"a", mount_directory(node.dirs, "a")} if node.dirs.linked else {"a"})
    plain = node.spec(A)
    wanted = replace(plain, links=(*plain.links, own_link(node.dirs, MAIN)))
    assert node.controller.configure(wanted).refused.keys() == {str(link)}  # it is not there yet
    for _ in range(2):
        os.mknod(node.dirs.control_socket, stat.S_IFSOCK | 0o666)
        assert node.controller.configure(wanted) == Configured(None, attached | {str(link)}, {})
        assert os.path.samefile(link / "control", node.dirs.control_socket)
        inode = link.stat().st_ino
        directories.clear_stale(node.dirs)  # the daemon dies, and another one comes
        node.start(A)
    assert link.stat().st_ino == inode
    assert node.controller.configure(node.spec(A)).attached == attached
    assert not link.exists()


def test_links_of_another_mount_kind_stay_as_containers_may_have_them(short_tmp: Path) -> None:
    node = Node(short_tmp, NamespaceMount.LINKED)
    node.start(A)
    node.controller.configure(node.spec(A))
    mps = MpsConfig(run_root=f"{short_tmp}/run", namespace_mount=NamespaceMount.DAEMON)
    plain = replace(node.spec(A), dirs=daemon_dirs(mps, "GPU-1"), links=())
    node.daemon.dirs = plain.dirs
    node.controller.configure(plain)
    assert os.listdir(node.dirs.links) == ["a"]


def test_what_cannot_be_linked_is_not_attached(short_tmp: Path) -> None:
    node = Node(short_tmp, NamespaceMount.LINKED)
    node.start(A, B)
    os.makedirs(node.dirs.links)
    Path(node.dirs.links, "a").write_text("in the way")
    configured = node.controller.configure(node.spec(A, B))
    assert configured.attached == {"a", "b", mount_directory(node.dirs, "b")}
    assert configured.refused[mount_directory(node.dirs, "a")].message.startswith("cannot link ")


def test_clients_of_all_servers(node: Node) -> None:
    node.daemon.others = {
        protocol3.LIST_SERVERS: "s,0,5,Ready,/p,GPU-1,-\nuid_0,0,6,Ready,/p,GPU-1,-\n",
        protocol3.LIST_CLIENTS: "70,s,GPU-1,s/a (0),x\n71,uid_0,GPU-1,default,y\n",
    }
    clients = node.controller.clients(node.spec())
    assert (clients.servers, clients.clients) == ((5, 6), (70, 71))
    node.daemon.others[protocol3.LIST_CLIENTS] = "7...,s,GPU-1,s/a (0),x\n"
    with pytest.raises(ProtocolError, match="list of clients"):
        node.controller.clients(node.spec())


def test_terminate_and_quit(node: Node) -> None:
    clients = "70,s,GPU-1,s/a (0),x\n"
    node.daemon.others = {("client", "terminate", "70"): "", ("-q",): "", protocol3.LIST_CLIENTS: clients}
    node.controller.terminate_client(node.spec(), 70)
    node.controller.quit(node.spec(), 10.0)
    assert node.daemon.calls == [protocol3.LIST_CLIENTS, ("client", "terminate", "70"), ("-q",)]


def test_only_a_daemon_that_knows_its_clients_says_that_one_is_none(node: Node) -> None:
    node.daemon.others = {protocol3.LIST_CLIENTS: "71,s,GPU-1,s/a (0),x\n"}
    with pytest.raises(NotAClientError, match="cannot terminate pid 70: it is no client of the MPS daemon of GPU-1"):
        node.controller.terminate_client(node.spec(), 70)
    node.daemon.others[protocol3.LIST_CLIENTS] = "0,s,GPU-1,s/a (0),x\n"
    with pytest.raises(TransientError, match="by PID 0 only") as caught:
        node.controller.terminate_client(node.spec(), 70)
    assert not isinstance(caught.value, NotAClientError)
