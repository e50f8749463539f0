"""A kubelet's side of the CRI (runtime.v1), as far as these tests need it. Pods use the host's network: no CNI."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import msgspec

from tests.e2e.containerd.wire import INT, MAP, STRING, Field, Message, Table, decode, encode
from tests.waiting import WAIT_S

NODE, CONTAINER = 2, 1  # namespace modes
_NAMESPACES_OF_A_POD = {"network": NODE, "pid": CONTAINER}
CONTAINER_STATES = ("CREATED", "RUNNING", "EXITED", "UNKNOWN")

_METADATA: Table = {"name": Field(1), "uid": Field(2), "namespace": Field(3), "attempt": Field(4, INT)}
_NAMESPACES: Table = {"network": Field(1, INT), "pid": Field(2, INT), "ipc": Field(3, INT)}
_POD_SECURITY: Table = {"namespace_options": Field(1, _NAMESPACES)}
_POD_LINUX: Table = {"cgroup_parent": Field(1), "security_context": Field(2, _POD_SECURITY)}
_POD_CONFIG: Table = {
    "metadata": Field(1, _METADATA),
    "hostname": Field(2),
    "log_directory": Field(3),
    "labels": Field(6, MAP),
    "annotations": Field(7, MAP),
    "linux": Field(8, _POD_LINUX),
}
_CONTAINER_METADATA: Table = {"name": Field(1), "attempt": Field(2, INT)}
_IMAGE: Table = {"image": Field(1)}
_KEY_VALUE: Table = {"key": Field(1), "value": Field(2)}
_MOUNT: Table = {"container_path": Field(1), "host_path": Field(2), "readonly": Field(3, INT)}
_CDI_DEVICE: Table = {"name": Field(1)}
_CONTAINER_SECURITY: Table = {"namespace_options": Field(3, _NAMESPACES)}
_CONTAINER_LINUX: Table = {"security_context": Field(2, _CONTAINER_SECURITY)}
_CONTAINER_CONFIG: Table = {
    "metadata": Field(1, _CONTAINER_METADATA),
    "image": Field(2, _IMAGE),
    "command": Field(3, STRING, many=True),
    "args": Field(4, STRING, many=True),
    "envs": Field(6, _KEY_VALUE, many=True),
    "mounts": Field(7, _MOUNT, many=True),
    "labels": Field(9, MAP),
    "annotations": Field(10, MAP),
    "linux": Field(15, _CONTAINER_LINUX),
    "cdi_devices": Field(17, _CDI_DEVICE, many=True),
}
_POD: Table = {"id": Field(1), "metadata": Field(2, _METADATA), "state": Field(3, INT)}
_CONTAINER: Table = {
    "id": Field(1),
    "pod_sandbox_id": Field(2),
    "metadata": Field(3, _CONTAINER_METADATA),
    "state": Field(6, INT),
}
_CONTAINER_STATUS: Table = {
    "id": Field(1),
    "metadata": Field(2, _CONTAINER_METADATA),
    "state": Field(3, INT),
    "exit_code": Field(7, INT),
    "reason": Field(10),
    "message": Field(11),
}
_POD_ID: Table = {"pod_sandbox_id": Field(1)}
_CONTAINER_ID: Table = {"container_id": Field(1)}
_NOTHING: Table = {}

_CALLS: Mapping[str, tuple[Table, Table]] = {
    "Version": (
        {"version": Field(1)},
        {"runtime_name": Field(2), "runtime_version": Field(3), "runtime_api_version": Field(4)},
    ),
    "RunPodSandbox": ({"config": Field(1, _POD_CONFIG)}, _POD_ID),
    "StopPodSandbox": (_POD_ID, _NOTHING),
    "RemovePodSandbox": (_POD_ID, _NOTHING),
    "ListPodSandbox": (_NOTHING, {"items": Field(1, _POD, many=True)}),
    "PodSandboxStatus": (
        {"pod_sandbox_id": Field(1), "verbose": Field(2, INT)},
        {"status": Field(1, _POD), "info": Field(2, MAP)},
    ),
    "CreateContainer": (
        {"pod_sandbox_id": Field(1), "config": Field(2, _CONTAINER_CONFIG), "sandbox_config": Field(3, _POD_CONFIG)},
        _CONTAINER_ID,
    ),
    "StartContainer": (_CONTAINER_ID, _NOTHING),
    "StopContainer": ({"container_id": Field(1), "timeout": Field(2, INT)}, _NOTHING),
    "RemoveContainer": (_CONTAINER_ID, _NOTHING),
    "ListContainers": (_NOTHING, {"containers": Field(1, _CONTAINER, many=True)}),
    "ContainerStatus": (
        {"container_id": Field(1), "verbose": Field(2, INT)},
        {"status": Field(1, _CONTAINER_STATUS), "info": Field(2, MAP)},
    ),
    "ImageStatus": ({"image": Field(1, _IMAGE)}, {"image": Field(1, {"id": Field(1)})}),
}


class CriError(Exception):
    """The runtime refused. The text is what a kubelet would put into the pod's events."""

    def __init__(self, call: str, code: str, text: str) -> None:
        super().__init__(text)
        self.call, self.code, self.text = call, code, text


class ContainerInfo(msgspec.Struct, frozen=True):
    """`state` is one of CONTAINER_STATES; `pid` is 0 unless it runs."""

    id: str
    name: str
    state: str
    exit_code: int
    reason: str
    message: str
    pid: int
    spec: dict[str, Any]


