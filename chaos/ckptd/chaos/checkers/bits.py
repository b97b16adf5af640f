"""Bit-exactness: losses, SHA-256 lists and saved states of both runs must be equal wherever both say something.

Each check names what diverged first: the lowest step, then the lowest rank, then the name. What the undisturbed run
does not tell cannot be compared and is no failure; `something_was_compared` sees to it that not everything is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.checkers.divergence import classify, first_difference, wrong_names
from ckptd.chaos.checkers.saved_states import saved_by_step, shown, unseeded, wrong_states
from ckptd.chaos.evidence import DigestList, Evidence
from ckptd.chaos.launches import beside
from ckptd.chaos.verdict import FailureClass, Finding


def deterministic(case: Case) -> Finding:
    """The script says the same in two undisturbed runs; where it does not, nothing can be judged, and the verdict is unknown."""
    if case.repeat is None:
        return Finding.passed("deterministic", "the undisturbed run was done once and not compared with itself")
    if difference := self_difference(case.undisturbed, case.repeat):
        return Finding.unknown("deterministic", f"the script is not deterministic: {difference}")
    count = len(case.repeat.losses) + sum(len(entry.sha256) for entry in case.repeat.digests)
    text = f"two undisturbed runs are equal in {count} losses and SHA-256"
    if states := saved_by_step(case.undisturbed).keys() & saved_by_step(case.repeat).keys():
        text += f", and in {len(states)} saved states"
    if alone := unseeded(case.undisturbed, case.repeat):
        text += f"; not seeded, and nothing draws from them: {shown(sorted(alone))}"
    return Finding.passed("deterministic", text, count + len(states))


def self_difference(first: Evidence, second: Evidence) -> str:
    """Return how two undisturbed runs differ: the first step, and the first tensors; "" if they do not."""
    one, other = losses_by_step(first), losses_by_step(second)
    losses = [step for step in sorted(one.keys() | other.keys()) if _wavers(one.get(step), other.get(step))]
    entry = first_difference(first.digests, second.digests)
    told = []
    if losses:
        told.append(
            (losses[0], f"step {losses[0]}, loss {_either(one.get(losses[0]))} and {_either(other.get(losses[0]))}")
        )
    if entry is not None:
        held = next(e for e in first.digests if (e.step, e.rank, e.when) == (entry.step, entry.rank, "step"))
        told.append((entry.step, f"step {entry.step}, rank {entry.rank}: {shown(wrong_names(held, entry))}"))
    if saved := next(wrong_states(first, second), None):
        state, names = saved
        told.append((state.step, f"step {state.step}, saved: {shown(names)}{_seeds(names)}"))
    elif not told and not unseeded(first, second) and first.root is not None and second.root is not None:
        digests, others = first.root.state_digests(), second.root.state_digests()
        wrong = sorted(step for step in digests.keys() & others.keys() if digests[step] != others[step])
        hint = "the state that was saved, though losses and lists are equal: seed python's and numpy's generators too"
        told += [(step, f"step {step}, {hint}") for step in wrong[:1]]
    if not first.losses and not told and set(first.saves) != set(second.saves):
        step = min(set(first.saves) ^ set(second.saves))
        told.append((step, f"step {step}, which only one of them saves: save every so many steps, not by the clock"))
    return f"two undisturbed runs differ first at {'; at '.join(text for _, text in sorted(told))}" if told else ""


def _seeds(names: list[str]) -> str:
    hidden = [name for name in names if name.startswith(("rng/python", "rng/numpy"))]
    return " (seed python's and numpy's generators too)" if len(hidden) == len(names) else ""


def losses_by_step(evidence: Evidence) -> dict[int, frozenset[str]]:
    """Return what was printed as the loss of each step: one value, or one of each rank that printed its own."""
    found: dict[int, set[str]] = {}
    for step, loss in evidence.losses:
        found.setdefault(step, set()).add(loss)
    return {step: frozenset(values) for step, values in found.items()}


def _wavers(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether two runs contradict each other; lines of several ranks may be lost where they were written at one time."""
    if one is None or other is None:
        return len(one or other or ()) <= 1
    return one != other if len(one) == len(other) == 1 else not (one <= other or other <= one)


def _either(values: frozenset[str] | None) -> str:
    return " or ".join(sorted(values)) if values else str(None)


def same_losses(case: Case) -> Finding:
    """Every loss that the hurt run printed, in any launch, is the undisturbed one's, bit by bit."""
    expected = losses_by_step(case.undisturbed)
    common = [(step, loss) for step, loss in case.hurt.losses if step in expected]
    if expected and not common:
        return Finding.unknown("same_losses", "the hurt run printed no loss of a step that the undisturbed one printed")
    wrong = [(step, loss) for step, loss in common if loss not in expected[step]]
    if wrong:
        step, loss = min(wrong)
        origin = max((other for other, values in expected.items() if loss in values and other != step), default=None)
        failure = FailureClass.SILENT_DIVERGENCE if origin is None else FailureClass.STALE_CONTENT
        text = f"first at step {step}: {loss} instead of {_either(expected[step])}" + _of(origin)
        return Finding.failed("same_losses", failure, text, len(common))
    return Finding.passed("same_losses", f"{len(common)} losses equal", len(common))


