"""The second column of fingerprints: used on the coordinator's word by all or by none, and never taken for more than it is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from fixtures.at_rest import NOW, Shard, build_node, replicated_state
from fixtures.coordinated import Play, Run
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.daemon import index, log_reader
from ckptd.daemon.coordinator.beginning import segmented_algorithm
from ckptd.daemon.coordinator.state import BeginCall
from ckptd.daemon.coverage import LoadedIndex, NotWhole, Whole, whole
from ckptd.daemon.errors import FormatError
from ckptd.daemon.fingerprints import row_fingerprints
from ckptd.daemon.keys import StepId, Timeline, decision_key
from ckptd.daemon.offline import write_start
from ckptd.daemon.plan import Plan
from ckptd.daemon.records import parse_record
from ckptd.daemon.slabs import SlabReader
from ckptd.daemon.state_diff import diff_steps
from ckptd.daemon.step_copy import copy_step, plan_copy
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2, segmented, shard_table
from ckptd.protos.coordinator_pb2 import NodeMessage
from ckptd.protos.snapshot_pb2 import Claim, Committed, IndexHeader, IndexRef, Mesh, RankSection, SlotTrailer, StepRef
from ckptd.storage_backends.local import LocalStore

State = Mapping[int, tuple[Sequence[Shard], Mapping[str, bytes]]]
KNOWS = {"segmented_algorithms": [segmented.ALGORITHM]}
WANTS = {**KNOWS, "prefers_segmented": True}
NODES = ("node-a", "node-b")
ELEMENTS = 3 * segmented.SEGMENT_BYTES + 77
"""Bytes of a tensor: the two columns hold different values."""


def drifting(*steps: int, asks: Mapping[int, Mapping[str, object]] | None = None) -> Play:
    """Return a play whose ranks hold different values of "w" in these steps, and whose rank 0 has it on a device."""

    def states(node: str, own: StepId) -> State:
        return replicated_state(node, own, diverged=own.step in steps, elements=ELEMENTS)

    return Play(states=states, asks={0: WANTS, 1: KNOWS} if asks is None else asks)


def saved(run: Run, *steps: int) -> Run:
    """Save steps to their ends."""
    for step in steps:
        run.save(step)
        run.settle()
    return run


def commit_of(run: Run, step: int) -> Committed:
    key = decision_key(run.state.timeline, step)
    return parse_record(run.store.get(key), key).decision.committed


def indexes_of(run: Run, step: int) -> dict[str, LoadedIndex]:
    """Return a committed step's indexes by node."""
    refs: list[IndexRef] = list(commit_of(run, step).indexes)
    return {ref.node: index.load_index(ref, run.store.get(ref.key)) for ref in refs}


def rebuilt(run: Run, step: int, change: Mapping[str, object]) -> Whole | NotWhole:
    """Judge a step whose indexes were changed, node by node, behind what an index can be refused for by itself."""
    claim: Claim = run.state.claim
    found = {}
    for node, (ref, header, sections) in indexes_of(run, step).items():
        if node in change:
            change[node](header, next(iter(sections.values())))  # type: ignore[operator]
        found[node] = [(ref, header, sections)]
    return whole(claim, step, found)


# ---------------------------------------------------------------- who says so


def test_a_rank_that_prefers_it_decides_for_all_that_know_it() -> None:
    """Both nodes hear of it; both indexes hold the column and demand it of their readers; the log says so."""
    run = saved(drifting().run().attach(), 1)
    heard = [m.begin.segmented_algorithm for _, m in run.said if m.WhichOneof("kind") == "begin" and m.begin.step == 1]
    assert heard == [segmented.ALGORITHM] * 2
    for _, header, sections in indexes_of(run, 1).values():
        assert header.segmented_algorithm == segmented.ALGORITHM
        assert list(header.required_features) == ["segmented-fingerprints"]
        for section in sections.values():
            own = [writer == section.rank for writer in section.writer]
            first = [section.fingerprints[16 * at : 16 * at + 16] != bytes(16) for at in range(len(own))]
            assert first == own
            assert bytes(16) not in [section.segmented_fingerprints[16 * at : 16 * at + 16] for at in range(len(own))]
    assert [e.fields["segmented"] for e in run.log if e.kind == "begun"] == [segmented.ALGORITHM]


