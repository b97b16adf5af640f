"""What a root holds, from the store alone."""

from __future__ import annotations

import pytest
from fixtures.at_rest import make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.daemon.catalog import StepState, read_catalog, read_commits
from ckptd.daemon.errors import NotFoundError
from ckptd.daemon.keys import decision_key
from ckptd.storage_backends.memory import MemoryStore


@pytest.fixture
def root() -> RootBuilder:
    """A root with step 10 committed."""
    made = RootBuilder(MemoryStore())
    made.start()
    made.commit(10)
    return made


def test_s003_complete_incomplete_and_uncommitted_are_told_apart(root: RootBuilder) -> None:
    """A committed step, one whose node's index is missing (named), one that is whole but not committed, an aborted one."""
    root.upload(20, ["node-a"])
    root.upload(30)
    root.abort(40, "rank 1 died")
    steps = {step.id.step: step for step in read_catalog(root.store).steps}
    assert {number: step.state for number, step in steps.items()} == {
        10: StepState.COMMITTED,
        20: StepState.INCOMPLETE,
        30: StepState.UNCOMMITTED,
        40: StepState.ABORTED,
    }
    why = steps[20].why
    assert why is not None
    assert (why.node, list(why.ranks)) == ("node-b", [1])
    assert "rank 1 (node node-b, host-node-b)" in why.message
    assert steps[40].why is not None
    assert steps[40].why.message == "rank 1 died"


def test_s003_a_step_without_its_record_is_uncommitted(root: RootBuilder) -> None:
    """When the commit record is missing, the step before it is the latest, and the step is shown as uncommitted."""
    root.commit(20)
    root.store.delete(decision_key(timeline(1), 20))
    catalog = read_catalog(root.store)
    assert catalog.step(20).state is StepState.UNCOMMITTED
    assert catalog.latest is not None
    assert catalog.latest.step == 10


def test_what_is_older_than_the_newest_record_and_not_listed_is_not_shown(root: RootBuilder) -> None:
    """Dead steps are garbage for the sweep, not something to choose from."""
    root.upload(20)
    root.abort(25)
    root.commit(30, keep_last=1)
    assert [step.id.step for step in read_catalog(root.store).steps] == [30]


def test_a_claim_without_a_record_makes_the_answer_provisional(root: RootBuilder) -> None:
    """R6: while a newer timeline is starting the list may still change."""
    assert not read_catalog(root.store).is_provisional
    put_claim(root.store, make_claim(timeline(2)))
    assert read_catalog(root.store).is_provisional
    root.start(3)
    assert not read_catalog(root.store).is_provisional


def test_one_number_in_two_timelines_means_the_newer_one(root: RootBuilder) -> None:
    """A step number alone asks for the newest timeline's committed step."""
    root.commit(20)
    root.start(2, origin=root.listed[0], rollback=False)
    root.commit(20)
    catalog = read_catalog(root.store)
    assert [str(step.id.timeline) for step in catalog.steps if step.id.step == 20] == [
        str(timeline(1)),
        str(timeline(2)),
    ]
    assert catalog.step(20).id.timeline == timeline(2)
    root.start(3, origin=root.listed[0])
    root.upload(10, ["node-a"])
    assert read_catalog(root.store).step(10).state is StepState.COMMITTED


def test_s016_a_step_that_is_not_there_is_not_found(root: RootBuilder) -> None:
    """The error lists the committed steps."""
    root.commit(20)
    with pytest.raises(NotFoundError, match=r"no step 50.*committed steps: 10, 20"):
        read_catalog(root.store).step(50)


def test_s017_an_empty_root_holds_no_job() -> None:
    """No job: not found, with the root's URL."""
    with pytest.raises(NotFoundError, match="memory://private holds no job"):
        read_catalog(MemoryStore())


def test_a_job_without_a_commit_is_listed_as_empty() -> None:
    """A start record without steps: an empty list, no latest."""
    root = RootBuilder(MemoryStore())
    catalog = read_catalog(root.store)
    assert (catalog.steps, catalog.latest, catalog.newest) == ([], None, None)
    root.start()
    catalog = read_catalog(root.store)
    assert (catalog.steps, catalog.latest) == ([], None)
    with pytest.raises(NotFoundError, match="no committed step"):
        catalog.step(None)


def test_a_quarantined_step_is_shown_as_such(root: RootBuilder) -> None:
    """It stays visible with its reason, and is not the latest."""
    root.commit(20)
    root.quarantine(20)
    root.start(2)
    catalog = read_catalog(root.store)
    assert catalog.step(20).state is StepState.QUARANTINED
    assert catalog.latest is not None
    assert catalog.latest.step == 10


def test_commits_are_read_in_order(root: RootBuilder) -> None:
    """Details of every committed step, ascending, by parallel requests."""
    for step in range(20, 60, 10):
        root.commit(step)
    catalog = read_catalog(root.store)
    found = list(read_commits(root.store, catalog, workers=3))
    assert [step.id.step for step, _ in found] == [10, 20, 30, 40, 50]
    assert all(commit.totals.chunks == 3 for _, commit in found)
