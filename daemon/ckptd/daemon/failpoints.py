"""Named failpoints: places where a test or the chaos harness may kill, stop, delay or fail this process.

Owns: the grammar and the hit counters. Does not own: where failpoints stand. Off by default; set by the
environment variable CKPTD_FAILPOINTS (read once, at import of the process's entry) or by `configure`.

Grammar: `name=action[@nth]` joined by `;`. Actions: `kill` (SIGKILL to itself), `stop` (SIGSTOP to itself),
`exit:CODE`, `delay:SECONDS`, `error:TEXT` (raises `FailpointError`). `@nth` fires at the nth hit only
(counted from 1); without it the action fires at every hit. Every failpoint that fires is written to the
file CKPTD_FAILPOINT_LOG, if set, before it acts: a fault test asserts on that line.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2

ENVIRONMENT_VARIABLE = "CKPTD_FAILPOINTS"
LOG_VARIABLE = "CKPTD_FAILPOINT_LOG"


class FailpointError(Exception):
    """Raised by the action `error`. Never raised when no failpoint is configured."""


class FailpointSyntaxError(DaemonError):
    """A failpoint specification does not follow the grammar (INVALID_ARGUMENT)."""

    reason = error_pb2.REASON_INVALID_ARGUMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What happens when a failpoint is hit."""

    verb: str
    argument: str
    nth: int | None


_actions: dict[str, Action] = {}
_hits: dict[str, int] = {}
_log_path: str | None = None

_ARGUMENTS: dict[str, Callable[[str], bool]] = {
    "kill": lambda text: not text,
    "stop": lambda text: not text,
    "exit": lambda text: re.fullmatch(r"[0-9]{1,3}", text) is not None and int(text) <= 255,
    "delay": lambda text: re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text) is not None,
    "error": lambda _: True,
}
"""What each action takes after its colon."""


def parse(specification: str) -> dict[str, Action]:
    """Parse the grammar of the module docstring.

    Raises:
        FailpointSyntaxError: names the entry and the grammar.
    """
    found: dict[str, Action] = {}
    for entry in filter(None, (part.strip() for part in specification.split(";"))):
        name, equals, action = entry.partition("=")
        action, at, nth = action.partition("@")
        verb, _, argument = action.partition(":")
        argument_fits = _ARGUMENTS.get(verb)
        if (
            not (name and equals and argument_fits)
            or (at and not re.fullmatch(r"[1-9][0-9]*", nth))
            or not argument_fits(argument)
        ):
            raise FailpointSyntaxError.of(
                f"{ENVIRONMENT_VARIABLE}: {entry!r} is not name=action[@nth] with action one of "
                "kill, stop, exit:CODE (0 to 255), delay:SECONDS, error:TEXT, and nth from 1"
            )
        found[name] = Action(verb=verb, argument=argument, nth=int(nth) if nth else None)
    return found


def configure(specification: str, *, log_path: str | None = None) -> None:
    """Replace all failpoints and reset their counters; an empty specification switches them off."""
    global _log_path  # noqa: PLW0603 - one process has one set of failpoints, like one environment
    found = parse(specification)
    _actions.clear()
    _hits.clear()
    _actions.update(found)
    _log_path = log_path


def configure_from_environment() -> None:
    """Read CKPTD_FAILPOINTS and CKPTD_FAILPOINT_LOG."""
    configure(os.environ.get(ENVIRONMENT_VARIABLE, ""), log_path=os.environ.get(LOG_VARIABLE))


def failpoint(name: str) -> None:
    """Act if `name` is configured. Costs one dictionary look-up when nothing is."""
    if not _actions:
        return
    action = _actions.get(name)
    if action is None:
        return
    hit = _hits[name] = _hits.get(name, 0) + 1
    if action.nth is not None and hit != action.nth:
        return
    if _log_path:
        with open(_log_path, "a", encoding="utf-8") as log:  # noqa: PTH123 - append, one short line, atomic
            log.write(f"{os.getpid()} {name} {action.verb} {hit}\n")
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.verb == "exit":
        os._exit(int(action.argument))
    elif action.verb == "delay":
        time.sleep(float(action.argument))
    else:
        raise FailpointError(action.argument or name)