@pytest.mark.parametrize(
    "asks",
    [
        {},
        {0: KNOWS, 1: KNOWS},
        {0: WANTS},
        {0: WANTS, 1: {"segmented_algorithms": ["another"]}},
        {0: {"prefers_segmented": True}},
    ],
    ids=["older ranks", "nobody asks", "one rank is older", "one knows another", "asks for nothing it knows"],
)
def test_without_it_nothing_at_rest_changes(asks: Mapping[int, Mapping[str, object]]) -> None:
    """Where nobody asks, or anybody does not know it: no word, no column, no feature, and the first column is whole."""
    play = drifting(2, asks=asks)
    run = saved(play.run().attach(), 1, 2)
    plain = saved(drifting(2, asks={}).run().attach(), 1, 2)
    assert [run.algorithm(step) for step in (1, 2)] == ["", ""]
    assert run.outcomes() == plain.outcomes() == {1: True, 2: False}
    assert [ref.blake3 for ref in commit_of(run, 1).indexes] == [ref.blake3 for ref in commit_of(plain, 1).indexes]
    for _, header, sections in indexes_of(run, 1).values():
        assert not header.required_features
        assert not any(section.segmented_fingerprints for section in sections.values())


def call(**more: object) -> BeginCall:
    return BeginCall(step=1, layout_digest=b"", deadline=0.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "replica_bytes", "is_worth_it"),
    [(200, 100, True), (1700, 100, True), (1701, 100, False), (100, 0, False), (0, 0, False), (160, 150, True)],
)
def test_a_few_small_replicas_are_not_worth_it(nbytes: int, replica_bytes: int, is_worth_it: bool) -> None:
    """Agents read all that they hold once more for it: replicas are a sixteenth of what is written, or none is asked for."""
    made = Plan(digest=b"p", writers={}, nbytes=nbytes, replica_bytes=replica_bytes)
    wants = call(segmented_algorithms=(segmented.ALGORITHM,), prefers_segmented=True)
    assert segmented_algorithm([wants, wants], made) == (segmented.ALGORITHM if is_worth_it else "")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_it_is_said_when_all_know_it_and_one_prefers_it(ranks: list[tuple[bool, bool]]) -> None:
    """Exactly then."""
    calls = [
        call(segmented_algorithms=(segmented.ALGORITHM,) * knows, prefers_segmented=prefers) for knows, prefers in ranks
    ]
    is_said = all(knows for knows, _ in ranks) and any(prefers for _, prefers in ranks)
    assert bool(segmented_algorithm(calls, Plan(digest=b"", writers={}, nbytes=20, replica_bytes=10))) is is_said


@pytest.mark.parametrize(
    ("policy", "compared"), [("first", [1]), ("every:3", [1, 4]), ("always", [1, 2, 3, 4, 5])], ids=str
)
def test_steps_that_are_not_compared_have_no_second_column(policy: str, compared: list[int]) -> None:
    """The word is for steps that compare; the others hold what they always held, and all are good."""
    play = drifting()
    run = saved(play.run(verify_replicas=policy).attach(), *range(1, 6))
    assert [step for step in range(1, 6) if run.algorithm(step)] == compared
    assert [step for step in range(1, 6) if run.word(step) is None] == compared
    _, newest = log_reader.read_newest(play.store)
    assert newest is not None
    assert [verify_step(play.store, newest, ref).verdict for ref in newest.listed] == [Verdict.GOOD] * 5


# ---------------------------------------------------------------- what is compared


def test_one_bit_of_one_replica_ends_the_step_on_all_ranks() -> None:
    """By tensor, box and ranks, as in the first column."""
    run = saved(drifting(2).run().attach(), 1, 2, 3)
    assert run.outcomes() == {1: True, 2: False, 3: True}
    why = [m.outcome.aborted for _, m in run.said if m.WhichOneof("kind") == "outcome" and m.outcome.step == 2]
    assert len(why) == 2
    assert {one.reason for one in why} == {error_pb2.REASON_REPLICAS_DIFFER}
    assert (why[0].object, list(why[0].ranks)) == ("w", [0, 1])
    assert "box" in why[0].message


