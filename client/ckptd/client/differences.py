"""What does not fit between a step and what is tracked, in one error each.

Pure. Owns: the texts, and the hints that name the way out. Does not own: finding the differences (`targets`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ckptd.protos import error_pb2

from .errors import InvalidRequest
from .patterns import near

_CANDIDATES = 64
_SHOWN = 5
"""Names an error shows of each kind of difference; the counts are complete."""


def misfit(
    missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: Mapping[str, str], *, hint: str, step: int
) -> InvalidRequest:
    """Return the error that lists all differences of one rank."""
    differing = [f"{name} ({why})" for name, why in mismatched.items()]
    parts = [
        f"{len(names)} {word}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for word, names in (
            ("missing in the snapshot", list(missing)),
            ("only in the snapshot", list(unexpected)),
            ("different", differing),
        )
        if names
    ]
    return InvalidRequest(
        f"step {step} does not fit what is tracked: {'; '.join(parts)}",
        reason=error_pb2.REASON_LAYOUT_MISMATCH,
        hint=hint,
        step=step,
        key=next(iter([*mismatched, *missing, *unexpected])),
        phase="restore",
    )


def tied(argument: str, name: str, owner: str) -> InvalidRequest:
    """Return the error for one of two names that share memory."""
    return InvalidRequest(
        f"{argument}: {name} shares memory with {owner}, and one of them is chosen",
        hint="name both or none of them",
        key=name,
        phase="restore",
    )


def two_values(name: str, other: str) -> InvalidRequest:
    """Return the error for one live thing under two names that were stored with other values."""
    return InvalidRequest(
        f"{name}: stored apart from {other} and with other values, here one object is both",
        reason=error_pb2.REASON_LAYOUT_MISMATCH,
        hint=f'restore them into objects of their own, or leave one out: drop=("{name}",)',
        key=name,
        phase="restore",
    )


def nothing_fits(argument: str, text: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error for a text that chooses nothing."""
    similar = near(text, known)
    return InvalidRequest(
        f"{argument}: {text!r} fits no name that is stored or tracked, on any rank",
        hint=f"near it: {', '.join(similar)}" if similar else "",
        key=text,
        phase="restore",
    )


def other_beginning(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str:
    """Return a hint where all missing names are unexpected ones with another beginning."""
    if not missing:
        return ""
    here, known = missing[0], set(unexpected)
    for there in itertools.islice((name for name in unexpected if name[-1] == here[-1]), _CANDIDATES):
        # What follows a differing beginning is the same on both sides, so compare from the end.
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(here[::-1], there[::-1], strict=False))
        length = sum(1 for _ in same)
        old, new = there[: len(there) - length], here[: len(here) - length]
        if all(name.startswith(new) and old + name.removeprefix(new) in known for name in missing):
            return (
                f"stored names begin with {old!r}, those here with {new!r}: wrapped or tracked differently? "
                f"names={{{old!r}: {new!r}}} maps them"
            )
    return ""
