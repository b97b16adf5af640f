"""Named failpoints: places where a test or the chaos harness may kill, stop, delay or fail this process.

Owns: the grammar and the hit counters. Does not own: which failpoints there are and what lies around each
(`boundaries`). Off by default; set by the environment variable CKPTD_FAILPOINTS or by `configure`. It stands beside the
schema because both ends of the wire pass failpoints, and this package is the one that rank, agent and verbs all import:
each failpoint is a place between two steps of the protocol.

Grammar: `name=action[@nth]` joined by `;`. Actions: `kill` (SIGKILL to itself), `stop` (SIGSTOP to itself),
`exit:CODE`, `delay:SECONDS`, `error:TEXT` (raises `FailpointError`), `pass` (nothing: it is only logged). `@nth` fires at
the nth hit only (counted from 1); without it the action fires at every hit. Every failpoint that fires is written to the
file CKPTD_FAILPOINT_LOG, if set, before it acts: a fault test asserts on that line.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptd.protos.boundaries import BOUNDARIES

ENVIRONMENT_VARIABLE = "CKPTD_FAILPOINTS"
LOG_VARIABLE = "CKPTD_FAILPOINT_LOG"


class FailpointError(Exception):
    """Raised by the action `error`. Never raised when no failpoint is configured."""


class FailpointSyntaxError(ValueError):
    """A failpoint specification does not follow the grammar, or names a failpoint that does not exist."""


class UndeclaredFailpointError(Exception):
    """Code passes a failpoint that `boundaries` does not declare. Never raised when no failpoint is configured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What happens when a failpoint is hit."""

    verb: str
    argument: str
    nth: int | None


_actions: dict[str, Action] = {}
_hits: dict[str, Iterator[int]] = {}
_known: Collection[str] = BOUNDARIES
_log_path: str | None = None
_is_configured = False

_ARGUMENTS: dict[str, Callable[[str], bool]] = {
    "kill": lambda text: not text,
    "stop": lambda text: not text,
    "exit": lambda text: re.fullmatch(r"[0-9]{1,3}", text) is not None and int(text) <= 255,
    "delay": lambda text: re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text) is not None,
    "error": lambda _: True,
    "pass": lambda text: not text,
}
"""What each action takes after its colon."""


def parse(specification: str, *, source: str = ENVIRONMENT_VARIABLE) -> dict[str, Action]:
    """Parse the grammar of the module docstring; names are not looked up.

    Args:
        specification: See the module docstring.
        source: Where it stands, for the error.

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
            raise FailpointSyntaxError(
                f"{source}: {entry!r} is not name=action[@nth] with action one of "
                "kill, stop, exit:CODE (0 to 255), delay:SECONDS, error:TEXT, pass, and nth from 1"
            )
        found[name] = Action(verb=verb, argument=argument, nth=int(nth) if nth else None)
    return found


def require_known(
    names: Iterable[str], *, known: Collection[str] = BOUNDARIES, source: str = ENVIRONMENT_VARIABLE
) -> None:
    """Check that there are failpoints of these names.

    Raises:
        FailpointSyntaxError: names the first that there is not, and near ones.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "`ckptd chaos failpoints` lists them"
            raise FailpointSyntaxError(f"{source}: there is no failpoint {name!r} ({hint})")


def configure(specification: str, *, log_path: str | None = None, known: Collection[str] = BOUNDARIES) -> None:
    """Replace all failpoints and reset their counters; an empty specification switches them off.

    Args:
        specification: See the module docstring.
        log_path: File that gets a line for each failpoint that fires.
        known: Names there are; others are refused here, and when code passes them.

    Raises:
        FailpointSyntaxError: the grammar, or an unknown name; nothing is changed.
    """
    global _log_path, _known, _is_configured
    found = parse(specification)
    require_known(found, known=known)
    _actions.clear()
    _hits.clear()
    _actions.update(found)
    _hits.update((name, itertools.count(1)) for name in found)
    _log_path, _known, _is_configured = log_path, known, True


def configure_from_environment(*, again: bool = True) -> None:
    """Read CKPTD_FAILPOINTS and CKPTD_FAILPOINT_LOG.

    Args:
        again: Also where this process has configured its failpoints before.

    Raises:
        FailpointSyntaxError: see `configure`.
    """
    if again or not _is_configured:
        configure(os.environ.get(ENVIRONMENT_VARIABLE, ""), log_path=os.environ.get(LOG_VARIABLE) or None)


def failpoint(name: str, detail: str = "") -> None:
    """Act if `name` + `detail` is configured. Costs one look at an empty dictionary when nothing is.

    Args:
        name: The failpoint, or the fixed beginning of several.
        detail: The end of its name where one place in the code is several failpoints, such as the name of an RPC.
    """
    if not _actions:
        return
    name += detail
    action = _actions.get(name)
    if action is None:
        if name not in _known:
            raise UndeclaredFailpointError(f"failpoint {name!r} is not declared in ckptd.protos.boundaries")
        return
    # One step of a counter is atomic; a read and a write are not, and uploads pass here from several threads.
    hit = next(_hits[name])
    if action.nth is not None and hit != action.nth:
        return
    if _log_path:
        with open(_log_path, "a", encoding="utf-8") as log:  # noqa: PTH123 - append, one short line, atomic
            log.write(f"{os.getpid()} {name} {action.verb} {hit}\n")
    if action.verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.verb == "stop":
        # To this very thread: sent to the process, another thread may take it, and this one goes on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action.verb == "exit":
        os._exit(int(action.argument))
    elif action.verb == "delay":
        time.sleep(float(action.argument))
    elif action.verb == "error":
        raise FailpointError(action.argument or name)