def test_the_state_digest_and_diffs_do_not_depend_on_it(tmp_path: Path) -> None:
    """One state has one digest; a copy of the step is good by itself; no diff takes the zeros for bits."""
    play, plain = drifting(), drifting(asks={})
    run, other = saved(play.run().attach(), 1, 2), saved(plain.run().attach(), 1, 2)
    assert [commit_of(run, step).state_digest for step in (1, 2)] == [
        commit_of(other, step).state_digest for step in (1, 2)
    ]
    copy_step(play.store, LocalStore(tmp_path), plan_copy(play.store, read_stored_step(play.store, 2)))
    _, newest = log_reader.read_newest(LocalStore(tmp_path))
    assert newest is not None
    assert verify_step(LocalStore(tmp_path), newest, newest.listed[0]).verdict is Verdict.GOOD
    one, same, first = (
        (step, SlabReader(store, step))
        for store, step in (
            (play.store, read_stored_step(play.store, 2)),
            (plain.store, read_stored_step(plain.store, 2)),
            (plain.store, read_stored_step(plain.store, 1)),
        )
    )
    equal = diff_steps(one, same)
    assert equal.is_equal
    assert equal.read_tensors == 0
    assert [diff.key.name for diff in diff_steps(first, one, values=False).tensors] == ["v", "w"]


def _lost(header: IndexHeader, section: RankSection) -> None:
    section.segmented_fingerprints = bytes(len(section.segmented_fingerprints))


def _other_bit(header: IndexHeader, section: RankSection) -> None:
    at = 16 * next(row for row, writer in enumerate(section.writer) if writer != section.rank)
    data = bytearray(section.segmented_fingerprints)
    data[at] ^= 1
    section.segmented_fingerprints = bytes(data)


def _first_column_instead(header: IndexHeader, section: RankSection) -> None:
    header.segmented_algorithm = ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_lost, error_pb2.REASON_REPLICAS_DIFFER),
        (_other_bit, error_pb2.REASON_REPLICAS_DIFFER),
        (_first_column_instead, error_pb2.REASON_RANKS_DISAGREE),
    ],
)
def test_a_column_that_is_lost_or_of_one_node_alone_makes_no_whole_step(change: object, reason: int) -> None:
    """No value stands for "missing", and nodes are never compared by different columns."""
    run = saved(drifting().run().attach(), 1)
    assert isinstance(rebuilt(run, 1, {}), Whole)
    found = rebuilt(run, 1, {"node-b": change})
    assert isinstance(found, NotWhole)
    assert found.error.reason == reason
    if change is not _lost:  # on all nodes an index is refused by itself, below
        assert isinstance(rebuilt(run, 1, dict.fromkeys(NODES, change)), NotWhole)


def test_an_older_agent_among_them_ends_the_step() -> None:
    """It came back in the midst of the step, knows no column, and seals the first: the step is no mixture of both."""
    run = drifting().run().attach()
    run.begin(1)
    run.settle()
    run.stage(1)
    for rank, node in enumerate(NODES):
        built = build_node(
            run.state.claim,
            1,
            node,
            run.states(node, StepId(run.state.timeline, 1)),
            plan_digest=run.state.plan.digest,
            segmented_algorithm=segmented.ALGORITHM if rank == 0 else "",
        )
        run.say(rank, sealed=NodeMessage.Sealed(timeline=run.timeline, step=1, index=built.put(run.store)))
    run.settle()
    assert run.outcomes() == {1: False}
    told = [m.outcome.aborted for _, m in run.said if m.WhichOneof("kind") == "outcome"]
    assert "xxh3-128/32k and by xxh3-128" in told[0].message


