"""Failpoints: the grammar, the counting of hits, and a line in the log before each act."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.protos import failpoints
from ckptd.protos.boundaries import BOUNDARIES
from ckptd.protos.failpoints import (
    Action,
    FailpointError,
    FailpointSyntaxError,
    UndeclaredFailpointError,
    failpoint,
    parse,
)

KNOWN = {"here", "always", "third", "unknown", *"abdekls"}


def configure(specification: str, *, log_path: str | None = None) -> None:
    """Configure failpoints that exist in this test only."""
    failpoints.configure(specification, log_path=log_path, known=KNOWN)


names = st.from_regex(r"[a-z][a-z_.]{0,20}", fullmatch=True)
actions = st.one_of(
    st.sampled_from([("kill", ""), ("stop", ""), ("pass", "")]),
    st.tuples(st.just("exit"), st.integers(0, 255).map(str)),
    st.tuples(st.just("delay"), st.floats(0, 1000).map(lambda seconds: f"{seconds:.3f}")),
    st.tuples(st.just("error"), st.from_regex(r"[A-Za-z0-9 :=]{0,20}", fullmatch=True).map(str.strip)),
)
nths = st.one_of(st.none(), st.integers(1, 10**6))


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    """No failpoint outlives its test."""
    yield
    failpoints.configure("")


@given(entries=st.dictionaries(names, st.tuples(actions, nths), max_size=5))
def test_every_specification_is_parsed_as_it_was_written(
    entries: dict[str, tuple[tuple[str, str], int | None]],
) -> None:
    """Name, action, argument and count come back; blanks and empty entries between do not matter."""
    text = " ; ;".join(
        f"{name}={verb}{':' if argument else ''}{argument}{f'@{nth}' if nth else ''}"
        for name, ((verb, argument), nth) in entries.items()
    )
    assert parse(text) == {
        name: Action(verb=verb, argument=argument, nth=nth) for name, ((verb, argument), nth) in entries.items()
    }


@pytest.mark.parametrize(
    "entry",
    [
        *("name", "=kill", "name=", "name=explode", "name=KILL", "name:kill"),
        *("name=kill@", "name=kill@0", "name=kill@-1", "name=kill@x", "name=kill@²", "name=kill@1@2"),
        *(
            "name=kill:now",
            "name=stop:1",
            "name=pass:1",
            "name=exit",
            "name=exit:",
            "name=exit:256",
            "name=exit:-1",
            "name=exit:²",
        ),
        *("name=delay", "name=delay:", "name=delay:-1", "name=delay:nan", "name=delay:inf", "name=delay:1s"),
    ],
)
def test_what_breaks_the_grammar_is_refused_with_entry_and_grammar(entry: str) -> None:
    """One wrong entry among good ones is named, and the sentence says what would do."""
    with pytest.raises(FailpointSyntaxError, match="kill, stop, exit:CODE") as caught:
        parse(f"good=kill;{entry};other=stop")
    assert repr(entry) in str(caught.value)


def test_a_wrong_specification_leaves_what_was_configured() -> None:
    """`configure` takes all or nothing."""
    configure("here=error:first")
    with pytest.raises(FailpointSyntaxError):
        configure("here=error:second;nonsense")
    with pytest.raises(FailpointError, match="first"):
        failpoint("here")


def test_an_action_fires_at_every_hit_or_at_the_nth_alone() -> None:
    """Without a count each hit acts; with one, only that hit. Each name counts for itself, and others are silent."""
    configure("always=error:a;third=error:b@3")
    fired: list[tuple[str, int]] = []
    for hit in range(1, 6):
        for name in ("always", "third", "unknown"):
            try:
                failpoint(name)
            except FailpointError:
                fired.append((name, hit))
    assert fired == [("always", 1), ("always", 2), ("always", 3), ("third", 3), ("always", 4), ("always", 5)]
    configure("third=error:b@1")
    with pytest.raises(FailpointError):
        failpoint("third")


def test_an_error_says_its_text_or_the_failpoints_name() -> None:
    """The text stands in the exception, so that a fault is not taken for a real one."""
    configure("a=error:disk on fire;b=error")
    with pytest.raises(FailpointError, match=r"^disk on fire$"):
        failpoint("a")
    with pytest.raises(FailpointError, match=r"^b$"):
        failpoint("b")


def test_an_action_is_logged_before_it_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each action the line with pid, name, action and hit is there at the moment it acts."""
    log = tmp_path / "fired"
    acts: list[tuple[object, ...]] = []

    def act(*what: object) -> None:
        acts.append((*what, log.read_text().splitlines()[-1]))

    monkeypatch.setattr(os, "kill", act)
    monkeypatch.setattr(signal, "pthread_kill", act)
    monkeypatch.setattr(os, "_exit", act)
    monkeypatch.setattr(time, "sleep", act)
    configure("k=kill@2;s=stop;e=exit:9;d=delay:0.25", log_path=str(log))
    for name in ("k", "k", "s", "e", "d"):
        failpoint(name)
    me = os.getpid()
    assert acts == [
        (me, signal.SIGKILL, f"{me} k kill 2"),
        (threading.get_ident(), signal.SIGSTOP, f"{me} s stop 1"),
        (9, f"{me} e exit 1"),
        (0.25, f"{me} d delay 1"),
    ]


