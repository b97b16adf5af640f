"""What each launch of a run said: where it went on from, its losses, and its SHA-256 lists. Pure.

Owns: which launch a list belongs to. The lists themselves do not say; the launches' restores, which the script
printed, do: a rank's lists are in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptd.chaos.evidence import DigestList
from ckptd.chaos.history import History


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one launch left.

    Attributes:
        launch: Its number, from 1.
        restored: The step it went on from; None for a new beginning.
        restores: Lists right after the restore, rank by rank.
        steps: Lists after steps, rank by rank.
        losses: (step, loss) as printed.
        rates: (step, learning rate) as printed.
    """

    launch: int
    restored: int | None
    restores: tuple[DigestList, ...] = ()
    steps: tuple[DigestList, ...] = ()
    losses: tuple[tuple[int, str], ...] = ()
    rates: tuple[tuple[int, str], ...] = ()


def told_by_launch(history: History, lists: Iterable[DigestList]) -> list[Told]:
    """Return what each launch said, in order of launches."""
    numbers = [int(event.fields["launch"]) for event in history.of("launched", source="harness")]
    restored = {number: _restored(history, number) for number in numbers}
    by_rank: dict[int, list[DigestList]] = {}
    for entry in lists:
        by_rank.setdefault(entry.rank, []).append(entry)
    placed: dict[int, list[DigestList]] = {}
    for rank in sorted(by_rank):
        for number, entry in _placed(by_rank[rank], [(number, restored[number]) for number in numbers]):
            placed.setdefault(number, []).append(entry)
    return [
        Told(
            launch=number,
            restored=restored[number],
            restores=tuple(entry for entry in placed.get(number, []) if entry.when == "restore"),
            steps=tuple(entry for entry in placed.get(number, []) if entry.when == "step"),
            losses=_printed(history, number, "loss"),
            rates=_printed(history, number, "lr"),
        )
        for number in numbers
    ]


def beside(history: History, lists: Sequence[DigestList], entry: DigestList) -> tuple[DigestList, ...]:
    """Return the lists of the launch that `entry` belongs to; all where that cannot be told."""
    for told in told_by_launch(history, lists):
        mine = (*told.restores, *told.steps)
        if any(one is entry for one in mine):
            return mine
    return tuple(lists)


def _placed(mine: Sequence[DigestList], launches: Sequence[tuple[int, int | None]]) -> Iterator[tuple[int, DigestList]]:
    """Give each list of one rank the launch it was written in."""
    at, last = 0, -1
    for entry in mine:
        if entry.when == "restore":
            # A launch may have died before this rank wrote anything.
            begin = at + 1 if last >= 0 else at
            at = next((i for i in range(begin, len(launches)) if launches[i][1] == entry.step), at)
        elif entry.step <= last:
            at = next((i for i in range(at + 1, len(launches)) if (launches[i][1] or 0) < entry.step), at)
        last = entry.step
        if launches:
            yield launches[at][0], entry


def _restored(history: History, launch: int) -> int | None:
    found = history.of("restored", source=f"script {launch}")
    return found[0].step if found else None


def _printed(history: History, launch: int, field: str) -> tuple[tuple[int, str], ...]:
    return tuple(
        (event.step, str(event.fields[field]))
        for event in history.of("step", source=f"script {launch}")
        if event.step is not None and field in event.fields
    )
