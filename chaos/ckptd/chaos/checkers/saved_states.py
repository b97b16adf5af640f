"""What two runs saved, compared by name. Pure.

Owns: which names differ at a step that both list, and which differences mean nothing. Does not own: verdicts (`bits`).
A script that prints nothing is judged by this alone.

Generators that nobody seeded begin differently in every process. Where nothing draws from one, it stands still for a
whole run: its state differs between two runs, though the script is deterministic. Such a name is left out, if its state
is the same at every step of each run: so it came back from every restore as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptd.chaos.evidence import Evidence
from ckptd.chaos.saved import SavedState

_GENERATORS = "rng/"
_FEWEST_STEPS = 2


def saved_by_step(evidence: Evidence) -> dict[int, SavedState]:
    """Return what a run's root lists, by step; of one that is listed twice the newest timeline's."""
    return {} if evidence.root is None else {state.step: state for state in evidence.root.saved}


def unseeded(one: Evidence, other: Evidence) -> frozenset[str]:
    """Return names of the process's generators that differ between two runs and stand still in each."""
    still = [_standing_still(saved_by_step(evidence).values()) for evidence in (one, other)]
    return frozenset(name for name in still[0].keys() & still[1].keys() if still[0][name] != still[1][name])


def _standing_still(states: Collection[SavedState]) -> dict[str, str]:
    """Return the generators whose state is the same at all steps, where there are several."""
    found: dict[str, set[str]] = {}
    for state in states:
        for name, digest in state.names.items():
            if name.startswith(_GENERATORS):
                found.setdefault(name, set()).add(digest)
    return {name: next(iter(all_)) for name, all_ in found.items() if len(states) >= _FEWEST_STEPS and len(all_) == 1}


def wrong_states(expected: Evidence, found: Evidence) -> Iterator[tuple[SavedState, list[str]]]:
    """Yield the steps of `found` that differ from what `expected` lists for them, lowest first, with the names."""
    right, left_out = saved_by_step(expected), unseeded(expected, found)
    for step, state in sorted(saved_by_step(found).items()):
        if step in right and (names := different(right[step].names, state.names, left_out)):
            yield state, names


def different(one: Mapping[str, str], other: Mapping[str, str], left_out: Collection[str] = ()) -> list[str]:
    """Return the names that differ or are on one side only, sorted, but for those left out."""
    return sorted(
        name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and name not in left_out
    )


def shown(names: Collection[str], most: int = 5) -> str:
    """Return names as a text: the first ones, and how many more."""
    first = ", ".join(list(names)[:most])
    return first + (f" and {len(names) - most} more" if len(names) > most else "")
