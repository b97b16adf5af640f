"""Whether replicas may go uncompared in a step: what a timeline's decisions say about the last comparison.

Pure. Owns: the setting's text, and what backs a coordinator's word that a step need not be compared. Does not own: when a
step is compared (`coordinator.comparing`), or comparing (`coverage`). Invariant: a step goes uncompared only where a step
before it, of the same timeline and saved with the same plan, was compared and committed, and none since was found to
differ; whoever knows of no such step refuses. The coordinator learns this from its own decisions, one that adopts from the
newest record and what follows it, a reader from the step's record: the same function answers all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Aborted, Committed, Record, StepRef

from .keys import StepId

ALWAYS, FIRST = 1, 0
"""What `parse_policy` makes of "always" and "first"."""
_EVERY = re.compile(r"every:([1-9][0-9]{0,5})")


def parse_policy(text: str) -> int:
    """Return after how many steps at the latest one is compared: 1 for "always" (and "", of older clients), 0 for "first".

    Raises:
        ValueError: it is neither of these, nor "every:N" with N from 1 to 999999.
    """
    if text in {"", "always"}:
        return ALWAYS
    if text == "first":
        return FIRST
    found = _EVERY.fullmatch(text)
    if found is None:
        raise ValueError(f"verify_replicas {text!r} is none of always, first, every:N (N from 1 to 999999)")
    return int(found[1])


@dataclass(kw_only=True, slots=True)
class Comparisons:
    """What is known of one timeline.

    Attributes:
        timeline: The timeline; steps of another one back nothing.
        step: The newest step that was compared and committed, of those saved with `plan_digest`; -1: none is known.
        plan_digest: Lowercase hex; "" backs nothing.
        differed: The newest step whose replicas were found to differ; -1: none.
    """

    timeline: str
    step: int = -1
    plan_digest: str = ""
    differed: int = -1

    @classmethod
    def of_history(cls, record: Record, aborted: Mapping[StepId, Aborted]) -> Comparisons:
        """Return what the newest record says of its own timeline, and the abort markers behind it.

        A start record says nothing: what was compared before it was compared by another run, or before a restore.
        """
        known = cls(timeline=record.timeline)
        if record.WhichOneof("kind") == "decision" and record.decision.WhichOneof("outcome") == "committed":
            known.note_committed(record.decision.step, record.decision.committed)
        for step, marker in aborted.items():
            if str(step.timeline) == record.timeline:
                known.note_refused(step.step, marker.why)
        return known

    def note_committed(self, step: int, commit: Committed) -> None:
        """A step of the timeline is committed; steps are noted in their order."""
        self.step = commit.compared_in.step if commit.HasField("compared_in") else step
        self.plan_digest = commit.plan_digest

    def note_refused(self, step: int, why: Error) -> None:
        """A step of the timeline does not count."""
        if why.reason == error_pb2.REASON_REPLICAS_DIFFER:
            self.differed = max(self.differed, step)

    def backs(self, word: StepRef, plan_digest: str) -> bool:
        """Say whether a step that was saved with this plan may go uncompared on this word."""
        return (
            bool(plan_digest)
            and (word.timeline, plan_digest) == (self.timeline, self.plan_digest)
            and self.differed < self.step
            and word.step <= self.step
        )

    def last(self) -> StepRef:
        """Return the step a record names as the last one that was compared."""
        return StepRef(step=self.step, timeline=self.timeline)
