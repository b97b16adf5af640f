"""Names under a root: exact, ordered, and nothing foreign is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import keys
from ckptd.daemon.keys import (
    ChunkKey,
    ClaimKey,
    DecisionKey,
    IndexKey,
    JobKey,
    Key,
    PinKey,
    StartKey,
    StepId,
    Timeline,
    parse_key,
)
from ckptd.storage_backends.base import checked_key

HEX = "0123456789abcdef"
timelines = st.builds(Timeline, st.integers(1, 10**8 - 1), st.text(HEX, min_size=12, max_size=12))
step_ids = st.builds(StepId, timelines, st.integers(0, 10**12 - 1))
digests = st.text(HEX, min_size=64, max_size=64)
nodes = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
any_key = st.one_of(
    st.builds(JobKey),
    st.builds(ClaimKey, timelines),
    st.builds(StartKey, timelines),
    st.builds(DecisionKey, step_ids),
    st.builds(IndexKey, step_ids, nodes, digests),
    st.builds(ChunkKey, digests, step_ids),
    st.builds(PinKey, step_ids, st.one_of(st.just(""), nodes)),
)


@given(any_key)
def test_every_key_is_read_back_as_what_it_was(key: Key) -> None:
    """A key's text names exactly that key, and every store can hold it."""
    assert parse_key(checked_key(str(key))) == key


@given(any_key, st.integers(0, 200), st.characters(exclude_categories=["Cs"]))
def test_a_changed_key_is_another_one_or_foreign(key: Key, at: int, character: str) -> None:
    """No other text is taken for the same key: one character more makes it another key, or none of ours."""
    text = str(key)
    at = min(at, len(text))
    assert parse_key(text[:at] + character + text[at:]) != key


@given(st.lists(step_ids, max_size=8))
def test_history_is_ordered_by_timeline_then_step(steps: list[StepId]) -> None:
    """Order is (number, nonce, step), and it is the order of the texts of timelines, whatever the step numbers."""
    assert sorted(steps) == sorted(steps, key=lambda s: (s.timeline.number, s.timeline.nonce, s.step))
    assert sorted(map(str, {s.timeline for s in steps})) == [str(t) for t in sorted({s.timeline for s in steps})]


@given(timelines, st.integers(0, 10**12 - 1))
def test_a_start_record_stands_before_every_step_of_its_timeline(timeline: Timeline, step: int) -> None:
    """R2: the start record is the first record of its timeline."""
    assert StartKey(timeline).position < DecisionKey(StepId(timeline, step)).position


@pytest.mark.parametrize(
    "text",
    [
        "",
        "job.json ",
        "JOB.json",
        "log/00000001-0000000000a1.claim.json\n",
        "log/1-0000000000a1.claim.json",
        "log/00000000-0000000000a1.claim.json",
        "log/00000001-0000000000A1.claim.json",
        "log/00000001-0000000000a1.12.json",
        "log/0000000\u0661-0000000000a1.claim.json",
        "index/000000000001.00000001-0000000000a1/a/b." + "0" * 64 + ".pb",
        "chunks/00/" + "1" * 64 + ".000000000001.00000001-0000000000a1",
        "chunks/../" + "1" * 64 + ".000000000001.00000001-0000000000a1",
        "pins/",
        "pins/anything",
        "notes.txt",
    ],
)
def test_foreign_names_are_foreign(text: str) -> None:
    """What is not exactly of one of our shapes is nobody's: never read as ours, never deleted."""
    assert parse_key(text) is None


@pytest.mark.parametrize("step", [-1, 10**12])
def test_s013_a_step_that_does_not_fit_a_key_is_refused(step: int) -> None:
    """Negative and huge steps are refused with the range."""
    with pytest.raises(ValueError, match=r"0\.\.999999999999"):
        StepId(Timeline(1, "0" * 12), step)


def test_builders_refuse_what_cannot_stand_in_a_key() -> None:
    """Nodes and digests are checked where keys are made."""
    timeline = Timeline(1, "0" * 12)
    with pytest.raises(ValueError, match="node"):
        keys.index_key(1, timeline, "a/b", "0" * 64)
    with pytest.raises(ValueError, match="digest"):
        keys.chunk_key("0" * 63 + "G", 1, timeline)
    with pytest.raises(ValueError, match="timeline"):
        Timeline(1, "0" * 11)
    assert len({keys.new_nonce() for _ in range(100)}) == 100
