"""Names that the moment of a fault goes by: events and failpoints that there are, and who passes them. Pure.

Owns: whether a name can be waited for, and what to say where it cannot. Does not own: the names (`ckptd.protos.event_kinds`,
`ckptd.protos.boundaries`), the grammar of failpoints, lines and files (`scenario_reader`). A moment that can never come would be
found only when all runs are done, as a fault that missed.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ckptd.chaos.scenario import Target
from ckptd.protos.boundaries import BOUNDARIES
from ckptd.protos.event_kinds import OF_A_STEP, OF_AGENTS, OF_ALL, OF_CLIENTS, OF_COORDINATORS
from ckptd.protos.failpoints import FailpointSyntaxError, parse, require_known

OF_SCRIPTS = ("step", "restored")
"""What the harness reads in a script's output, or in its client's log where it prints nothing."""
EVENTS = tuple(sorted({*OF_AGENTS, *OF_COORDINATORS, *OF_ALL, *OF_SCRIPTS}))
"""Events that a fault may wait for."""
EVENTS_BEFORE = tuple(sorted(OF_A_STEP))
"""Events that may say that a fault came too late: those that tell their step."""
_PASSED_BY_AGENTS = ("agent", "coordinator")
_ENDS_OR_HANGS = ("kill", "stop", "exit")


class NameMisfitError(ValueError):
    """There is nothing of a name, or it is passed by somebody else; the text says what is allowed."""


def require_event(name: str) -> None:
    """Check that a fault may wait for an event of this name.

    Raises:
        NameMisfitError: It may not.
    """
    if name in EVENTS:
        return
    if name in OF_CLIENTS:
        raise NameMisfitError(
            f"event {name!r} stands in the logs of ranks alone, which no fault waits for; {_allowed(EVENTS)}"
        )
    raise NameMisfitError(f"there is no event {name!r}{_near(name, EVENTS)}; {_allowed(EVENTS)}")


def require_event_before(name: str) -> None:
    """Check that an event of this name may say that a fault came too late.

    Raises:
        NameMisfitError: It may not.
    """
    if name in EVENTS_BEFORE:
        return
    if name in (*EVENTS, *OF_CLIENTS):
        raise NameMisfitError(
            f"before is {name!r}, which is no event of an agent that tells its step; {_allowed(EVENTS_BEFORE)}"
        )
    raise NameMisfitError(f"before: there is no event {name!r}{_near(name, EVENTS_BEFORE)}; {_allowed(EVENTS_BEFORE)}")


def require_failpoint(name: str, target: Target) -> None:
    """Check that the target, an agent or the coordinator, passes a failpoint of this name.

    Raises:
        NameMisfitError: There is none, or somebody else passes it.
    """
    _require_agents_pass([name], "at")
    # Rank 0 lives on node 0, and has its own agent lead: no other one plays the coordinator.
    if BOUNDARIES[name].role == "coordinator" and target.kind == "agent" and target.which != 0:
        raise NameMisfitError(
            f"failpoint {name!r} is passed by the agent alone that plays the coordinator, which is agent 0; "
            'allowed: target = "coordinator", "agent 0", or a failpoint of `ckptd chaos failpoints --role agent`'
        )


def require_failpoints_of_agents(specification: str) -> None:
    """Check failpoints that all agents are given.

    Raises:
        NameMisfitError: The grammar is not kept, there is no such failpoint, no agent passes it, or it would end or stop every
            agent, the one that is started in its place too: no fault of the scenario would answer for that.
    """
    try:
        found = parse(specification, source="agents")
    except FailpointSyntaxError as error:
        raise NameMisfitError(str(error)) from None
    _require_agents_pass(found, "agents")
    for name, action in found.items():
        if action.verb in _ENDS_OR_HANGS:
            raise NameMisfitError(
                f"agents: {name}={action.verb} would meet every agent, and each that is started in its place; "
                f'allowed: delay, error, pass. For one agent once, write a [[fault]] with at = {{ failpoint = "{name}" }}'
            )


def _require_agents_pass(names: Collection[str], source: str) -> None:
    try:
        require_known(names, source=source)
    except FailpointSyntaxError as error:
        raise NameMisfitError(str(error)) from None
    for name in names:
        if (role := BOUNDARIES[name].role) not in _PASSED_BY_AGENTS:
            raise NameMisfitError(
                f"{source}: failpoint {name!r} is passed by a {role}, not by an agent; "
                "allowed: those of `ckptd chaos failpoints --role agent` and `--role coordinator`"
            )


def _near(name: str, among: Collection[str]) -> str:
    near = difflib.get_close_matches(name, among, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _allowed(names: Collection[str]) -> str:
    return f"allowed: {', '.join(names)}"
