"""Which kind of failure a difference in content is. Pure.

The rule, for what one rank holds at one moment and should hold otherwise, first match first:

1. *stale content*: every wrong thing is exactly what the same rank held at one other step of the undisturbed run.
2. *wrong replica*: every wrong thing is exactly what another rank held at that step of the undisturbed run, or it is
   one of several copies that were equal there, and at least one other copy of it is right.
3. *silent divergence*: anything else; it is no content that ever was right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.chaos.evidence import DigestList
from ckptd.chaos.verdict import FailureClass


def wrong_names(expected: DigestList, found: DigestList) -> list[str]:
    """Return the names of tensors and objects that differ, or are on one side only, sorted."""
    names = expected.sha256.keys() | found.sha256.keys()
    return sorted(name for name in names if expected.sha256.get(name) != found.sha256.get(name))


def first_difference(undisturbed: Iterable[DigestList], hurt: Iterable[DigestList]) -> DigestList | None:
    """Return the list that diverged first: the lowest step, then the lowest rank, restores before steps; None if none."""
    expected = {(entry.step, entry.rank): entry for entry in undisturbed if entry.when == "step"}
    wrong = [
        entry
        for entry in hurt
        if (entry.step, entry.rank) in expected and wrong_names(expected[entry.step, entry.rank], entry)
    ]
    return min(wrong, key=lambda entry: (entry.step, entry.rank, entry.when), default=None)


def classify(
    found: DigestList, undisturbed: Iterable[DigestList], beside: Iterable[DigestList]
) -> tuple[FailureClass, str]:
    """Return the class of a list that differs, and what it holds instead, in words ("" where that is not known).

    Args:
        found: The list that differs.
        undisturbed: All lists of the undisturbed run.
        beside: All lists of the launch that `found` belongs to.
    """
    right = {(entry.step, entry.rank): entry.sha256 for entry in undisturbed if entry.when == "step"}
    mine = right[found.step, found.rank]
    # What is missing on one side is neither old nor another's.
    wrong = {name: found.sha256.get(name) for name in sorted(mine.keys() | found.sha256.keys())}
    wrong = {name: digest for name, digest in wrong.items() if digest != mine.get(name)}
    if None not in wrong.values():
        others = sorted(step for step, rank in right if rank == found.rank and step != found.step)
        # The nearest older one first: that is the likely origin.
        for step in [*(s for s in reversed(others) if s < found.step), *(s for s in others if s > found.step)]:
            if _holds(right[step, found.rank], wrong):
                return FailureClass.STALE_CONTENT, f"it is the content of step {step}"
        for rank in sorted(rank for step, rank in right if step == found.step and rank != found.rank):
            if _holds(right[found.step, rank], wrong):
                return FailureClass.WRONG_REPLICA, f"it is what rank {rank} should hold"
    return _by_copies(found, wrong, right, beside)


def _by_copies(
    found: DigestList,
    wrong: Iterable[str],
    right: Mapping[tuple[int, int], Mapping[str, str]],
    beside: Iterable[DigestList],
) -> tuple[FailureClass, str]:
    others = [
        entry.sha256
        for entry in beside
        if (entry.step, entry.when) == (found.step, found.when) and entry.rank != found.rank
    ]
    mine = right[found.step, found.rank]
    copies = [other for (step, rank), other in right.items() if step == found.step and rank != found.rank]
    names = list(wrong)
    for name in names:
        is_replicated = name in mine and any(other.get(name) == mine[name] for other in copies)
        if not is_replicated or not any(other.get(name) == mine[name] for other in others):
            return FailureClass.SILENT_DIVERGENCE, ""
    return FailureClass.WRONG_REPLICA, f"other ranks' copies of {names[0]} are right"


def _holds(held: Mapping[str, str], wrong: Mapping[str, str | None]) -> bool:
    return all(held.get(name) == digest for name, digest in wrong.items())
