"""What a root would hold after a sweep: exactly what its newest record needs, or a name of what is too much."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.at_rest import make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.chaos import leftovers
from ckptd.chaos.root import RootFacts, facts_of, read_root
from ckptd.daemon.keys import StepId, chunk_key, index_key
from ckptd.daemon.sweep import SweepPlan, sweep
from ckptd.storage_backends.memory import MemoryStore


def built(*, keep_last: int = 0) -> tuple[MemoryStore, RootBuilder]:
    store = MemoryStore()
    root = RootBuilder(store)
    root.start()
    for step in (10, 20, 30):
        root.commit(step, keep_last=keep_last)
    return store, root


def left(facts: RootFacts) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    return facts.unaccounted, facts.sweep_takes_needed, facts.sweep_error


def test_a_whole_root_is_accounted_for() -> None:
    """Job, claim, records, indexes and chunks: each object has somebody who needs it, and nothing is garbage."""
    store, _ = built()
    facts = facts_of(store)
    assert left(facts) == ((), (), "")
    assert facts.objects == len(list(store.list()))
    assert facts.garbage == 0


def test_what_a_sweep_deletes_is_garbage_and_stays_where_it_is() -> None:
    """The evidence of a run is only read."""
    store, _ = built(keep_last=1)
    before = {info.key for info in store.list()}
    facts = facts_of(store)
    assert left(facts) == ((), (), "")
    assert facts.garbage == len(sweep(store, dry_run=True).delete) > 0
    assert {info.key for info in store.list()} == before
    sweep(store)
    assert (facts_of(store).garbage, left(facts_of(store))) == (0, ((), (), ""))


def test_restarts_aborts_and_open_steps_are_accounted_for() -> None:
    """What the newest record cannot yet judge stays, and is no leak; a quarantined step is kept too."""
    store, root = built()
    root.quarantine(20)
    root.start(2)
    root.commit(40)
    root.abort(50)
    root.upload(60)
    assert left(facts_of(store)) == ((), (), "")


@pytest.mark.parametrize(
    "key",
    [
        "notes.txt",
        "log/x.json",
        index_key(20, timeline(1), "node-z", "a" * 64),
        "chunks/aa/" + "a" * 64,
    ],
)
def test_an_object_that_nothing_needs_and_no_sweep_deletes_is_named(key: str) -> None:
    """Foreign objects, and an index that a listed step's decision does not name."""
    store, _ = built()
    store.put(key, b"x")
    assert left(facts_of(store)) == ((key,), (), "")


def test_what_an_agent_left_that_was_killed_as_it_tried_the_store_is_no_leak() -> None:
    """A later sweep takes it; a name that only begins so is foreign."""
    store, _ = built()
    store.put(f"probe/{1_790_000_000:010x}-{'a' * 24}", b"x")
    assert left(facts_of(store)) == ((), (), "")
    store.put("probe/x", b"x")
    assert left(facts_of(store)) == (("probe/x",), (), "")


def test_a_chunk_of_a_listed_step_that_its_indexes_do_not_name_is_garbage() -> None:
    """The sweep finds it, so it is no leak."""
    store, _ = built()
    store.put(chunk_key("a" * 64, 20, timeline(1)), b"x")
    facts = facts_of(store)
    assert (left(facts), facts.garbage) == (((), (), ""), 1)


def test_a_sweep_that_would_take_what_is_needed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed is what the newest record says, not what the sweep thinks."""
    store, root = built()
    key = root.chunks(30)[0]
    info = next(info for info in store.list() if info.key == key)

    def greedy(_store: object, *, dry_run: bool) -> SweepPlan:
        assert dry_run
        return SweepPlan(delete=[info], kept=0, dead_steps=[StepId(timeline(1), 30)])

    monkeypatch.setattr(leftovers, "sweep", greedy)
    assert left(facts_of(store)) == ((), (key,), "")


def test_a_root_whose_last_start_died_is_accounted_for_as_if_that_were_settled() -> None:
    """As after `ckptd sweep --claim`, which is not done: the evidence of a run is only read."""
    store, _ = built(keep_last=1)
    garbage = facts_of(store).garbage
    put_claim(store, make_claim(timeline(2)))
    store.put("notes.txt", b"x")
    before = {info.key for info in store.list()}
    facts = facts_of(store)
    assert left(facts) == (("notes.txt",), (), "")
    assert facts.garbage == garbage > 0
    assert {info.key for info in store.list()} == before


def test_a_root_that_cannot_be_swept_says_why() -> None:
    """The reason is the sweep's own."""
    store, _ = built()
    store.delete(next(info.key for info in store.list("index/")))
    assert "gone" in facts_of(store).sweep_error


def test_files_that_a_dead_writer_left_beside_a_local_root_are_named(tmp_path: Path) -> None:
    """They have no key, and no listing shows them."""
    (tmp_path / "a root" / ".ckptd-tmp").mkdir(parents=True)
    (tmp_path / "a root" / ".ckptd-tmp" / "half").write_text("x")
    facts = read_root((tmp_path / "a root").as_uri(), {})
    assert facts.unaccounted == (".ckptd-tmp/half",)
