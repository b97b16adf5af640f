"""Faults from the field: other operating systems. Patched here; the real ones are not in this suite."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
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


THEN = {
    "win32": """
socket.socket.listen = lambda *_: print("LISTENS")
from ckptd.daemon.cli import main
print("code", main(["agent", "--run-dir", "FOLDER/run", "--data-dir", "FOLDER/data"]))
from ckptd.client import Checkpointer, InvalidRequest
try:
    Checkpointer("file:///data/x", job="job", socket="FOLDER/agent.sock")
except InvalidRequest as error:
    print(error)
""",
    "darwin": """
from pathlib import Path
from ckptd.daemon.shared_files import SharedFile
from ckptd.daemon.config import default_shm_dir
print("shm", default_shm_dir())
file = SharedFile.create(Path("FOLDER/x.slot"), 3 << 20)
print("reserved", file.nbytes, os.stat(file.path).st_blocks * 512 >= 3 << 20)
file.touch()
file.view[:3] = b"abc"
print("kept", file.path.read_bytes()[:4] == b"abc" + bytes(1))
file.remove()
print("gone", not file.path.exists())
""",
}
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Done, Path]]:
    """Runs a Python that takes itself for one of another system, once for each: it imports everything, then uses it."""

    @functools.cache
    def run(platform: str) -> tuple[Done, Path]:
        folder = tmp_path_factory.mktemp(platform)
        code = PATCH[platform] + IMPORTS + 'print("imported")\n' + THEN[platform].replace("FOLDER", str(folder))
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False), folder

    return run


Elsewhere = Callable[[str], tuple[Done, Path]]


@pytest.mark.parametrize("platform", sorted(PATCH))
def test_s112_everything_can_be_imported(elsewhere: Elsewhere, platform: str) -> None:
    """Client, agent, verbs and drivers, whatever the system lacks."""
    done, _ = elsewhere(platform)
    assert "imported" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


def test_s112_an_agent_without_unix_sockets_is_refused_and_opens_no_port(elsewhere: Elsewhere) -> None:
    """One sentence and exit code 2, for the agent; the client says the same. Never a TCP port that every user could reach."""
    done, folder = elsewhere("win32")
    assert "LISTENS" not in done.stdout
    assert "code 2" in done.stdout, done.stderr[-2000:]
    assert "an agent needs Unix sockets" in done.stderr
    assert "this system has none" in done.stdout
    assert list(folder.iterdir()) == []


def test_s112_slots_work_where_nothing_can_be_reserved_or_punched(elsewhere: Elsewhere) -> None:
    """What macOS lacks: a slot file is written full instead, keeps its bytes, and goes."""
    done, _ = elsewhere("darwin")
    assert "shm /dev/shm" not in done.stdout
    assert "reserved 3145728 True\nkept True\ngone True" in done.stdout, done.stderr[-3000:]


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
        env={**os.environ, "PYTHONPATH": path, "CKPTD_TEST_LONG": "1"},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "1 passed, 3 skipped" in done.stdout
    assert "needs Linux" in done.stdout
