"""Reading what happened: lines of event logs and outputs, growing files, digest files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from ckptd.chaos import cache
from ckptd.chaos.cli import app
from ckptd.chaos.evidence import Evidence, EvidenceError, read_audits, read_digests
from ckptd.chaos.history import Event, History, parse_event, parse_output, step_in_flight
from ckptd.chaos.leading import Undisturbed
from ckptd.chaos.root import DecisionFact, RootFacts
from ckptd.chaos.watch import Tail, Watcher


def test_lines_of_the_script_become_events() -> None:
    """Steps and restores are understood, also behind a launcher's prefix; anything else is no event."""
    step = parse_output("step 12 loss 0x1.8p+1", "script 1", 5.0)
    assert step == Event(t=5.0, source="script 1", kind="step", fields={"step": 12, "loss": "0x1.8p+1"})
    rate = parse_output("step 12 loss 0x1.8p+1 lr 0x1p-10", "script 1", 5.0)
    assert rate is not None
    assert rate.fields == {"step": 12, "loss": "0x1.8p+1", "lr": "0x1p-10"}
    prefixed = parse_output("[default0]: restored step=7 tier=memory", "script 2", 6.0)
    assert prefixed is not None
    assert (prefixed.kind, prefixed.step, prefixed.fields["tier"]) == ("restored", 7, "memory")
    assert parse_output("sha256 rank=0 all abc", "script 1", 5.0) is None


def test_a_line_that_is_no_event_is_left_out() -> None:
    """Half a line, another JSON value or a missing kind do no harm."""
    assert parse_event('{"t": 1.5, "kind": "staged", "step": "4"}', "agent 0") == Event(
        t=1.5, source="agent 0", kind="staged", fields={"step": "4"}
    )
    for line in ('{"t": 1.5, "ki', "[]", '{"t": 1}', "", '{"t": null, "kind": "x"}'):
        assert parse_event(line, "agent 0") is None


def test_a_step_may_stand_as_text() -> None:
    """64-bit integers of protobuf's JSON mapping are text."""
    assert Event(t=0, source="agent 0", kind="staged", fields={"step": "4"}).step == 4


def test_a_growing_file_gives_each_whole_line_once(tmp_path: Path) -> None:
    """A file may come later, and a line may be finished later."""
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"a\nb")
    assert tail.lines() == ["a"]
    with path.open("ab") as file:
        file.write(b"c\nd\n")
    assert tail.lines() == ["bc", "d"]
    assert tail.lines() == []


def test_a_watcher_sorts_what_it_sees_at_once_by_time(tmp_path: Path) -> None:
    """Events of two agents come in the order in which they happened."""
    history = History()
    watcher = Watcher(history)
    for node, t in ((0, 2.0), (1, 1.0)):
        path = tmp_path / str(node)
        path.write_text(json.dumps({"t": t, "kind": "sealed", "step": 1}) + "\n")
        watcher.follow_events(path, f"agent {node}")
    assert [event.source for event in watcher.poll()] == ["agent 1", "agent 0"]
    assert len(history) == 2


def test_the_step_in_flight_is_the_oldest_one_begun_and_not_decided() -> None:
    """A failpoint names no step; the history does."""
    history = History()
    for t, kind, step in ((1, "begun", 5), (2, "begun", 10), (3, "decided", 5), (9, "decided", 10)):
        history.add(Event(t=t, source="agent 0", kind=kind, fields={"step": step}))
    assert [step_in_flight(history, t) for t in (0.5, 2.5, 4.0, 9.5)] == [None, 5, 10, None]


def test_digest_files_are_read_rank_by_rank_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """A rank that was killed while it wrote leaves half a line, which says nothing."""
    line = {"step": 4, "when": "step", "loss": "0x1p+0", "coord": {"tp": 0}, "sha256": {"w": "ab"}}
    (tmp_path / "list.10").write_text(json.dumps({**line, "rank": 10}) + "\n")
    (tmp_path / "list.2").write_text(json.dumps({**line, "rank": 2}) + "\n" + '{"step": 5, "ra')
    assert [(entry.rank, entry.step) for entry in read_digests(tmp_path / "list")] == [(2, 4), (10, 4)]