class Cri:
    """Calls that return what matters of the answer and raise CriError. Not thread safe; close it."""

    def __init__(self, socket: str, image: str, cgroup_parent: str) -> None:
        options = [
            ("grpc.max_receive_message_length", 16 << 20),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.min_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 100),
        ]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._image = image
        self._cgroup_parent = cgroup_parent
        self._pods: dict[str, Message] = {}
        self._attempts: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        self._channel.close()

    def version(self) -> tuple[str, str]:
        """The runtime's name and version."""
        answer = self._call("Version", {})
        return answer["runtime_name"], answer["runtime_version"]

    def has_image(self) -> bool:
        return bool(self._call("ImageStatus", {"image": {"image": self._image}}, service="ImageService")["image"]["id"])

    def run_pod(
        self,
        name: str,
        namespace: str = "default",
        uid: str = "",
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        attempt: int = 0,
    ) -> str:
        """Starts a sandbox as a kubelet would and gives its id. `uid` is made of the name where none is given."""
        uid = uid or f"uid-{namespace}-{name}"
        config: Message = {
            "metadata": {"name": name, "uid": uid, "namespace": namespace, "attempt": attempt},
            "labels": {
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
                **(labels or {}),
            },
            "annotations": dict(annotations or {}),
            "linux": {
                "cgroup_parent": f"{self._cgroup_parent}/pod{uid}",
                "security_context": {"namespace_options": _NAMESPACES_OF_A_POD},
            },
        }
        pod = str(self._call("RunPodSandbox", {"config": config})["pod_sandbox_id"])
        self._pods[pod] = config
        return pod

    def create(
        self,
        pod: str,
        name: str,
        env: Sequence[tuple[str, str]] = (),
        cdi_devices: Sequence[str] = (),
        mounts: Sequence[tuple[str, str, bool]] = (),
        *,
        command: Sequence[str] = ("/bin/sleep", "1000000"),
        annotations: Mapping[str, str] | None = None,
    ) -> str:
        """Creates a container and gives its id. Mounts are (inside, outside, read-only). A second container of one name
        in one pod counts as the next attempt, as the kubelet does it."""
        config = self._pods[pod]
        attempt = self._attempts.get((pod, name), 0)
        self._attempts[pod, name] = attempt + 1
        metadata = config["metadata"]
        container: Message = {
            "metadata": {"name": name, "attempt": attempt},
            "image": {"image": self._image},
            "command": list(command),
            "envs": [{"key": key, "value": value} for key, value in env],
            "mounts": [
                {"container_path": inside, "host_path": outside, "readonly": readonly}
                for inside, outside, readonly in mounts
            ],
            "labels": {
                "io.kubernetes.container.name": name,
                "io.kubernetes.pod.name": metadata["name"],
                "io.kubernetes.pod.namespace": metadata["namespace"],
                "io.kubernetes.pod.uid": metadata["uid"],
            },
            "annotations": dict(annotations or {}),
            "linux": {"security_context": {"namespace_options": _NAMESPACES_OF_A_POD}},
            "cdi_devices": [{"name": device} for device in cdi_devices],
        }
        request = {"pod_sandbox_id": pod, "config": container, "sandbox_config": config}
        return str(self._call("CreateContainer", request)["container_id"])

    def start(self, container: str) -> None:
        self._call("StartContainer", {"container_id": container})

    def stop(self, container: str, grace_s: int = 0) -> None:
        self._call("StopContainer", {"container_id": container, "timeout": grace_s})

    def remove(self, container: str) -> None:
        self._call("RemoveContainer", {"container_id": container})

    def stop_pod(self, pod: str) -> None:
        self._call("StopPodSandbox", {"pod_sandbox_id": pod})

    def remove_pod(self, pod: str) -> None:
        self._call("RemovePodSandbox", {"pod_sandbox_id": pod})

    def pods(self) -> dict[str, bool]:
        """Every sandbox's id, and whether it is ready."""
        return {pod["id"]: pod["state"] == 0 for pod in self._call("ListPodSandbox", {})["items"]}

    def pod_pid(self, pod: str) -> int:
        """The pid of a sandbox's own process; 0 when it is gone."""
        answer = self._call("PodSandboxStatus", {"pod_sandbox_id": pod, "verbose": True})
        return int(msgspec.json.decode(answer["info"]["info"]).get("pid", 0))

    def containers(self, pod: str = "") -> dict[str, str]:
        """Containers' ids and states, those of one pod or all."""
        return {
            one["id"]: CONTAINER_STATES[one["state"]]
            for one in self._call("ListContainers", {})["containers"]
            if pod in ("", one["pod_sandbox_id"])
        }

    def status(self, container: str) -> ContainerInfo:
        answer = self._call("ContainerStatus", {"container_id": container, "verbose": True})
        status, info = answer["status"], msgspec.json.decode(answer["info"].get("info", "{}"))
        return ContainerInfo(
            status["id"],
            status["metadata"]["name"],
            CONTAINER_STATES[status["state"]],
            status["exit_code"],
            status["reason"],
            status["message"],
            int(info.get("pid", 0)),
            info.get("runtimeSpec") or {},
        )

    def _call(self, name: str, request: Mapping[str, Any], *, service: str = "RuntimeService") -> Message:
        asked, answered = _CALLS[name]
        method: Any = self._channel.unary_unary(f"/runtime.v1.{service}/{name}")
        try:
            answer = method(encode(asked, request), timeout=WAIT_S)
        except grpc.RpcError as error:
            raise CriError(name, error.code().name, error.details() or "") from None
        return decode(answered, answer)
