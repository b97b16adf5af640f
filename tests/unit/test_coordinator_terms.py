"""What the wishes of all ranks mean together, on the real coordinator: before the start record, and one answer for all."""

from __future__ import annotations

import itertools

import pytest
from fixtures.coordinated import NODES, Play, Run
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.stored import StoredParts
from ckptd.daemon.any_mesh import names_of, offer, with_names
from ckptd.daemon.coordinator.terms import Terms
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.agent_pb2 import StoredPart, WantTerms
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage
from ckptd.protos.error_pb2 import Error
from ckptd.protos.shard_table import ShardRow
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, RankSection


def restoring(play: Play) -> Run:
    """Return a second run to which step 1 is on offer."""
    first = play.run().attach()
    first.save(1)
    first.settle()
    run = play.run().attach()
    for rank in range(2):
        run.say(rank, restore=NodeMessage.Restore(rank=rank))
    run.settle()
    assert run.last("restore_chosen").restore_chosen.step.step == 1
    return run


def want(run: Run, rank: int, terms: WantTerms | None) -> None:
    attempt = run.last("restore_chosen").restore_chosen.attempt
    run.say(rank, restore_wanted=NodeMessage.RestoreWanted(rank=rank, attempt=attempt, terms=terms))
    run.settle()


def ready(run: Run) -> None:
    attempt = run.last("restore_chosen").restore_chosen.attempt
    for rank in range(2):
        run.say(rank, restore_ready=NodeMessage.RestoreReady(rank=rank, attempt=attempt))
    run.settle()


def told(run: Run, kind: str) -> list[CoordinatorMessage]:
    """Return what every node was told of a kind; all were told the same."""
    found = [[m for to, m in run.said if to == node and m.WhichOneof("kind") == kind] for node in NODES]
    assert found[0] == found[1]
    return found[0]


def terms(unused: int, *, strict: bool = True, choice: bytes = b"c") -> WantTerms:
    return WantTerms(choice=choice, strict=strict, unused=bytes([unused]))


def test_a_name_that_no_rank_asks_for_fails_the_restore_before_any_record() -> None:
    """Known as soon as all have said what they want, before any byte is there; the log is what it was."""
    play = Play()
    run = restoring(play)
    before = play.store.list("log/")
    want(run, 0, terms(0b11010000))
    assert not told(run, "restore_error")
    want(run, 1, terms(0b01110000))
    [error] = told(run, "restore_error")
    assert error.restore_error.unused == bytes([0b01010000])
    assert "2 only in the snapshot, asked for by no rank" in error.restore_error.error.message
    assert error.restore_error.error.reason == error_pb2.REASON_LAYOUT_MISMATCH
    ready(run)
    assert [info.key for info in play.store.list("log/")] == [info.key for info in before]
    assert not run.is_running()
    assert not told(run, "restore_go")


@pytest.mark.parametrize(("strict", "unused"), [(False, 0b01010000), (True, 0)])
def test_without_a_refusal_all_ranks_hear_which_names_nobody_asked_for(strict: bool, unused: int) -> None:
    """With go; what one rank asks for is asked for."""
    run = restoring(Play())
    want(run, 0, terms(unused | 0b10000000, strict=strict))
    want(run, 1, terms(unused | 0b00100000, strict=strict))
    ready(run)
    [go] = told(run, "restore_go")
    assert go.restore_go.unused == bytes([unused])
    assert run.is_running()


def test_ranks_that_choose_differently_are_named() -> None:
    """The smaller group, in the error of all ranks; before any record."""
    run = restoring(Play())
    for _ in range(2):  # once more after a reconnect
        want(run, 1, terms(0, choice=b"other"))
    want(run, 0, terms(0))
    [error] = told(run, "restore_error")
    assert error.restore_error.error.reason == error_pb2.REASON_RANKS_DISAGREE
    assert "ranks [0]; ranks [1]" in error.restore_error.error.message
    assert error.restore_error.unused == b""
    assert not run.is_running()