def test_what_clients_said_may_be_missing_is_found_in_the_output(tmp_path: Path) -> None:
    """Each finding once, whatever the script's logging puts before it."""
    for launch, text in (("1", "WARNING rank 0: this may be missing from snapshots: 1 buffers: a\nx\n"), ("2", "y\n")):
        (tmp_path / "launches" / launch).mkdir(parents=True)
        (tmp_path / "launches" / launch / "0.err").write_text(text * 2)
    assert read_audits(tmp_path) == ("1 buffers: a",)


def test_a_damaged_digest_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    """A whole line that cannot be read is never skipped."""
    (tmp_path / "list.0").write_text("{}\n")
    with pytest.raises(EvidenceError, match=r"list\.0:1: no list of digests"):
        read_digests(tmp_path / "list")


def test_evidence_survives_the_cache() -> None:
    """What was kept is what comes back."""
    evidence = Evidence(
        losses=((1, "0x1p+0"),),
        digests=read_digests(Path("/nowhere/list")),
        root=RootFacts(
            timelines=("00000001-aaaaaaaaaaaa",),
            decisions=(DecisionFact(step=1, timeline="t", committed=True, state_digest="d", record="r"),),
            listed=((1, "t"),),
        ),
    )
    assert Evidence.from_json(evidence.to_json()) == evidence
    with pytest.raises(EvidenceError):
        Evidence.from_json('{"losses": []}')


def test_the_code_digest_sees_the_scripts_own_folder(tmp_path: Path) -> None:
    """An edited module beside the script makes the undisturbed run stale; an edited text does not."""
    script = tmp_path / "train.py"
    script.write_text("a")
    first = cache.code_digest(script)
    (tmp_path / "notes.txt").write_text("b")
    assert cache.code_digest(script) == first
    (tmp_path / "model.py").write_text("b")
    assert cache.code_digest(script) != first


def test_the_code_digest_looks_into_no_virtual_environment_and_no_hidden_folder(tmp_path: Path) -> None:
    """What lies beside the script by chance is not the script's: it is neither read nor waited for."""
    script = tmp_path / "train.py"
    script.write_text("a")
    first = cache.code_digest(script)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    for folder in ("env/lib", ".tox/py"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.py").write_text("b")
    assert cache.code_digest(script) == first
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "model.py").write_text("b")
    assert cache.code_digest(script) != first


def test_two_undisturbed_runs_of_one_entry_are_of_one_time(tmp_path: Path) -> None:
    """A run that was kept alone is no half of a pair: between it and another one the code may have changed."""
    one, other = Evidence(losses=((1, "a"),)), Evidence(losses=((1, "b"),))
    assert cache.load(tmp_path, "k", twice=False) is None
    cache.save(tmp_path, "k", Undisturbed(first=one), begun=7.0)
    assert cache.load(tmp_path, "k", twice=False) == Undisturbed(first=one, cached_at=7.0)
    assert cache.load(tmp_path, "k", twice=True) is None
    cache.save(tmp_path, "k", Undisturbed(first=other, repeat=other), begun=8.0)
    pair = Undisturbed(first=other, repeat=other, cached_at=8.0)
    assert cache.load(tmp_path, "k", twice=True) == cache.load(tmp_path, "k", twice=False) == pair
    (tmp_path / "k.json").write_text(one.to_json())
    assert cache.load(tmp_path, "k", twice=False) is None


@pytest.mark.parametrize("verb", ["run", "soak"])
def test_nothing_is_taken_from_an_earlier_command_unasked(verb: str) -> None:
    """What a script imports from elsewhere, its data and its settings may have changed: only its owner can know."""
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    for words, cached in (([], False), (["--cache"], True), (["--no-cache"], False)):
        with command.make_context(verb, [*words, "node-lost", "--", "train.py"]) as context:
            assert context.params["cached"] is cached