def test_the_environment_switches_failpoints_on_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPTD_FAILPOINTS and CKPTD_FAILPOINT_LOG are read when asked for; without them nothing is configured."""
    name = next(iter(BOUNDARIES))
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, f"{name}=error")
    monkeypatch.setenv(failpoints.LOG_VARIABLE, str(tmp_path / "fired"))
    failpoints.configure_from_environment()
    with pytest.raises(FailpointError):
        failpoint(name)
    assert (tmp_path / "fired").read_text() == f"{os.getpid()} {name} error 1\n"
    monkeypatch.delenv(failpoints.ENVIRONMENT_VARIABLE)
    failpoints.configure_from_environment()
    failpoint(name)


def test_what_was_configured_is_not_read_from_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has its failpoints keeps them, with their counts, when a Checkpointer asks again."""
    name = next(iter(BOUNDARIES))
    failpoints.configure(f"{name}=error@2")
    failpoint(name)
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, "")
    failpoints.configure_from_environment(again=False)
    with pytest.raises(FailpointError):
        failpoint(name)


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    """A misspelt failpoint never fires, and a test that waits for it proves nothing: it is refused before."""
    with pytest.raises(FailpointSyntaxError, match=r"no failpoint 'uploader.befor_put' .*uploader.before_put"):
        failpoints.configure("uploader.befor_put=kill")
    with pytest.raises(FailpointSyntaxError, match="ckptd chaos failpoints"):
        failpoints.configure("qqqqqqqq=kill")


def test_every_verb_refuses_an_unknown_name() -> None:
    """The command says so in one line and ends with the code of wrong usage, before it does anything."""
    ran = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon.cli", "ls", "file:///nowhere"],
        env={**os.environ, failpoints.ENVIRONMENT_VARIABLE: "sweep.before_delet=kill"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "did you mean sweep.before_delete" in ran.stderr


def test_code_that_passes_an_undeclared_failpoint_is_an_error_when_any_is_configured() -> None:
    """Declaring it is what brings a failpoint into the matrix; with nothing configured nothing is looked up."""
    failpoint("nowhere.declared")
    configure("here=pass")
    with pytest.raises(UndeclaredFailpointError, match=r"nowhere\.declared"):
        failpoint("nowhere.", "declared")


def test_one_hit_is_the_nth_however_many_threads_pass() -> None:
    """Uploads pass a failpoint from several threads: exactly one of them is the one that was asked for."""
    configure("here=error@500")

    def hit(_: int) -> int:
        try:
            failpoint("here")
        except FailpointError:
            return 1
        return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(hit, range(1000))) == 1


STOPPED = """
import mmap, sys, threading
from ckptd.protos import failpoints

page = mmap.mmap(int(sys.argv[1]), 4096)
failpoints.configure("here=stop", known={"here"})

def busy():
    while True:
        sum(range(1000))

def passes():
    for _ in range(50):
        page[0] = 0
        failpoints.failpoint("here")
        page[0] = 1
        while not page[1]:
            pass
        page[1] = 0

for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
worker = threading.Thread(target=passes)
worker.start()
worker.join()
"""


def test_nothing_after_a_stop_runs_before_the_process_goes_on(tmp_path: Path) -> None:
    """However many threads compete: a paused coordinator that had written its decision would be no zombie."""
    early, stops = 0, 0
    with (tmp_path / "page").open("w+b") as file:
        file.truncate(4096)
        page = mmap.mmap(file.fileno(), 4096)
        command = [sys.executable, "-c", STOPPED, str(file.fileno())]
        with subprocess.Popen(command, pass_fds=[file.fileno()]) as child:
            while True:
                _, status = os.waitpid(child.pid, os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    child.returncode = os.waitstatus_to_exitcode(status)
                    break
                stops += 1
                early += page[0]
                os.kill(child.pid, signal.SIGCONT)
                page[1] = 1
    assert (child.returncode, stops, early) == (0, 50, 0)