def same_digests(case: Case) -> Finding:
    """Every tensor and object has the SHA-256 it has in the undisturbed run, after each step and after each restore."""
    expected = {(entry.step, entry.rank): entry for entry in case.undisturbed.digests if entry.when == "step"}
    common = [entry for entry in case.hurt.digests if (entry.step, entry.rank) in expected]
    if expected and not common:
        return Finding.unknown(
            "same_digests", "the hurt run left no SHA-256 list of a step that the undisturbed one listed"
        )
    first = first_difference(case.undisturbed.digests, case.hurt.digests)
    if first is not None:
        text = _difference(expected[first.step, first.rank], first)
        # Another launch may have had the same step right.
        launch = beside(case.performance.history, case.hurt.digests, first)
        failure, instead = classify(first, case.undisturbed.digests, launch)
        return Finding.failed("same_digests", failure, text + (f"; {instead}" if instead else ""), len(common))
    compared = sum(len(entry.sha256) for entry in common)
    text = f"{compared} SHA-256 of tensors and objects equal in {len(common)} lists"
    return Finding.passed("same_digests", text, compared)


def _difference(expected: DigestList, entry: DigestList) -> str:
    wrong = wrong_names(expected, entry)
    where = f"first at step {entry.step}, rank {entry.rank}" + (" right after a restore" * (entry.when == "restore"))
    total = len(expected.sha256.keys() | entry.sha256.keys())
    first, others = wrong[0], f" (and {len(wrong) - 1} more of {total})" if len(wrong) > 1 else ""
    if first not in entry.sha256:
        return f"{where}: {first} is missing{others}"
    if first not in expected.sha256:
        return f"{where}: {first} is there, but not in the undisturbed run{others}"
    return f"{where}: {first} differs{others}"


def same_state_digests(case: Case) -> Finding:
    """Every step that both roots list has the same state digest, but for generators that nobody seeds or draws from."""
    if case.undisturbed.root is None or case.hurt.root is None:
        return Finding.passed("same_state_digests", "no root was read")
    expected, found = case.undisturbed.root.state_digests(), case.hurt.root.state_digests()
    common = sorted(expected.keys() & found.keys())
    if expected and not found and case.performance.finished:
        text = f"the hurt run ended well and lists no step at all; the undisturbed one lists {short(sorted(expected))}"
        return Finding.failed("same_state_digests", FailureClass.LOST_WORK, text)
    if expected and not common:
        return Finding.unknown(
            "same_state_digests", f"no step is listed in both roots: {sorted(expected)} and {sorted(found)}"
        )
    names = {state.step: differing for state, differing in wrong_states(case.undisturbed, case.hurt)}
    named = saved_by_step(case.undisturbed).keys() & saved_by_step(case.hurt).keys()
    left_out = 0
    for step in common:
        if expected[step] == found[step]:
            continue
        if step in named and step not in names:
            left_out += 1
            continue
        failure, origin = _kind(found[step], step, expected)
        text = f"first at step {step}: {found[step]} instead of {expected[step]}" + _of(origin)
        if step in names:
            text = (
                f"first at step {step}{_of(origin)}: {shown(names[step])}; state digest {found[step][:12]} instead of "
            )
            text += expected[step][:12]
        if step in {other for other, _ in case.hurt.root.torn}:
            # It is no state that anybody held: what is wrong with the step is that it is not whole.
            failure, text = FailureClass.TORN_SNAPSHOT, f"{text}; the step is torn"
        return Finding.failed("same_state_digests", failure, text, len(common))
    text = f"{len(common)} state digests equal: steps {short(common)}"
    if left_out:
        alone = shown(sorted(unseeded(case.undisturbed, case.hurt)))
        text = f"{len(common)} saved states equal by name: steps {short(common)}; but for {alone}, which nothing draws from"
    return Finding.passed("same_state_digests", text, len(common))


def same_end(case: Case) -> Finding:
    """The hurt run trained every step that the undisturbed one trained, to the same last one."""
    expected, found = ({step for step, _ in evidence.losses} for evidence in (case.undisturbed, case.hurt))
    if not expected:
        expected, found = set(case.undisturbed.saves), set(case.hurt.saves)
    # A line that was lost among those of other ranks does not undo a step that was saved.
    found |= set(case.hurt.saves) & expected
    if not expected:
        return Finding.unknown("same_end", "the undisturbed run neither printed a step (`step N loss X`) nor saved one")
    if missing := sorted(expected - found):
        failure = FailureClass.LOST_WORK if case.performance.finished else FailureClass.HARD_FAIL
        return Finding.failed("same_end", failure, f"steps {short(missing)} were never trained", len(expected))
    if more := sorted(found - expected):
        text = f"steps {short(more)} were trained, but not by the undisturbed run"
        return Finding.failed("same_end", FailureClass.SILENT_DIVERGENCE, text, len(expected))
    return Finding.passed("same_end", f"steps {short(sorted(expected))} trained", len(expected))


def something_was_compared(findings: Iterable[Finding]) -> Finding:
    """At least one of losses, SHA-256 lists and state digests was there to be compared."""
    names = ("same_losses", "same_digests", "same_state_digests")
    compared = {finding.check: finding.compared for finding in findings if finding.check in names}
    if any(compared.values()):
        return Finding.passed("something_was_compared", ", ".join(f"{n} {c}" for n, c in compared.items()))
    return Finding.unknown(
        "something_was_compared", "neither losses nor SHA-256 lists nor state digests could be compared"
    )


def short(steps: list[int]) -> str:
    """Return steps as a text: a range, or the first ones."""
    if len(steps) > 2 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}..{steps[-1]}"
    return ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")


def _kind(found: str, step: int, expected: Mapping[int, str]) -> tuple[FailureClass, int | None]:
    """Say of one wrong value of a step whether it is another step's."""
    origin = max((other for other, value in expected.items() if value == found and other != step), default=None)
    return (FailureClass.SILENT_DIVERGENCE if origin is None else FailureClass.STALE_CONTENT), origin


def _of(origin: int | None) -> str:
    return "" if origin is None else f", which is that of step {origin}"