def test_the_next_run_adopts_what_is_equal_and_nothing_else() -> None:
    """Its coordinator and the verbs judge by the column alone: they need not know who asked for it."""
    for is_verb, differs in itertools.product((True, False), (True, False)):
        play = drifting(*([2] if differs else []))
        run = saved(play.run(slots=4).attach(), 1)
        run.begin(2)
        run.settle()
        for rank in (0, 1):
            run.put(2, rank)
        if is_verb:
            found = [step.step for step in write_start(play.store, created_at=NOW, nonce=lambda: "f" * 12).adopted]
        else:
            after = saved(play.run().attach(), 100)
            found = [event.fields["step"] for event in after.log if event.kind == "adopted"]  # type: ignore[misc]
        assert found == ([] if differs else [2])


def test_verify_proves_the_column_of_what_is_written() -> None:
    """A writer's value that does not fit the bytes is found, though all replicas have the same wrong one."""
    for rows in ((0,), (0, 1)):
        play = drifting()
        run = play.run().attach()
        run.begin(1)
        run.settle()
        run.stage(1)
        for rank, node in enumerate(NODES):
            state = run.states(node, StepId(run.state.timeline, 1))
            with pytest.MonkeyPatch.context() as patch:
                real = segmented.digest
                broken = [bytes(shard.values) for at, shard in enumerate(state[rank][0]) if at in rows]
                patch.setattr(segmented, "digest", lambda data: b"x" * 16 if bytes(data) in broken else real(data))  # noqa: B023
                built = build_node(
                    run.state.claim,
                    1,
                    node,
                    state,
                    plan_digest=run.state.plan.digest,
                    segmented_algorithm=segmented.ALGORITHM,
                )
            run.say(rank, sealed=NodeMessage.Sealed(timeline=run.timeline, step=1, index=built.put(run.store)))
        run.settle()
        assert run.outcomes() == {1: True}
        _, newest = log_reader.read_newest(play.store)
        assert newest is not None
        report = verify_step(play.store, newest, newest.listed[0])
        assert report.verdict is Verdict.CORRUPT
        whats = " ".join(bad.what for bad in report.bad)
        assert [name in whats for name in ("'w'", "'v'")] == [0 in rows, 1 in rows]


# ---------------------------------------------------------------- the index by itself


