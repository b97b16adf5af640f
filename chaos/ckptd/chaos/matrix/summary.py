"""What a matrix came to: counts by role, victim and store, what does not apply and why, and what never fired. Pure.

Owns: counting and the verdict. Does not own: printing (`matrix_cli`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptd.chaos.matrix.cells import Cell, reason
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult
from ckptd.chaos.verdict import FailureClass, Verdict

Row = tuple[str, str, str, str]
"""Role of the boundary, who was hit and how, store, shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts over cells.

    Attributes:
        rows: By row: how many cells passed, failed, are unknown, are not run yet.
        not_applicable: By reason.
        bad: Results that are no pass.
        silent: Boundaries that were to be struck and fired in no cell, all of whose cells were run.
        seconds: Of all runs together.
        totals: By verdict.
        classes: In how many cells each class of failure was found.
    """

    rows: Mapping[Row, Counter[str]]
    not_applicable: Mapping[str, int]
    bad: tuple[CellResult, ...] = ()
    silent: tuple[str, ...] = ()
    seconds: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)
    classes: Mapping[str, int] = field(default_factory=dict)

    @property
    def silent_divergences(self) -> int:
        """In how many cells a snapshot came back wrong without a word."""
        return self.classes.get(FailureClass.SILENT_DIVERGENCE, 0)

    @property
    def verdict(self) -> Verdict:
        """Fail if a cell failed or a boundary is silent; unknown if a cell is, or none was run; else pass."""
        if self.silent or self.totals[Verdict.FAIL]:
            return Verdict.FAIL
        return Verdict.UNKNOWN if self.totals[Verdict.UNKNOWN] or not self.totals[Verdict.PASS] else Verdict.PASS

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names = ("role", "hit", "store", "shape")
        return {
            "verdict": self.verdict,
            "totals": dict(self.totals),
            "rows": [{**dict(zip(names, row, strict=True)), **counted} for row, counted in self.rows.items()],
            "not_applicable": dict(self.not_applicable),
            "silent": list(self.silent),
            "silent_divergence": self.silent_divergences,
            "classes": dict(self.classes),
            "bad": [result.to_dict() for result in self.bad],
            "seconds": round(self.seconds, 1),
        }


def summarize(cells: Iterable[Cell], results: Mapping[str, CellResult]) -> Summary:
    """Count what became of these cells."""
    rows: dict[Row, Counter[str]] = {}
    why: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    bad: list[CellResult] = []
    fired: dict[str, bool] = {}
    open_boundaries: set[str] = set()
    seconds = 0.0
    for cell in cells:
        kept_out = reason(cell)
        if kept_out is not None:
            why[kept_out.name] += 1
            totals[NOT_APPLICABLE] += 1
            continue
        result = results.get(str(cell))
        verdict = "open" if result is None else str(result.verdict)
        totals[verdict] += 1
        if result is None:
            open_boundaries.add(cell.boundary)
        elif verdict == NOT_APPLICABLE:
            why[next(iter(result.problems))] += 1
            continue
        else:
            fired[cell.boundary] = fired.get(cell.boundary, False) or result.fired
            seconds += result.seconds
            if verdict != Verdict.PASS:
                bad.append(result)
        hit = cell.victim if cell.victim == "all" else f"{cell.action} {cell.victim}"
        rows.setdefault((cell.role, hit, cell.store, str(cell.shape)), Counter())[verdict] += 1
    silent = [name for name, did in fired.items() if not did and name not in open_boundaries]
    counted = Counter(name for result in bad for name in result.classes)
    return Summary(
        rows=rows,
        not_applicable=why,
        bad=tuple(bad),
        silent=tuple(silent),
        seconds=seconds,
        totals=totals,
        classes={str(one): counted[one] for one in FailureClass if counted[one]},
    )
