"""Faults from the field: other operating systems. Patched here; the real ones are not in this suite."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# What others wrote is imported once, as it is here: how it gets on elsewhere is their own business. Each system is a fork.
FORKS = """
import os, sys, traceback
for module in ("numpy", "grpc", "grpc.aio", "pydantic_settings", "typer", "rich.console", "psutil", "obstore", "fsspec",
               "cryptography.x509", "blake3", "xxhash", "tenacity", "torch", "torch.distributed", "torch.distributed.checkpoint",
               "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.data", "safetensors", "tempfile"):
    __import__(module)
assert not [name for name in sys.modules if name.startswith("ckptd")]
pids = {}
for name in sys.argv[1:]:
    pids[name] = os.fork()
    if pids[name] == 0:
        code = 1
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        try:
            exec(compile(open(f"{name}.py").read(), name, "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
for name, pid in pids.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
LACKS = {
    "darwin": "for owner, name in ((os, 'posix_fallocate'), (__import__('mmap'), 'MADV_REMOVE')):",
    "win32": """
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for owner, name in ((os, "getuid"), (os, "geteuid"), (os, "posix_fallocate"), (os, "fork"), (socket, "AF_UNIX"),
                    (os, "register_at_fork"), (os, "O_NOFOLLOW"), (os, "O_CLOEXEC"), (os, "O_DIRECTORY"), (os, "O_NONBLOCK")):""",
}
_LESS = "    if hasattr(owner, name):\n        delattr(owner, name)\n"
PATCH = {name: f"import os, socket, sys\n{lacks}\n{_LESS}sys.platform = {name!r}\n" for name, lacks in LACKS.items()}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A Python that took itself for one of another system: its end, what it said, and a folder for what it wrote."""

    code: int
    stdout: str
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """One for each system: it imports everything of ours, then uses it."""
    at = tmp_path_factory.mktemp("elsewhere")
    for name, patch in PATCH.items():
        (at / name).mkdir()
        then = THEN[name].replace("FOLDER", str(at / name))
        (at / f"{name}.py").write_text(patch + IMPORTS + 'print("imported")\n' + then)
    command = [sys.executable, "-c", FORKS, *PATCH]
    told = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    codes = dict(line.split() for line in told.stdout.splitlines())
    return {
        name: Done(
            code=int(codes[name]),
            stdout=(at / f"{name}.out").read_text(),
            stderr=(at / f"{name}.err").read_text(),
            folder=at / name,
        )
        for name in PATCH
    }


@pytest.mark.parametrize("platform", sorted(PATCH))
def test_s112_everything_can_be_imported(elsewhere: dict[str, Done], platform: str) -> None:
    """Client, agent, verbs and drivers, whatever the system lacks."""
    done = elsewhere[platform]
    assert "imported" in done.stdout, done.stderr[-3000:]
    assert done.code == 0, done.stderr[-3000:]


def test_s112_an_agent_without_unix_sockets_is_refused_and_opens_no_port(elsewhere: dict[str, Done]) -> None:
    """One sentence and exit code 2, for the agent; the client says the same. Never a TCP port that every user could reach."""
    done = elsewhere["win32"]
    assert "LISTENS" not in done.stdout
    assert "code 2" in done.stdout, done.stderr[-2000:]
    assert "an agent needs Unix sockets" in done.stderr
    assert "this system has none" in done.stdout
    assert list(done.folder.iterdir()) == []


def test_s112_slots_work_where_nothing_can_be_reserved_or_punched(elsewhere: dict[str, Done]) -> None:
    """What macOS lacks: a slot file is written full instead, keeps its bytes, and goes."""
    done = elsewhere["darwin"]
    assert "shm /dev/shm" not in done.stdout
    assert "reserved 3145728 True\nkept True\ngone True" in done.stdout, done.stderr[-3000:]


def test_s112_tests_that_need_linux_are_skipped_elsewhere_with_a_reason(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collected on another system, tests with real processes say why they do not run; unit tests are left."""
    tests = Path(__file__).parents[1]
    [conftest] = [
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(tests / "conftest.py")
    ]
    items = [
        item
        for path in ("integration/test_cases_memory.py", "unit/test_storage_memory.py")
        for item in pytest.Module.from_parent(request.session, path=tests / path).collect()
        if isinstance(item, pytest.Item)
    ]
    monkeypatch.setattr(sys, "platform", "darwin")
    conftest.pytest_collection_modifyitems(request.config, items)
    why = {item.path.parent.name: {mark.kwargs["reason"] for mark in item.iter_markers("skip")} for item in items}
    assert why["unit"] == set()
    assert len(why["integration"]) == 1
    assert "needs Linux (/dev/shm, /proc, fork), not darwin" in why["integration"]
