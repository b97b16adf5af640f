"""Surveys: each play once, undisturbed, with every pass of every boundary counted.

Owns: what a survey found, in memory and on disk, and which process of which play a cell hits. Does not own: running plays
(`performing`). A survey is also the undisturbed run that its cells are compared with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptd.chaos.evidence import Evidence, EvidenceError
from ckptd.chaos.matrix.cells import Cell, is_victim, may_pass
from ckptd.chaos.matrix.plays import Play
from ckptd.chaos.matrix.striking import Place, Strike
from ckptd.protos.boundaries import BOUNDARIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """One play without a fault.

    Attributes:
        evidence: What it left.
        passes: How often each process passed each boundary.
    """

    evidence: Evidence
    passes: Mapping[Place, Mapping[str, int]]

    def contradictions(self) -> list[str]:
        """Return each pass that the declarations say cannot be."""
        return [
            f"{place} passed {name}, which is declared for the role {BOUNDARIES[name].role}"
            for place, counted in self.passes.items()
            for name in counted
            if not may_pass(place, BOUNDARIES[name].role)
        ]

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        passes = [[place.kind, place.number, place.start, dict(counted)] for place, counted in self.passes.items()]
        return json.dumps({"evidence": self.evidence.to_json(), "passes": passes})

    @classmethod
    def from_json(cls, text: str) -> Survey:
        """Return the survey that `to_json` wrote.

        Raises:
            EvidenceError: It was written by another version, or is damaged.
        """
        try:
            told = json.loads(text)
            passes = {
                Place(kind=kind, number=number, start=start): counted for kind, number, start, counted in told["passes"]
            }
            return cls(evidence=Evidence.from_json(told["evidence"]), passes=passes)
        except (ValueError, KeyError, TypeError) as error:
            raise EvidenceError(f"the survey cannot be read: {error!r}") from None


def load_survey(path: Path) -> Survey | None:
    """Return a survey that was kept; None where there is none that can be read."""
    try:
        return Survey.from_json(path.read_text(encoding="utf-8"))
    except (OSError, EvidenceError):
        return None


def draw(cells: Iterable[Cell], passes: Mapping[Place, Mapping[str, int]], seed: int) -> list[Cell]:
    """Return for each victim, action, store and shape one of the cells that a survey passes, drawn by the seed."""
    found: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        if any(cell.boundary in counted and is_victim(cell, place) for place, counted in passes.items()):
            found.setdefault((cell.victim, cell.action, cell.store, str(cell.shape)), []).append(cell)
    return [random.Random(f"{seed}/{deed}").choice(fitting) for deed, fitting in found.items()]


def choose(cell: Cell, plays: Iterable[Play], survey_of: Callable[[Play], Survey]) -> tuple[Play, Strike] | None:
    """Return in which play, and by which process and pass, a cell strikes; None where no play has such a pass.

    The first play that has one is taken. Of its processes that one that passes most often and last, a late rank before
    rank 0, an agent before the coordinator's; and of the passes the one in the middle or right behind it: there is
    history before it, and something to lose after it.
    """
    for play in plays:
        found = [
            (place, counted[cell.boundary])
            for place, counted in survey_of(play).passes.items()
            if cell.boundary in counted and is_victim(cell, place)
        ]
        if found:
            place, count = max(found, key=lambda one: (one[0].number > 0, one[1], one[0].start, one[0].number))
            return play, Strike(boundary=cell.boundary, nth=count // 2 + 1, place=place, action=cell.action)
    return None
