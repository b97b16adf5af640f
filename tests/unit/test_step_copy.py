"""A copied step is a root of its own: listed, proved, swept and copied on like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.at_rest import timeline
from fixtures.roots import RootBuilder

from ckptd.daemon.catalog import StepState, read_catalog
from ckptd.daemon.cli.copy_step import copy
from ckptd.daemon.errors import CorruptError, DaemonError, FencedError
from ckptd.daemon.keys import JOB, ChunkKey, Timeline, claim_key, decision_key, parse_key
from ckptd.daemon.log_reader import list_log, read_claim, read_newest
from ckptd.daemon.records import job_bytes, parse_claim, to_bytes
from ckptd.daemon.step_copy import Copied, copy_step, plan_copy
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.sweep import sweep
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.storage_backends.base import ObjectStore, PutMode
from ckptd.storage_backends.errors import Unavailable
from ckptd.storage_backends.local import LocalStore
from ckptd.storage_backends.memory import MemoryStore

GOLDEN = Path(__file__).parent.parent / "golden" / "format-1"


@pytest.fixture
def root() -> RootBuilder:
    """A root with steps 10, 20 and 30; the later ones refer to chunks of step 10."""
    made = RootBuilder(MemoryStore())
    made.start()
    for step in (10, 20, 30):
        made.commit(step)
    return made


def copied(source: ObjectStore, target: ObjectStore, step: int) -> Copied:
    """Copy a step."""
    return copy_step(source, target, plan_copy(source, read_stored_step(source, step)))


def content(store: ObjectStore) -> dict[str, bytes]:
    """Return every object of a root."""
    return {info.key: store.get(info.key) for info in store.list()}


def check(target: ObjectStore, source: ObjectStore, step: int) -> None:
    """The target holds that step alone, good to the last byte, with the state digest it has in the source."""
    catalog = read_catalog(target)
    assert [(one.id.step, one.state) for one in catalog.steps] == [(step, StepState.COMMITTED)]
    assert not catalog.is_provisional
    assert catalog.latest == catalog.steps[0].id
    assert catalog.newest is not None
    report = verify_step(target, catalog.newest, catalog.newest.listed[0])
    assert report.verdict is Verdict.GOOD, report.bad
    assert sweep(target).delete == []
    assert read_stored_step(target).commit == read_stored_step(source, step).commit


def test_a_copy_is_a_root_with_that_step_alone(root: RootBuilder) -> None:
    """It verifies, a sweep finds nothing in it, and chunks that bear an older step's name are among its own."""
    target = MemoryStore()
    done = copied(root.store, target, 30)
    check(target, root.store, 30)
    keys = content(target)
    assert done.objects == len(keys)
    assert done.put_bytes == done.nbytes
    of_steps = {key.id.step for key in map(parse_key, keys) if isinstance(key, ChunkKey)}
    assert of_steps == {10, 30}
    chunks = {key for key in keys if key.startswith("chunks/")}
    assert chunks == set(root.chunks(30)), "nothing but what the step refers to"


@pytest.mark.parametrize("step", [10, 40, 50])
def test_every_step_of_a_golden_root_copies(step: int) -> None:
    """Also a step whose run is long gone; a copy of the copy has the same bytes."""
    source, target, again = LocalStore(GOLDEN), MemoryStore(), MemoryStore()
    copied(source, target, step)
    check(target, source, step)
    copied(target, again, step)
    assert content(again) == content(target)


def test_a_run_that_starts_in_a_copy_goes_on_from_its_step(root: RootBuilder) -> None:
    """The next timeline is above the copied one, lists the step, saves with it as its base, and sweeps by retention."""
    target = MemoryStore()
    copied(root.store, target, 20)
    view, newest = read_newest(target)
    assert newest is not None
    going_on = RootBuilder(MemoryStore())
    going_on.store = target
    going_on.listed = newest.listed
    going_on.commits = dict(root.commits)
    going_on.start(view.next_number())
    going_on.commit(21)
    assert [one.id.step for one in read_catalog(target).steps] == [20, 21]
    going_on.commit(22, keep_last=1)
    sweep(target)
    _, after = read_newest(target)
    assert after is not None
    assert verify_step(target, after, after.listed[-1]).verdict is Verdict.GOOD
    assert "frozen" in read_stored_step(target).sections[0].shards.names


class Failing(MemoryStore):
    """A store that fails at its n-th put."""

    puts_left = 0

    def put(self, key: str, data: bytes | bytearray | memoryview, *, mode: PutMode = PutMode.CREATE) -> None:
        if self.puts_left == 0:
            raise Unavailable("cut", key=key, url=self.url)
        self.puts_left -= 1
        super().put(key, data, mode=mode)


