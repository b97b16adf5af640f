"""Wrong use of the client and of the commands: a clear error in time, exit code 2, and the next proper use works."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.agents import AgentProcess, Agents, running_agents

from ckptd.client import Checkpointer
from ckptd.client import channel as client_channel
from ckptd.client.errors import CkptdError, InvalidRequest, Unavailable
from ckptd.daemon.cli import main

pytestmark = pytest.mark.integration

SOON_S = 8.0


@pytest.fixture(scope="module")
def node() -> Iterator[AgentProcess]:
    """One agent for all that is refused: nothing of it may stay behind in it."""
    with running_agents() as made:
        yield made.new()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of which sockets fit."""
    made = Path(f"/tmp/ckptd-u-{secrets.token_hex(3)}")
    made.mkdir(mode=0o700)
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


def refused(call: Callable[[], object], kind: type[CkptdError], reason: str) -> CkptdError:
    """Call what must fail soon, with a way out; returns the error."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    assert (type(caught.value), caught.value.reason_name) == (kind, reason)
    return caught.value


def state_of(step: int) -> dict[str, Any]:
    """Return a state that differs by step."""
    return {"weight": torch.full((1000,), float(step)), "note": f"step {step}"}


def save_properly(at: Path, node: AgentProcess, step: int) -> None:
    """One client saves, another one restores it."""
    with Checkpointer(f"file://{at}", job="job", socket=node.socket) as one:
        one.save(step, state_of(step)).wait(timeout=30)
    with Checkpointer(f"file://{at}", job="job", socket=node.socket) as other:
        found = state_of(0)
        restored = other.restore_into(found)
        assert restored is not None
        assert restored.step == step
        assert torch.equal(found["weight"], state_of(step)["weight"])


# ---------------------------------------------------------------- the client


@pytest.mark.parametrize("step", [-1, 10**12, 2**64, 1.0, True, "1", None])
def test_a_step_that_is_none_is_refused_before_the_agent_hears_of_it(
    node: AgentProcess, tmp_path: Path, step: Any
) -> None:
    """Negative, huge, and of no whole number: InvalidRequest with the range; the same Checkpointer saves the next step."""
    with Checkpointer(f"file://{tmp_path}/root", job="job", socket=node.socket) as one:
        error = refused(lambda: one.save(step, state_of(1)), InvalidRequest, "INVALID_STEP")
        assert repr(step) in str(error)
        assert "0 to 999999999999" in str(error)
        if step is not None:
            refused(lambda: one.restore(step=step), InvalidRequest, "INVALID_STEP")
        one.save(1, state_of(1)).wait(timeout=30)


@pytest.mark.parametrize(
    ("settings", "reason", "words"),
    [
        ({"slot": 2}, "INVALID_ARGUMENT", "slot: Extra inputs are not permitted"),
        ({"slots": 0}, "INVALID_ARGUMENT", "equal to 1, not 0 (allowed: at least 1, at most 16)"),
        ({"copy_threads": 65}, "INVALID_ARGUMENT", "not 65 (allowed: at least 1, at most 64)"),
        ({"slots": 17, "begin_timeout_s": -1}, "INVALID_ARGUMENT", "begin_timeout_s: Input should be greater than 0"),
        ({"begin_timeout_s": float("nan")}, "INVALID_ARGUMENT", "begin_timeout_s"),
        ({"transport": "pigeon"}, "INVALID_ARGUMENT", "transport: Input should be 'auto', 'shm' or 'stream'"),
        ({"keep_last": -1}, "INVALID_ARGUMENT", "keep_last"),
        ({"root": "relative"}, "INVALID_ROOT", "'relative' is no URL"),
        ({"root": ""}, "INVALID_ROOT", "no root was given"),
        ({"job": ""}, "INVALID_ARGUMENT", "no job name was given"),
        ({"job": "x" * 300}, "INVALID_ARGUMENT", "job: String should have at most 128 characters"),
        ({"socket": Path("/tmp/" + "s" * 120)}, "INVALID_ARGUMENT", "has 125 bytes; a Unix socket address holds 107"),
        ({"socket": None, "run_dir": Path("/tmp/" + "s" * 120)}, "INVALID_ARGUMENT", "has 136 bytes"),
    ],
)
def test_s069_settings_that_are_wrong_are_refused_with_name_value_and_range(
    node: AgentProcess, tmp_path: Path, settings: dict[str, Any], reason: str, words: str
) -> None:
    """Unknown names and values out of range never reach an agent; every wrong one is named, with a way out."""
    chosen = {"root": f"file://{tmp_path}/root", "job": "job", "socket": node.socket, **settings}
    error = refused(lambda: Checkpointer(**chosen), InvalidRequest, reason)
    assert words in str(error)
    assert error.hint
    assert all(name in str(error) for name in settings if name not in {"socket", "run_dir"})


def test_without_an_agent_the_client_says_where_it_looked(folder: Path, node: AgentProcess, tmp_path: Path) -> None:
    """Nobody listens, or only a dead agent's socket lies there: Unavailable within connect_timeout_s names the path."""
    path = folder / "agent.sock"
    for leave in (False, True):
        if leave:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(os.fspath(path))
        began = time.monotonic()
        error = refused(
            lambda: Checkpointer(f"file://{tmp_path}/root", job="job", socket=path, connect_timeout_s=0.5),
            Unavailable,
            "UNAVAILABLE",
        )
        assert time.monotonic() - began < 3
        assert str(path) in str(error)
        assert "ckptd agent" in error.hint
    save_properly(tmp_path / "root", node, 1)