def test_a_text_that_fits_nothing_on_any_rank_is_an_error() -> None:
    """The lowest rank's, with its hint; where it fits something on one rank, all is well."""
    wrong = [Error(message=f"as rank {rank} says it", object="model/x") for rank in range(2)]
    run = restoring(Play())
    want(run, 1, WantTerms(matched=["model"], unmatched=[wrong[1]]))
    want(run, 0, WantTerms(matched=["model"], unmatched=[wrong[0]]))
    assert [m.restore_error.error.message for m in told(run, "restore_error")] == ["as rank 0 says it"]
    run = restoring(Play())
    want(run, 0, WantTerms(matched=["model"], unmatched=[wrong[0]]))
    want(run, 1, WantTerms(matched=["model", "model/x"]))
    ready(run)
    assert told(run, "restore_go")


@pytest.mark.parametrize("older", ["agent", "client"])
def test_beside_an_older_version_nothing_is_compared(older: str) -> None:
    """An older agent says nothing of what its rank wants, an older client gives no terms: the answer says so."""
    run = restoring(Play())
    want(run, 0, terms(0b1, choice=b"c"))
    if older == "client":
        want(run, 1, None)
    ready(run)
    [go] = told(run, "restore_go")
    assert not go.restore_go.HasField("unused")


def test_what_is_said_again_counts_once() -> None:
    """After a reconnect, with what another attempt was told passed over."""
    run = restoring(Play())
    attempt = run.last("restore_chosen").restore_chosen.attempt
    run.say(1, restore_wanted=NodeMessage.RestoreWanted(rank=1, attempt=attempt + 1, terms=terms(0xFF)))
    for _ in range(2):
        want(run, 0, terms(0b1))
    assert not told(run, "restore_error")
    want(run, 1, terms(0))
    ready(run)
    assert [m.restore_go.unused for m in told(run, "restore_go")] == [b"\0"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([b"a", b"a", b"b"])), max_size=3))
def test_the_verdict_does_not_depend_on_the_order(ranks: list[tuple[int, bool, bytes]]) -> None:
    """Whoever comes first."""
    verdicts = []
    for order in itertools.permutations(range(len(ranks))):
        joined = Terms()
        for rank in order:
            unused, strict, choice = ranks[rank]
            wrong = [Error(object="x", message=f"of {rank}")] if unused & 1 else []
            joined.take(rank, WantTerms(choice=choice, strict=strict, unused=bytes([unused]), unmatched=wrong))
        refusal = joined.refusal(1)
        verdicts.append((joined.unused(), None if refusal is None else (refusal[0].SerializeToString(), refusal[1])))
    assert len(set(verdicts)) == 1


def sections() -> dict[int, RankSection]:
    made = {}
    for rank in range(2):
        rows = [
            ShardRow(
                name=name, dtype="int8", global_shape=(1,), offset=(0,), length=(1,), scope=scope, nbytes=1, group=0
            )
            for name, scope in [("b/w", SCOPE_GLOBAL), (f"own{rank}", SCOPE_PER_RANK), ("b.w", SCOPE_GLOBAL)]
        ]
        section = RankSection(rank=rank, coordinate=[rank], object_names=["loader", "é"])
        section.shards.CopyFrom(shard_table.build(rows))
        section.aliases.alias.append(f"tied{rank}")
        section.aliases.target.append("b/w")
        made[rank] = section
    return made


def test_client_and_agent_mean_the_same_names_by_a_bit() -> None:
    """The client's list is made of the offer, the agent's of the sections it was made of."""
    parts = StoredParts(found=StoredPart.Found(other_mesh=True))
    for part in offer(sections()):
        parts.take(part)
    names = names_of(sections())
    assert parts.stored({}, 2).names == names == ["b.w", "b/w", "loader", "own0", "own1", "tied0", "tied1", "é"]
    named = with_names(Error(message="2 names"), bytes([0b01000100]), sections())
    assert (named.message, named.object) == ("2 names: b/w, tied0", "b/w")
