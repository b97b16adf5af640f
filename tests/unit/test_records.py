"""Records, claims and job.json: what was written is read, and what contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from fixtures.at_rest import NOW, make_claim, timeline

from ckptd.daemon import history, records
from ckptd.daemon.errors import CorruptError, DaemonError, FormatError
from ckptd.daemon.keys import StepId, claim_key, decision_key, index_key, start_key
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Committed, IndexRef, Mesh, Quarantined, Record, Retention, StartRecord, StepRef

T1, T2 = timeline(1), timeline(2)
DIGEST = "ab" * 32


def commit_of(step: int, of: object = T1, base: StepRef | None = None) -> Committed:
    """Return a commit of one node."""
    key = index_key(step, of, "n", DIGEST)  # type: ignore[arg-type]
    return Committed(
        indexes=[IndexRef(node="n", key=key, blake3=DIGEST, bytes=9)],
        world=1,
        mesh=Mesh(axes=["dp"], sizes=[1]),
        base=base,
        metrics={"loss": float("nan"), "b": 1e300},
        tags={"ü": "ß"},
    )


def entry(step: int, of: object = T1, *, holder: str = "", digest: str = DIGEST) -> StepRef:
    """Return a listed step."""
    key = holder or decision_key(of, step)  # type: ignore[arg-type]
    return StepRef(step=step, timeline=str(of), record_key=key, record_blake3=digest)


def decision(step: int = 20, listed: tuple[StepRef, ...] = (), **more: object) -> Record:
    """Return a commit record of timeline 1."""
    arguments = {"committed": commit_of(step), "quarantined": (), "retention": Retention(keep_last=3), **more}
    return history.decision_record(timeline=T1, step=step, listed=listed, created_at=NOW, **arguments)  # type: ignore[arg-type]


def started(**more: object) -> Record:
    """Return a start record of timeline 2 that adopts step 30 of timeline 1."""
    arguments = {
        "listed": [entry(10), entry(20)],
        "adopted": [(entry(30, holder=start_key(T2), digest=""), commit_of(30))],
        "origin": entry(30, holder=start_key(T2), digest=""),
        "rollback": False,
        "quarantined": (),
        "retention": Retention(),
        **more,
    }
    return history.start_record(run_id="r", created_at=NOW, **{"timeline": T2, **arguments})  # type: ignore[arg-type]


def test_what_was_written_is_read_back() -> None:
    """A record, a claim and a job come back equal, NaN metrics and non-ASCII tags too, and are readable as JSON."""
    for record in (decision(20, (entry(10),)), started()):
        data = records.to_bytes(record)
        again = records.parse_record(data, str(records.record_key(record)))
        assert again.SerializeToString(deterministic=True) == record.SerializeToString(deterministic=True)
        assert json.loads(data)["timeline"] == record.timeline
    claim = make_claim(T1)
    assert records.parse_claim(records.to_bytes(claim), claim_key(T1)) == claim
    assert records.parse_job(records.job_bytes("lläma [1]?", created_at=NOW, version="1")).job == "lläma [1]?"


def test_bytes_are_the_same_for_the_same_record() -> None:
    """Writing a record again, after a lost answer, makes the same bytes: equal maps in any order."""
    one, two = decision(20), decision(20)
    two.decision.committed.metrics.clear()
    for name in ("b", "loss"):
        two.decision.committed.metrics[name] = one.decision.committed.metrics[name]
    assert records.to_bytes(one) == records.to_bytes(two)


def test_s138_unknown_fields_are_ignored() -> None:
    """A record of a later program of the same format, with fields this one does not know, is read."""
    mapping = json.loads(records.to_bytes(decision(20)))
    mapping["later"] = {"a": [1]}
    mapping["decision"]["committed"]["later"] = True
    assert records.parse_record(json.dumps(mapping).encode(), decision_key(T1, 20)).decision.step == 20


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(format_version=2, keeps="another shape"), r"format version 2; .* up to 1"),
        (lambda m: m.update(required_features=["crypt"]), r"features crypt"),
    ],
)
def test_s138_what_only_a_newer_program_can_read_is_refused(
    change: Callable[[dict[str, object]], object], expected: str
) -> None:
    """A newer format and an unknown required feature are refused as such, with both numbers or the feature's name."""
    mapping = json.loads(records.to_bytes(decision(20)))
    change(mapping)
    with pytest.raises(FormatError, match=expected) as caught:
        records.parse_record(json.dumps(mapping).encode(), decision_key(T1, 20))
    assert caught.value.error.reason == error_pb2.REASON_FORMAT_UNSUPPORTED


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"[]", b"{}", b'{"format_version": 1}', b"[" * 100_000, b"\xff\xfe"]
)
def test_s136_what_is_no_record_is_refused(data: bytes) -> None:
    """Empty files, pickles, other JSON and hostile nesting end in CORRUPT that names the key, and run nothing."""
    with pytest.raises(FormatError, match=r"log/00000001") as caught:
        records.parse_record(data, decision_key(T1, 20))
    assert caught.value.error.reason == error_pb2.REASON_CORRUPT


