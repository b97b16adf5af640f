"""What a listing of the log says by names alone.

Pure. Owns: claims, records and their order as keys tell them. Does not own: content; a decision object may be a commit
or an abort marker, and only reading it tells which. Invariant: foreign names change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error

from .errors import make_error
from .keys import LOG_PREFIX, ClaimKey, DecisionKey, RecordKey, StartKey, StepId, Timeline, parse_key

MAX_LOOKS = 6
"""Listings in a row that may be older than what they must show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogView:
    """One listing of the log. Made by `parse_log`.

    Attributes:
        claims: Timelines that were claimed, ascending.
        starts: Timelines that have a start record, ascending.
        decisions: Steps that are decided one way or the other, ascending.
    """

    claims: tuple[Timeline, ...]
    starts: tuple[Timeline, ...]
    decisions: tuple[StepId, ...]

    def highest_claim(self) -> Timeline | None:
        """Return the newest claim: whoever holds an older one is fenced (R1)."""
        return self.claims[-1] if self.claims else None

    def is_fenced(self, timeline: Timeline) -> bool:
        """Whether a newer timeline was claimed."""
        highest = self.highest_claim()
        return highest is not None and highest > timeline

    def next_number(self) -> int:
        """Return a number above every timeline that left a trace (R1)."""
        return (
            max((t.number for t in (*self.claims, *self.starts, *(d.timeline for d in self.decisions))), default=0) + 1
        )

    def is_as_new_as(self, key: str) -> bool:
        """Whether this listing is of a time when an object of the log stood: it shows that, or what came after it.

        A listing that does not is of the past, and says nothing of who else has written since. One that does shows everything
        that was put before that object, as long as it is of one moment.

        Args:
            key: Of a claim, a start record or a decision that was seen or put before the listing began.
        """
        parsed = parse_key(key)
        if isinstance(parsed, ClaimKey):
            return bool(self.claims) and self.claims[-1] >= parsed.timeline
        assert isinstance(parsed, StartKey | DecisionKey)
        there: list[RecordKey] = [*map(StartKey, self.starts), *map(DecisionKey, self.decisions)]
        return any(one.position >= parsed.position for one in there)

    def record_keys(self, before: Timeline | None = None) -> list[str]:
        """Return the keys of everything that may be a record, newest first.

        The newest record is the first of these that is no abort marker: read them in this order until one is. That
        takes one GET, and one more for each step that was aborted since.

        Args:
            before: Only those of older timelines, as a resolver needs (R2); None takes all.
        """
        found: list[RecordKey] = [StartKey(t) for t in self.starts if before is None or t < before]
        found += [DecisionKey(step) for step in self.decisions if before is None or step.timeline < before]
        return [str(key) for key in sorted(found, key=lambda key: key.position, reverse=True)]

    def decision_keys(self, timeline: Timeline) -> list[tuple[int, str]]:
        """Return step and key of every decision of a timeline, ascending.

        Behind the newest record of that timeline these can only be abort markers: a commit would be the newest record.
        """
        return [(step.step, str(DecisionKey(step))) for step in self.decisions if step.timeline == timeline]

    def all_keys(self) -> list[str]:
        """Return the keys this view was made of, without foreign ones."""
        every = [*map(ClaimKey, self.claims), *map(StartKey, self.starts), *map(DecisionKey, self.decisions)]
        return sorted(map(str, every))


def parse_log(keys: Iterable[str]) -> LogView:
    """Return what a listing of the log says; foreign keys are ignored."""
    claims: set[Timeline] = set()
    starts: set[Timeline] = set()
    decisions: set[StepId] = set()
    for parsed in map(parse_key, keys):
        match parsed:
            case ClaimKey(timeline):
                claims.add(timeline)
            case StartKey(timeline):
                starts.add(timeline)
            case DecisionKey(step):
                decisions.add(step)
            case _:
                pass
    return LogView(claims=tuple(sorted(claims)), starts=tuple(sorted(starts)), decisions=tuple(sorted(decisions)))


def stale_listing(key: str, url: str) -> Error:
    """Return the error of a LIST that goes on to leave out an object that stands there."""
    return make_error(
        error_pb2.REASON_STORE_FAILED,
        f"{url}: LIST of {LOG_PREFIX} does not show {key!r}, which stands there, nor anything newer",
        hint="the store answers LIST from a cache: it must be strongly consistent; turn off what caches in between",
        object=key,
    )
