"""The checked-in root of every released format lists, verifies and reads for ever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden.make_golden import NODES, state

from ckptd.daemon.catalog import StepState, read_catalog, read_commits
from ckptd.daemon.index import chunk_refs, load_index
from ckptd.daemon.log_reader import read_committed
from ckptd.daemon.sweep import sweep
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos.snapshot_pb2 import RankSection, Value
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.local import LocalStore

FOLDER = Path(__file__).parent.parent / "golden"
FORMATS = ["format-1"]


@pytest.fixture(params=FORMATS)
def golden(request: pytest.FixtureRequest) -> tuple[ObjectStore, dict[str, object]]:
    """A golden root and what readers must find in it."""
    expected = json.loads((FOLDER / f"{request.param}.json").read_text("utf-8"))
    return LocalStore(FOLDER / request.param), expected


def test_s138_a_golden_root_lists_as_ever(golden: tuple[ObjectStore, dict[str, object]]) -> None:
    """Committed, quarantined and incomplete steps, the latest, and every state digest."""
    store, expected = golden
    catalog = read_catalog(store)
    of_state = {state: [step for step in catalog.steps if step.state is state] for state in StepState}
    assert [[s.id.step, str(s.id.timeline)] for s in of_state[StepState.COMMITTED]] == expected["committed"]
    assert [s.id.step for s in of_state[StepState.QUARANTINED]] == expected["quarantined"]
    incomplete = {str(s.id.step): list(s.why.ranks) for s in of_state[StepState.INCOMPLETE] if s.why is not None}
    assert incomplete == expected["incomplete"]
    assert catalog.latest is not None
    assert catalog.latest.step == expected["latest"]
    digests = expected["state_digests"]
    assert isinstance(digests, dict)
    for step, commit in read_commits(store, catalog, workers=2):
        assert commit.state_digest == digests[str(step.id)]


def test_s138_a_golden_root_verifies(golden: tuple[ObjectStore, dict[str, object]]) -> None:
    """Every listed and quarantined step is good: whole, all bytes, fingerprints and the state digest."""
    store, _ = golden
    catalog = read_catalog(store)
    assert catalog.newest is not None
    refs = [step.ref for step in catalog.steps if step.ref is not None]
    assert len(refs) == 4
    for ref in refs:
        report = verify_step(store, catalog.newest, ref)
        assert report.verdict is Verdict.GOOD, report.bad


def test_s138_a_golden_root_reads_bit_for_bit(golden: tuple[ObjectStore, dict[str, object]]) -> None:
    """Every shard and object of every rank has the bytes that were saved, also those that lie in older steps' chunks."""
    store, _ = golden
    catalog = read_catalog(store)
    newest = catalog.newest
    assert newest is not None
    for ref in newest.listed:
        streams: dict[int, bytes] = {}
        sections: dict[int, RankSection] = {}
        for index in read_committed(store, newest, ref).indexes:
            _, _, of_node = load_index(index, store.get(index.key))
            sections |= of_node
        for rank, section in sections.items():
            streams[rank] = b"".join(store.get(chunk.key) for chunk in chunk_refs(section))
        assert sorted(streams) == sorted(rank for ranks in NODES.values() for rank in ranks)
        for rank, section in sections.items():
            shards, objects = state(rank, ref.step)
            for row, shard in enumerate(shards):
                writer = section.writer[row]
                names = [sections[writer].shards.names[at] for at in sections[writer].shards.name]
                offset = sections[writer].stream_offset[names.index(shard.name)]
                found = streams[writer][offset : offset + shard.values.nbytes]
                assert found == np.ascontiguousarray(shard.values).tobytes(), (ref.step, rank, shard.name)
            for name, at, size in zip(section.object_names, section.object_offset, section.object_length, strict=True):
                assert streams[rank][at : at + size] == objects[name]
                assert Value.FromString(objects[name]).mapping.values[1].integer == rank
            assert list(section.aliases.alias) == ["tied"]


def test_a_sweep_of_a_golden_root_would_take_its_one_dead_object(
    golden: tuple[ObjectStore, dict[str, object]],
) -> None:
    """What a sweep deletes is part of the format too: here the marker of the aborted step 30 alone."""
    store, _ = golden
    planned = sweep(store, dry_run=True)
    assert [info.key for info in planned.delete] == ["log/00000001-0000000000a1.000000000030.json"]