def test_an_object_under_another_name_is_refused() -> None:
    """A record copied over another one does not pass for it."""
    data = records.to_bytes(decision(20))
    for key in (decision_key(T1, 21), decision_key(T2, 20), start_key(T1), claim_key(T1)):
        with pytest.raises(FormatError):
            records.parse_record(data, key)
    with pytest.raises(FormatError):
        records.parse_claim(records.to_bytes(make_claim(T1)), claim_key(T2))


def broken(
    change: Callable[[Record], object], make: Callable[[], Record] = lambda: decision(20, (entry(10),))
) -> Record:
    """Return a record after a change."""
    record = make()
    change(record)
    return record


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (broken(lambda r: r.keeps.reverse()), "not in order"),
        (broken(lambda r: r.keeps.append(r.keeps[-1])), "not in order"),
        (broken(lambda r: r.keeps.pop()), "does not list its own step"),
        (broken(lambda r: r.keeps.append(entry(21))), "newer than itself"),
        (broken(lambda r: setattr(r.keeps[0], "record_blake3", "")), "no usable digest"),
        (broken(lambda r: setattr(r.keeps[1], "record_blake3", DIGEST)), "no usable digest"),
        (broken(lambda r: setattr(r.keeps[0], "record_key", decision_key(T1, 11))), "cannot hold"),
        (broken(lambda r: setattr(r.keeps[0], "record_key", start_key(T1))), "cannot hold"),
        (broken(lambda r: setattr(r.keeps[0], "timeline", "x")), "not a timeline id"),
        (broken(lambda r: r.quarantined.append(Quarantined(step=entry(10)))), "both keeps and quarantines"),
        (broken(lambda r: setattr(r.decision, "timeline", str(T2))), "decides step 20 of timeline"),
        (broken(lambda r: r.decision.ClearField("outcome")), "neither committed nor aborted"),
        (broken(lambda r: r.decision.aborted.SetInParent()), "abort marker lists"),
        (broken(lambda r: r.decision.committed.ClearField("indexes")), "names no index"),
        (broken(lambda r: setattr(r.decision.committed.indexes[0], "blake3", "00" * 32)), "not the key of an index"),
        (broken(lambda r: setattr(r.decision.committed, "world", 2)), "do not make a world"),
        (broken(lambda r: r.decision.committed.compared_in.CopyFrom(entry(20))), "no step before it"),
        (
            broken(lambda r: r.decision.committed.compared_in.CopyFrom(StepRef(step=3, timeline=str(T2)))),
            "no step before it",
        ),
        (broken(lambda r: setattr(r.decision.committed, "plan_digest", "5")), "no usable digest"),
        (broken(lambda r: r.ClearField("kind")), "holds a|neither a start"),
        (broken(lambda r: setattr(r, "format_version", 0)), "no format version"),
        (broken(lambda r: r.start.adopted.pop(), started), "holds no such decision"),
        (broken(lambda r: r.keeps.pop(), started), "goes on from"),
        (broken(lambda r: r.start.adopted.append(r.start.adopted[0]), started), "adopted decisions are not in order"),
        (broken(lambda r: r.start.adopted[0].aborted.SetInParent(), started), "which is not committed"),
        (
            broken(lambda r: r.start.MergeFrom(StartRecord(rollback=True)), lambda: started(origin=entry(20))),
            "lists a newer step",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_by_writer_and_reader(record: Record, expected: str) -> None:
    """What a record must not say is checked by one function, before it is written and after it is read."""
    with pytest.raises(FormatError, match=expected):
        records.to_bytes(record)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"a": [0], "b": [0]}, "do not hold the ranks"),
        ({"a": [0, 2]}, "do not hold the ranks"),
        ({"a/b": [0]}, "no usable names"),
    ],
)
def test_a_claim_holds_every_rank_once(nodes: dict[str, list[int]], expected: str) -> None:
    """The claim says which node holds which ranks; a hole there would make `whole` blind."""
    with pytest.raises(FormatError, match=expected):
        records.to_bytes(make_claim(T1, nodes))


