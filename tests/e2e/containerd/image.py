"""A container image of this machine's own sh, sleep, cat and env: nothing is pulled from anywhere."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import msgspec

from tests.waiting import WAIT_S

NAME = "localhost/gpufrac-test:1"
PROGRAMS = ("sh", "sleep", "cat", "env")


def write_image(path: Path) -> None:
    """An archive as `docker save` writes it; the image does for containers and for a pod's own process."""
    layer = _layer()
    config = msgspec.json.encode(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
            "os": "linux",
            "config": {"Entrypoint": ["/bin/sleep", "1000000"], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    )
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = msgspec.json.encode([{"Config": config_name, "RepoTags": [NAME], "Layers": ["layer.tar"]}])
    with tarfile.open(path, "w") as archive:
        for name, data in (("manifest.json", manifest), (config_name, config), ("layer.tar", layer)):
            _add(archive, name, data, 0o644)


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory in ("bin", "tmp", "etc"):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
        libraries: set[str] = set()
        for program in PROGRAMS:
            found = shutil.which(program)
            assert found is not None, program
            _add(archive, f"bin/{program}", Path(found).read_bytes(), 0o755)
            done = subprocess.run(["ldd", found], capture_output=True, text=True, check=False, timeout=WAIT_S)
            libraries |= set(re.findall(r"(/\S+) \(0x", done.stdout))
        for library in sorted(libraries):
            _add(archive, library.lstrip("/"), Path(library).read_bytes(), 0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))