def test_a_copy_cut_off_anywhere_goes_on_and_lists_nothing_before(root: RootBuilder) -> None:
    """At every put: no step is listed before the last one, and the same call ends in the bytes of an undisturbed copy."""
    whole = MemoryStore()
    copied(root.store, whole, 30)
    for cut in range(len(content(whole))):
        target = Failing()
        target.puts_left = cut
        with pytest.raises(Unavailable):
            copied(root.store, target, 30)
        assert read_newest(target)[1] is None, "nothing is committed"
        before = {key for key in content(target) if key.startswith("chunks/")}
        target.puts_left = 1000
        done = copied(root.store, target, 30)
        assert content(target) == content(whole)
        assert done.nbytes - done.put_bytes == sum(len(content(whole)[key]) for key in before), "copied once only"


@pytest.mark.parametrize("kind", ["gone", "altered", "cut"])
@pytest.mark.parametrize("of", ["chunk", "index"])
def test_a_damaged_source_is_named_and_never_committed(root: RootBuilder, kind: str, of: str) -> None:
    """A chunk or index that is gone, has one bit flipped or is short: corrupt, and the target lists nothing."""
    plan = plan_copy(root.store, read_stored_step(root.store, 30))
    key = plan.chunks[0].key if of == "chunk" else plan.step.indexes[0][0].key
    data = bytearray(root.store.get(key))
    root.store.delete(key)
    if kind == "altered":
        data[len(data) // 2] ^= 1
        root.store.put(key, bytes(data))
    elif kind == "cut":
        root.store.put(key, bytes(data[:-1]))
    target = MemoryStore()
    with pytest.raises(CorruptError, match=key):
        copy_step(root.store, target, plan)
    assert read_newest(target)[1] is None


def test_a_target_that_holds_anything_else_is_refused(root: RootBuilder) -> None:
    """Another job, another step of the same job, a foreign object, the root itself: refused before anything is put."""
    other = RootBuilder(MemoryStore(), job="other")
    other.start()
    same = MemoryStore()
    copied(root.store, same, 20)
    foreign = MemoryStore()
    foreign.put("notes.txt", b"mine")
    for target, reason in (
        (other.store, error_pb2.REASON_JOB_MISMATCH),
        (same, error_pb2.REASON_NOT_ALLOWED),
        (foreign, error_pb2.REASON_NOT_ALLOWED),
        (root.store, error_pb2.REASON_NOT_ALLOWED),
    ):
        before = content(target)
        with pytest.raises(DaemonError) as refused:
            copied(root.store, target, 30)
        assert refused.value.error.reason == reason
        assert content(target) == before


def test_a_copy_of_a_living_jobs_step_does_not_point_at_its_coordinator(root: RootBuilder) -> None:
    """The claim is that of the step's timeline without its endpoint: a start in the copy must not find the old job alive."""
    key = claim_key(root.timeline)
    claim = parse_claim(root.store.get(key), key)
    claim.endpoint, claim.certificate_sha256 = "10.0.0.1:5000", "ab" * 32
    root.store.put(key, to_bytes(claim), mode=PutMode.OVERWRITE)
    target = MemoryStore()
    copied(root.store, target, 30)
    found = read_claim(target, root.timeline)
    assert found is not None
    assert (found.endpoint, found.certificate_sha256) == ("", "")
    assert found.nodes == claim.nodes


def test_a_step_whose_claim_is_lost_copies(root: RootBuilder) -> None:
    """The claim in the copy is made of the indexes."""
    root.store.delete(claim_key(root.timeline))
    target = MemoryStore()
    copied(root.store, target, 30)
    check(target, root.store, 30)
    assert list_log(target).highest_claim() == root.timeline


def test_a_start_beside_a_copy_fences_it(root: RootBuilder) -> None:
    """A claim that arrives while the step is copied: the copy is not called good."""

    class Raced(MemoryStore):
        def put(self, key: str, data: bytes | bytearray | memoryview, *, mode: PutMode = PutMode.CREATE) -> None:
            super().put(key, data, mode=mode)
            if key == decision_key(root.timeline, 30):
                super().put(claim_key(Timeline(2, "0" * 12)), b"{}")

    with pytest.raises(FencedError):
        copied(root.store, Raced(), 30)


def test_the_verb_prints_what_it_copied(root: RootBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice: the second call copies nothing more. Nothing on stderr where it is no terminal."""
    source = RootBuilder(LocalStore(tmp_path / "root"))
    source.start(1)
    source.commit(10)
    copy(str(tmp_path / "root"), 10, str(tmp_path / "copy"), json=True)
    first = json.loads(capsys.readouterr().out)
    assert (first["step"], first["timeline"]) == (10, str(timeline(1)))
    assert first["copied_bytes"] == first["bytes"] > 0
    copy(str(tmp_path / "root"), 10, str(tmp_path / "copy"))
    out, err = capsys.readouterr()
    assert ("0 B of them copied now" in out, err) == (True, "")
    check(LocalStore(tmp_path / "copy"), source.store, 10)
    assert LocalStore(tmp_path / "copy").get(JOB) != job_bytes("other", created_at="", version="")
