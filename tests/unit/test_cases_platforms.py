"""Faults from the field: other operating systems. Patched here; the real ones are not in this suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = """
import os, socket, sys
for module in ("numpy", "grpc", "grpc.aio", "pydantic_settings", "typer", "rich.console", "psutil", "obstore", "fsspec",
               "cryptography.x509", "blake3", "xxhash", "tenacity", "torch", "torch.distributed", "torch.distributed.checkpoint",
               "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.data", "safetensors", "tempfile"):
    __import__(module)  # theirs is their own business
"""
LACKS = {
    "darwin": "for owner, name in ((os, 'posix_fallocate'), (__import__('mmap'), 'MADV_REMOVE')):",
    "win32": """
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for owner, name in ((os, "getuid"), (os, "geteuid"), (os, "posix_fallocate"), (os, "fork"), (socket, "AF_UNIX"),
                    (os, "register_at_fork"), (os, "O_NOFOLLOW"), (os, "O_CLOEXEC"), (os, "O_DIRECTORY"), (os, "O_NONBLOCK")):""",
}
PATCH = {
    name: f"{OTHERS}\n{lacks}\n    if hasattr(owner, name):\n        delattr(owner, name)\nsys.platform = {name!r}\n"
    for name, lacks in LACKS.items()
}
IMPORTS = """
import importlib, pkgutil
import ckptd.client, ckptd.daemon, ckptd.protos, ckptd.storage_backends
for package in (ckptd.client, ckptd.daemon, ckptd.protos, ckptd.storage_backends):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""


def run(platform: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that takes itself for one of that system."""
    return subprocess.run(
        [sys.executable, "-c", PATCH[platform] + code],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("platform", sorted(PATCH))
def test_s112_everything_can_be_imported(platform: str) -> None:
    """Client, agent, verbs and drivers, whatever the system lacks."""
    done = run(platform, IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]


def test_s112_an_agent_without_unix_sockets_is_refused_and_opens_no_port(tmp_path: Path) -> None:
    """One sentence and exit code 2, for the agent; the client says the same. Never a TCP port that every user could reach."""
    code = f"""
import socket
socket.socket.listen = lambda *_: print("LISTENS")
from ckptd.daemon.cli import main
print("code", main(["agent", "--run-dir", {str(tmp_path / "run")!r}, "--data-dir", {str(tmp_path / "data")!r}]))
from ckptd.client import Checkpointer, InvalidRequest
try:
    Checkpointer("file:///data/x", job="job", socket={str(tmp_path / "agent.sock")!r})
except InvalidRequest as error:
    print(error)
"""
    done = run("win32", code)
    assert "LISTENS" not in done.stdout
    assert "code 2" in done.stdout, done.stderr[-2000:]
    assert "an agent needs Unix sockets" in done.stderr
    assert "this system has none" in done.stdout
    assert not (tmp_path / "run").exists()


def test_s112_slots_work_where_nothing_can_be_reserved_or_punched(tmp_path: Path) -> None:
    """What macOS lacks: a slot file is written full instead, keeps its bytes, and goes."""
    code = f"""
from pathlib import Path
from ckptd.daemon.shared_files import SharedFile
from ckptd.daemon.config import default_shm_dir
assert not str(default_shm_dir()).startswith("/dev/shm")
file = SharedFile.create(Path({str(tmp_path)!r}) / "x.slot", 3 << 20)
assert file.nbytes == 3 << 20 and os.stat(file.path).st_blocks * 512 >= 3 << 20
file.touch()
file.view[:3] = b"abc"
assert file.path.read_bytes()[:4] == b"abc" + bytes(1)
file.remove()
assert not file.path.exists()
"""
    done = run("darwin", code)
    assert done.returncode == 0, done.stderr[-3000:]


def test_s112_tests_that_need_linux_are_skipped_elsewhere_with_a_reason(tmp_path: Path) -> None:
    """Collected on another system, tests with real processes say why they do not run; unit tests are left."""
    (tmp_path / "elsewhere.py").write_text(
        "import sys, pytest\n\n@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(config, items):\n    sys.platform = 'darwin'\n"
    )
    where = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "elsewhere", "-p", "no:cacheprovider"]
    command += [
        "tests/integration/test_cases_memory.py",
        "tests/unit/test_storage_memory.py::test_memory_is_shared_by_name",
    ]
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "1 passed, 3 skipped" in done.stdout
    assert "needs Linux" in done.stdout