def test_a_listed_step_is_read_only_from_the_bytes_it_was_listed_with() -> None:
    """The newest record authenticates older ones: a changed or missing one is CORRUPT, never used."""
    record = decision(10)
    data = records.to_bytes(record)
    listed = history.with_digest(record.keeps, decision_key(T1, 10), data)[0]
    assert records.committed_of(listed, data) == record.decision.committed
    assert records.committed_of(record.keeps[0], data, in_own=True) == record.decision.committed
    with pytest.raises(CorruptError, match="digest"):
        records.committed_of(listed, data + b" ")
    with pytest.raises(CorruptError, match="digest"):
        records.committed_of(record.keeps[0], data)  # an empty digest is good in the record's own list only
    with pytest.raises(CorruptError, match="gone"):
        records.committed_of(listed, None)


def test_a_start_record_holds_what_it_adopts_even_when_it_was_found_bad() -> None:
    """A posthumous step that does not verify is quarantined by the record that decides it, and not listed."""
    bad = Quarantined(step=entry(30, holder=start_key(T2), digest=""), why=Error(message="bad"))
    record = started(origin=entry(20), quarantined=(bad,))
    assert [ref.step for ref in record.keeps] == [10, 20]
    found = records.decision_of(record, StepId(T1, 30))
    assert found is not None
    assert found.committed.indexes


def test_a_bad_posthumous_step_can_be_carried_on_by_later_records() -> None:
    """Its entry gets the digest of the start record that decided it, or no later record could be written."""
    bad = Quarantined(step=entry(30, holder=start_key(T2), digest=""), why=Error(message="bad"))
    record = started(origin=entry(20), quarantined=(bad,))
    data = records.to_bytes(record)
    carried = history.quarantined_with_digest(record, start_key(T2), data)
    assert carried[0].step.record_blake3 == records.digest_hex(data)
    assert records.committed_of(carried[0].step, data)
    later = history.start_record(
        timeline=timeline(3),
        run_id="r",
        listed=history.with_digest(record.keeps, start_key(T2), data),
        adopted=(),
        origin=None,
        rollback=False,
        quarantined=carried,
        retention=Retention(),
        created_at=NOW,
    )
    assert records.to_bytes(later)
    with pytest.raises(FormatError, match="no usable digest"):
        started(timeline=timeline(3), adopted=(), origin=None, quarantined=record.quarantined)


def test_a_rollback_lists_nothing_newer_than_its_origin() -> None:
    """A rollback is a start record with an older `from`; what is newer leaves the list for ever."""
    record = started(origin=entry(10), rollback=True)
    assert [ref.step for ref in record.keeps] == [10]
    with pytest.raises(FormatError, match="does not list"):
        started(origin=entry(15), rollback=True)


def test_a_commit_needs_its_base_in_the_list() -> None:
    """R4: the base named by the indexes must be listed by the timeline's last record."""
    made = commit_of(20, base=entry(10))
    assert [ref.step for ref in decision(20, (entry(10),), committed=made, retention=Retention(keep_last=1)).keeps] == [
        20
    ]
    with pytest.raises(DaemonError, match="no longer listed") as caught:
        decision(20, (entry(9),), committed=made)
    assert caught.value.error.reason == error_pb2.REASON_BASE_DROPPED


def test_bases_in_flight_stay_listed() -> None:
    """A base that a snapshot in flight refers to is kept, or the snapshot would be lost."""
    record = decision(20, (entry(10), entry(15)), retention=Retention(keep_last=1), also_keep=[entry(10)])
    assert [ref.step for ref in record.keeps] == [10, 20]


def test_a_pin_counts_from_the_record_that_names_it() -> None:
    """R8: pins that a listing showed are named in the record and keep their step; foreign names are not."""
    pin = f"pins/{StepId(T1, 10)}.best"
    record = decision(20, (entry(10), entry(15)), retention=Retention(keep_last=1), pins=[pin, "pins/foreign"])
    assert [ref.step for ref in record.keeps] == [10, 20]
    assert list(record.pins_seen) == [pin]