def test_an_older_reader_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeros in the first column are no fingerprints, and it would take them for some."""
    run = saved(drifting().run().attach(), 1)
    ref = commit_of(run, 1).indexes[0]
    monkeypatch.setattr("ckptd.daemon.record_checks.KNOWN_FEATURES", frozenset({"uncompared-replicas"}))
    with pytest.raises(FormatError, match="segmented-fingerprints") as caught:
        index.parse_index(run.store.get(ref.key))
    assert caught.value.error.reason == error_pb2.REASON_FORMAT_UNSUPPORTED


FUZZED = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from(["", segmented.ALGORITHM, "xxh3-128", "xxh3-128/64k", "sha256"]),
        "feature": st.booleans(),
        "column": st.sampled_from(["whole", "none", "short", "long", "zeros", "a gap"]),
        "first": st.sampled_from(["zeros", "all"]),
        "uncompared": st.booleans(),
        "compared_in": st.booleans(),
    }
)


@settings(deadline=None, max_examples=150)
@given(FUZZED)
def test_no_contradiction_is_believed(made: dict[str, object]) -> None:
    """Of every mixture of name, feature, column, first column and marks, only the two that mean something are read."""
    timeline = Timeline.parse("00000001-000000000000")
    state = replicated_state("node-a", StepId(timeline, 5), elements=100)
    claim = Claim(timeline=str(timeline), world=2, mesh=Mesh(axes=["dp"], sizes=[2]))
    built = build_node(claim, 5, "node-a", state, segmented_algorithm=segmented.ALGORITHM)
    plain = build_node(claim, 5, "node-a", state)
    _, header, sections = index.load_index(built.ref, built.index)
    section = sections[0]
    every = section.segmented_fingerprints
    header.segmented_algorithm = str(made["algorithm"])
    del header.required_features[:]
    if made["feature"]:
        header.required_features.append("segmented-fingerprints")
    section.segmented_fingerprints = {
        "whole": every,
        "none": b"",
        "short": every[:-16],
        "long": every + bytes(16),
        "zeros": bytes(len(every)),
        "a gap": bytes(16) + every[16:],
    }[str(made["column"])]
    if made["first"] == "all":
        section.fingerprints = index.load_index(plain.ref, plain.index)[2][0].fingerprints
    if made["uncompared"]:
        section.uncompared = True
        header.required_features.append("uncompared-replicas")
    if made["compared_in"]:
        header.compared_in.CopyFrom(StepRef(step=4, timeline=str(timeline)))
    left = made["uncompared"] and made["compared_in"] and made["first"] == "zeros"
    means_second = (
        made["algorithm"] == segmented.ALGORITHM
        and made["column"] == "whole"
        and made["first"] == "zeros"
        and not made["uncompared"]
        and not made["compared_in"]
    )
    # Zeros in the first column without a mark are fingerprints like any others: they are read, and differ.
    means_first = (
        made["algorithm"] == ""
        and not made["feature"]
        and made["column"] == "none"
        and (left or not made["uncompared"])
    )
    try:
        index.build_index(header, [section])  # names the feature itself where the algorithm is named
        is_read = True
    except FormatError:
        is_read = False
    assert is_read is bool(means_second or means_first)


# ---------------------------------------------------------------- the agent


@pytest.mark.parametrize(
    ("asked", "given", "is_taken"),
    [
        ("", "first", True),
        ("", "second", False),
        ("", "both", False),
        ("", "neither", False),
        (segmented.ALGORITHM, "first", False),
        (segmented.ALGORITHM, "second", True),
        (segmented.ALGORITHM, "both", False),
        (segmented.ALGORITHM, "neither", False),
        (segmented.ALGORITHM, "unnamed", False),
        (segmented.ALGORITHM, "misnamed", False),
    ],
)
def test_an_agent_takes_the_fingerprints_it_asked_for(asked: str, given: str, is_taken: bool) -> None:
    """The word is what counts, not what a trainer makes of it."""
    data = bytes(range(256)) * 300
    state = replicated_state("node-a", StepId(Timeline.parse("00000001-000000000000"), 5), elements=len(data))
    built = build_node(
        Claim(timeline="00000001-000000000000", world=2, mesh=Mesh(axes=["dp"], sizes=[2])), 5, "node-a", state
    )
    rows = index.load_index(built.ref, built.index)[2][0].shards
    trailer = SlotTrailer(replica_row=[1])
    if given in {"first", "both"}:
        trailer.replica_fingerprints = b"1" * 16
    if given not in {"first", "neither"}:
        trailer.segmented_fingerprints, trailer.segmented_algorithm = b"2" * 16, segmented.ALGORITHM
    if given in {"unnamed", "misnamed"}:
        trailer.segmented_algorithm = "" if given == "unnamed" else "sha256"

    def found() -> tuple[bytes, bytes]:
        return row_fingerprints(
            rank=0, rows=rows, writer=[0, 1], offsets=[0, 0], data=memoryview(data), trailer=trailer, algorithm=asked
        )

    if not is_taken:
        with pytest.raises(ValueError, match="the trainer gave fingerprints by"):
            found()
        return
    first, second = found()
    assert first[16:] == (bytes(16) if asked else b"1" * 16)
    assert second == (segmented.digest(data) + b"2" * 16 if asked else b"")


def test_a_rank_that_writes_all_it_holds_has_the_column_too() -> None:
    """Others compare theirs with it; whether it named the function itself does not matter: it has nothing to say by it."""
    data = bytes(range(64))
    rows = shard_table.build([Shard(name="w", values=np.frombuffer(data, dtype=np.uint8)).row()])
    for named in ("", segmented.ALGORITHM):
        made = row_fingerprints(
            rank=0,
            rows=rows,
            writer=[0],
            offsets=[0],
            data=memoryview(data),
            trailer=SlotTrailer(segmented_algorithm=named),
            algorithm=segmented.ALGORITHM,
        )
        assert made == (segmented.digest(data),) * 2