def test_a_listener_that_is_no_agent_is_given_up_in_time(folder: Path, tmp_path: Path) -> None:
    """Something that accepts and never answers: Unavailable within connect_timeout_s, not a hang."""
    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(os.fspath(path))
        mute.listen()
        refused(
            lambda: Checkpointer(f"file://{tmp_path}/root", job="job", socket=path, connect_timeout_s=1.0),
            Unavailable,
            "DEADLINE_EXCEEDED",
        )


def test_an_agent_of_no_common_version_is_refused_with_both_ranges(
    node: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of another time raises VERSION_MISMATCH with both ranges; the agent goes on serving those that fit."""
    with monkeypatch.context() as patched:
        patched.setattr(client_channel, "MIN_VERSION", 7)
        patched.setattr(client_channel, "MAX_VERSION", 9)
        error = refused(
            lambda: Checkpointer(f"file://{tmp_path}/root", job="job", socket=node.socket),
            InvalidRequest,
            "VERSION_MISMATCH",
        )
    assert "the client speaks 7 to 9, this agent 1 to 1" in str(error)
    assert "at most one apart" in error.hint
    save_properly(tmp_path / "root", node, 1)


def test_a_dead_agent_costs_saves_until_it_is_back_and_no_more(agents: Agents, tmp_path: Path) -> None:
    """While it is dead a save fails as Unavailable within its deadline and training goes on; then the next one commits."""
    node = agents.new()
    with Checkpointer(f"file://{tmp_path}/root", job="job", socket=node.socket, begin_timeout_s=1.0) as one:
        one.save(1, state_of(1)).wait(timeout=30)
        node.kill()
        began = time.monotonic()
        lost = one.save(2, state_of(2))
        assert time.monotonic() - began < 4
        error = refused(lambda: lost.wait(timeout=5), Unavailable, "DEADLINE_EXCEEDED")
        assert str(node.socket) in str(error)
        node.start()
        deadline = time.monotonic() + 30
        step = 3
        while (handle := one.save(step, state_of(step))).error is not None and time.monotonic() < deadline:
            step += 1
        handle.wait(timeout=30)
        restored = one.restore_into(state_of(0))
        assert restored is not None
        assert restored.step == step


# ---------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "Usage: ckptd VERB"),
        ("lsx", "did you mean `ckptd ls`?"),
        ("agent --port 70000", "port = 70000 (from --port): Input should be less than or equal to 65535"),
        ("agent --port many", "Invalid value for '--port'"),
        ("agent --drain-s nan", "drain_s"),
        ("agent --no-such-flag", "No such option: --no-such-flag"),
        ("agent extra", "unexpected extra argument"),
        ("agent --config {folder}/none.toml", "none.toml cannot be read: No such file or directory"),
        ("agent --config {folder}/wrong.toml", "prot = 1 (from {folder}/wrong.toml): unknown key"),
        ("agent --run-dir relative", "must be an absolute path"),
        ("agent --drain-s=-1", "drain_s = -1.0 (from --drain-s)"),
        ("agent --port 65536", "(allowed: at least 0, at most 65535)"),
        ("verify --readers 65 file:///data/x", "'--readers': Input should be less than or equal to 64"),
        ("verify --readers -1 file:///data/x", "'--readers': Input should be greater than or equal to 1"),
        ("agent --run-dir {folder} --listen 0.0.0.0", "--insecure"),
        ("agent --run-dir {folder} --listen no.such.host.invalid", "is no address of a host"),
        ("ls", "Missing argument 'ROOT'"),
        ("ls sfx://bucket/x", "unknown scheme 'sfx://'"),
        ("ls relative/root", "is a relative path"),
        ("show file:///data/x newest", "Invalid value for '[STEP]'"),
        ("verify file:///data/../x", "has a '..' segment"),
        ("sweep s3://ab", "is no bucket name"),
    ],
)
def test_s069_wrong_use_of_a_command_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    """What is wrong, on stderr alone, in one sentence; a script can tell it from every other failure."""
    (folder / "wrong.toml").write_text("prot = 1\n")
    assert main(arguments.format(folder=folder).split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words.format(folder=folder) in told.err
    assert "Traceback" not in told.err
    assert not arguments or len(told.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--run-dir": "{folder}/" + "r" * 100}, "has {length} bytes; Unix sockets allow 107"),
        ({"--run-dir": "/proc/ckptd"}, "/proc/ckptd cannot be used: No such file"),
        ({"--data-dir": "/etc/hostname/x"}, "/etc/hostname/x cannot be used: Not a directory"),
        ({"--shm-dir": "/proc/ckptd"}, "/proc/ckptd cannot be used: No such file"),
        ({"--shm-dir": "{folder}/link"}, "{folder}/link is not a folder of user"),
        ({"--event-log": "{folder}"}, "{folder} cannot be used: Is a directory"),
        ({"--run-dir": "{taken}"}, "another agent runs in {taken}"),
        ({"CKPTD_FAILPOINTS": "here=explode"}, "'here=explode' is not name=action[@nth]"),
    ],
)
def test_an_agent_that_cannot_start_exits_with_2_and_one_sentence(
    node: AgentProcess, folder: Path, change: dict[str, str], words: str
) -> None:
    """Folders, sockets and logs that cannot be used, and a second agent in one place; the living one is not disturbed."""
    (folder / "link").symlink_to(folder)
    places = {"folder": str(folder), "taken": str(node.folder / "run")}
    long = str(len(f"{folder}/" + "r" * 100 + "/agent.sock"))
    options = {"--run-dir": "{folder}/run", "--data-dir": "{folder}/data", "--shm-dir": "{folder}/shm", **change}
    flags = [
        text.format(**places) for name, value in options.items() if name.startswith("--") for text in (name, value)
    ]
    variables = {name: value for name, value in change.items() if not name.startswith("--")}
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon.cli", "agent", *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ckptd agent: ")
    assert words.format(length=long, **places) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert node.process is not None
    assert node.process.poll() is None


def test_an_agent_that_is_told_to_end_ends_with_0_and_leaves_no_socket(agents: Agents) -> None:
    """SIGTERM to an idle agent: exit code 0, socket gone, so that the next client does not wait for it."""
    node = agents.new()
    assert node.kill(signal.SIGTERM) == 0
    assert not node.socket.exists()
