"""Bit-exactness: losses, SHA-256 lists and state digests of both runs must be equal wherever both say something.

Each check names what diverged first: the lowest step, then the lowest rank, then the name. What the undisturbed run
does not tell cannot be compared and is no failure; `something_was_compared` sees to it that not everything is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.chaos.checkers.case import Case
from ckptd.chaos.evidence import DigestList
from ckptd.chaos.verdict import Finding, Verdict


def same_losses(case: Case) -> Finding:
    """Every loss that the hurt run printed, in any launch, is the undisturbed one's, bit by bit."""
    expected = dict(case.undisturbed.losses)
    common = [(step, loss) for step, loss in case.hurt.losses if step in expected]
    if expected and not common:
        return _unknown("same_losses", "the hurt run printed no loss of a step that the undisturbed one printed")
    wrong = [(step, loss) for step, loss in common if loss != expected[step]]
    if wrong:
        step, loss = min(wrong)
        return _fail("same_losses", f"first at step {step}: {loss} instead of {expected[step]}", len(common))
    return _pass("same_losses", f"{len(common)} losses equal", len(common))


def same_digests(case: Case) -> Finding:
    """Every tensor and object has the SHA-256 it has in the undisturbed run, after each step and after each restore."""
    expected = {(entry.step, entry.rank): entry for entry in case.undisturbed.digests if entry.when == "step"}
    common = [entry for entry in case.hurt.digests if (entry.step, entry.rank) in expected]
    if expected and not common:
        return _unknown("same_digests", "the hurt run left no SHA-256 list of a step that the undisturbed one listed")
    for entry in sorted(common, key=lambda entry: (entry.step, entry.rank, entry.when)):
        if difference := _difference(expected[entry.step, entry.rank], entry):
            return _fail("same_digests", difference, len(common))
    compared = sum(len(entry.sha256) for entry in common)
    return _pass("same_digests", f"{compared} SHA-256 of tensors and objects equal in {len(common)} lists", compared)


def _difference(expected: DigestList, entry: DigestList) -> str:
    names = sorted(expected.sha256.keys() | entry.sha256.keys())
    wrong = [name for name in names if expected.sha256.get(name) != entry.sha256.get(name)]
    if not wrong:
        return ""
    where = f"first at step {entry.step}, rank {entry.rank}" + (" right after a restore" * (entry.when == "restore"))
    first, others = wrong[0], f" (and {len(wrong) - 1} more of {len(names)})" if len(wrong) > 1 else ""
    if first not in entry.sha256:
        return f"{where}: {first} is missing{others}"
    if first not in expected.sha256:
        return f"{where}: {first} is there, but not in the undisturbed run{others}"
    return f"{where}: {first} differs{others}"


def same_state_digests(case: Case) -> Finding:
    """Every step that both roots list has the same state digest."""
    if case.undisturbed.root is None or case.hurt.root is None:
        return _pass("same_state_digests", "no root was read", 0)
    expected, found = case.undisturbed.root.state_digests(), case.hurt.root.state_digests()
    common = sorted(expected.keys() & found.keys())
    if expected and not common:
        return _unknown(
            "same_state_digests", f"no step is listed in both roots: {sorted(expected)} and {sorted(found)}"
        )
    for step in common:
        if expected[step] != found[step]:
            text = f"first at step {step}: {found[step]} instead of {expected[step]}"
            return _fail("same_state_digests", text, len(common))
    return _pass("same_state_digests", f"{len(common)} state digests equal: steps {_short(common)}", len(common))


def same_end(case: Case) -> Finding:
    """The hurt run trained every step that the undisturbed one trained, to the same last one."""
    expected, found = ({step for step, _ in evidence.losses} for evidence in (case.undisturbed, case.hurt))
    if not expected:
        return _unknown("same_end", "the undisturbed run printed no step; the script must print `step N loss HEX`")
    if missing := sorted(expected - found):
        return _fail("same_end", f"steps {_short(missing)} were never trained", len(expected))
    if more := sorted(found - expected):
        return _fail("same_end", f"steps {_short(more)} were trained, but not by the undisturbed run", len(expected))
    return _pass("same_end", f"steps {_short(sorted(expected))} trained", len(expected))


def _short(steps: list[int]) -> str:
    if len(steps) > 2 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}..{steps[-1]}"
    return ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")


def something_was_compared(findings: Iterable[Finding]) -> Finding:
    """At least one of losses, SHA-256 lists and state digests was there to be compared."""
    names = ("same_losses", "same_digests", "same_state_digests")
    compared = {finding.check: finding.compared for finding in findings if finding.check in names}
    if any(compared.values()):
        return _pass("something_was_compared", ", ".join(f"{n} {c}" for n, c in compared.items()), 0)
    return _unknown("something_was_compared", "neither losses nor SHA-256 lists nor state digests could be compared")


def _pass(check: str, text: str, compared: int) -> Finding:
    return Finding(check=check, verdict=Verdict.PASS, text=text, compared=compared)


def _fail(check: str, text: str, compared: int) -> Finding:
    return Finding(check=check, verdict=Verdict.FAIL, text=text, compared=compared)


def _unknown(check: str, text: str) -> Finding:
    return Finding(check=check, verdict=Verdict.UNKNOWN, text=text)
