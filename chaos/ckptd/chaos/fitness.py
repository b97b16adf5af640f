"""Whether a script can be judged at all: it must get through undisturbed, use the client, save, and save where it is asked to.

Owns: the reasons, each in plain words with the way out. Does not own: verdicts. Pure: it looks at how an undisturbed
run went. What it finds is no fault of ckptd and no proof of anything: the verdict is unknown, with an exit code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckptd.chaos.conductor import Performance
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.history import History

EXIT_CODE = 4
"""Of a command whose script cannot be judged."""
_SHOWN_ERRORS = 3


class Reason(StrEnum):
    """Why a script cannot be judged."""

    FAILS = "fails by itself"
    NO_CLIENT = "does not use the client"
    OTHER_AGENT = "uses another agent"
    OTHER_ROOT = "saves elsewhere"
    NEVER_SAVES = "never saves"
    TOO_SHORT = "ends too early"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """A reason and what to do about it.

    Attributes:
        reason: Why.
        text: Sentences for people.
    """

    reason: Reason
    text: str


def unfit(performance: Performance, evidence: Evidence, *, output: str) -> Unfit | None:
    """Return why a script cannot be judged by this undisturbed run; None if it can.

    Args:
        performance: How the run went.
        evidence: What it left.
        output: The last lines that its ranks printed, errors included.
    """
    history = performance.history
    if history.of("agent_died", source="harness"):
        return None  # that is not the script's
    said = f"; it printed last:\n{output}" if output else "; it printed nothing"
    if not performance.finished or performance.launches != 1:
        why = performance.why or "it was started more than once"
        return Unfit(reason=Reason.FAILS, text=f"the script does not get through undisturbed: {why}{said}")
    client = history.of("save_returned", "restored", "audited", source="client")
    agent = history.of("attached_local", "attached", "claimed", "begun", "staged", source="agent")
    if not client and not agent:
        text = (
            "the script ended well and made no Checkpointer: it does not use the client, so there is nothing to prove"
        )
        return Unfit(reason=Reason.NO_CLIENT, text=text + said)
    if not agent:
        text = (
            "the script's Checkpointer talks to another agent than the harness's: leave socket=, run_dir= and embedded= "
            "to the environment"
        )
        return Unfit(reason=Reason.OTHER_AGENT, text=text)
    if not evidence.saves and not history.of("begun", "staged", "skipped", source="agent"):
        text = "the script ended well and made a Checkpointer, but never called save(): there is nothing to resume from"
        return Unfit(reason=Reason.NEVER_SAVES, text=text + said)
    if evidence.root is not None and not evidence.root.timelines:
        text = (
            "the script saved, but not in the root that CKPTD_ROOT names: it seems to name one itself. Make the Checkpointer "
            'without a root ("Checkpointer()" takes it from the environment), or pass {root} among the script\'s arguments, '
            "where the harness fills in the run's own"
        )
        return Unfit(reason=Reason.OTHER_ROOT, text=text)
    if evidence.root is not None and not evidence.root.listed:
        text = f"the script called save() {len(evidence.saves)} times and nothing was committed{_errors(history)}"
        return Unfit(reason=Reason.NEVER_SAVES, text=text)
    return None


def too_short(performance: Performance) -> Unfit | None:
    """Return that a script ended before any fault could strike; None if one struck, or something else was in the way."""
    never = performance.struck and all(not fate.fired and not fate.t for fate in performance.struck)
    if not never or not performance.finished or performance.launches != 1:
        return None
    history, fault = performance.history, performance.struck[0].fault
    saves = len({event.step for event in history.of("save_returned", source="client")})
    durable = len({event.step for event in history.of("acknowledged", source="agent")})
    text = (
        f"the script ended before the fault could strike: {fault.do} {fault.target} waits for {fault.moment}, but the script "
        f"saved {saves} steps, of which {durable} became durable. Let it train more steps, or save more often"
    )
    return Unfit(reason=Reason.TOO_SHORT, text=text)


def _errors(history: History) -> str:
    told = [
        event.fields.get("error") for event in history.of("save_returned", "upload_failed", "decided", "store_failed")
    ]
    errors = list(dict.fromkeys(str(error) for error in told if error))
    return f": {'; '.join(errors[:_SHOWN_ERRORS])}" if errors else ""
