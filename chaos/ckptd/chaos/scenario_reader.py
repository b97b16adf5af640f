"""Reads scenarios from TOML, and refuses what is wrong: file, line, and what is allowed.

Owns: the form of a scenario file. Does not own: the words (`scenario`). Invariant: a scenario that was read names
only faults, targets, events, failpoints and expectations that exist.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from ckptd.chaos.local_faults import DEEDS_OF, LOCAL_DEEDS
from ckptd.chaos.local_reader import LocalFaultReader
from ckptd.chaos.moment_names import (
    NameMisfitError,
    require_event,
    require_event_before,
    require_failpoint,
    require_failpoints_of_agents,
)
from ckptd.chaos.network.reader import NETWORK_KEYS, WordError, read_network_fault
from ckptd.chaos.scenario import DEEDS, TARGETS, TIERS, Expectation, Fault, Moment, Scenario, StoreFault, Target
from ckptd.chaos.store_proxy.orders import OrderError, from_json
from ckptd.chaos.toml_lines import line_of, lines_of_keys
from ckptd.storage_backends.fault_script import FaultKind, Op

# Deeds that make sense for a target: only a node has something to lose.
_DEEDS_OF = {
    "rank": ("kill", "stop", "continue"),
    "agent": ("kill", "stop", "continue"),
    "node": DEEDS,
    "coordinator": DEEDS,
    "all": ("kill", "lose"),
}
_STORE_NUMBERS = ("for_s", "times", "delay_s", "bytes_per_s", "per_s")
_MOMENT_KEYS = ("step", "event", "failpoint", "nth", "then", "before", "after_ms", "restarting")


class ScenarioError(ValueError):
    """A scenario cannot be used; the text says file, line and what is allowed."""


def scenario_names() -> list[str]:
    """Return the names of the scenarios of the package, sorted."""
    folder = resources.files("ckptd.chaos.scenarios")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Scenario:
    """Return the scenario of the package by name, or read the file where `name` is a path that ends in .toml.

    Raises:
        ScenarioError: There is none, or it is wrong.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ScenarioError(f"there is no scenario file {name}")
        return replace(parse(read_text(path), name=path.stem, source=name), source=name)
    if name not in scenario_names():
        raise ScenarioError(f"there is no scenario {name!r}; there are: {', '.join(scenario_names())}")
    text = (resources.files("ckptd.chaos.scenarios") / f"{name}.toml").read_text(encoding="utf-8")
    return parse(text, name=name, source=f"{name}.toml")


def read_text(path: Path) -> str:
    """Return the text of a scenario's or preset's file.

    Raises:
        ScenarioError: It cannot be read, or is no text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} cannot be read: {error}") from None


def parse(text: str, *, name: str, source: str) -> Scenario:
    """Return the scenario that `text` describes.

    Raises:
        ScenarioError: Names source, line and the allowed words.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{source}: {error}") from None
    return _Reader(text, source).scenario(table, name)


class _Reader(LocalFaultReader):
    """Turns tables into values; knows the text only to say in which line something stands."""

    def __init__(self, text: str, source: str) -> None:
        self._lines = lines_of_keys(text)
        self._source = source

    def scenario(self, table: Mapping[str, object], name: str) -> Scenario:
        self._only(table, ("title", "proves", "needs", "failpoints", "fault", "expect"), "")
        needs = self._table(table, "needs", ("nodes", "ranks"))
        failpoints = self._table(table, "failpoints", ("agents",))
        faults = table.get("fault")
        if not isinstance(faults, list) or not faults:
            raise self._error("fault", "a scenario has at least one [[fault]]")
        return Scenario(
            name=name,
            title=self._text(table, "title", "title") or name,
            proves=self._text(table, "proves", "proves") or "",
            min_nodes=self._number(needs, "nodes", "needs.nodes") or 1,
            min_ranks=self._number(needs, "ranks", "needs.ranks") or 1,
            agent_failpoints=self._agent_failpoints(failpoints),
            faults=tuple(self._fault(entry, f"fault[{index}]") for index, entry in enumerate(faults)),
            expect=self._expectation(self._table(table, "expect", tuple(Expectation.__dataclass_fields__))),
        )

    def _agent_failpoints(self, table: Mapping[str, object]) -> str:
        text = self._text(table, "agents", "failpoints.agents") or ""
        self._checked(require_failpoints_of_agents, text, "failpoints.agents")
        return text

    def _fault(self, table: object, where: str) -> Fault:
        if not isinstance(table, dict):
            raise self._error(where, f"a fault is a table, written as [[fault]], not {table!r}")
        if table.get("do") == "store":
            return self._fault_of_store(table, where)
        if table.get("do") == "network":
            return self._fault_of_network(table, where)
        if table.get("do") in LOCAL_DEEDS:
            return self._local_fault(table, where)
        deeds = (*DEEDS, "store", "network", *LOCAL_DEEDS)
        do = self._choice(table, "do", deeds, f"{where}.do")
        self._only(table, ("do", "target", "at"), where)
        target = self._target(self._text(table, "target", f"{where}.target") or "", f"{where}.target")
        if do is None:
            raise self._error(f"{where}.do", f"a fault needs do, one of {', '.join(deeds)}")
        if do not in _DEEDS_OF[target.kind]:
            allowed = ", ".join(
                [*_DEEDS_OF[target.kind], *(deed for deed in DEEDS_OF if target.kind in DEEDS_OF[deed])]
            )
            raise self._error(f"{where}.do", f"{do} cannot be done to {target.kind}; allowed: {allowed}")
        moment = self._moment_at(table, where)
        if moment.failpoint is not None and (target.kind not in ("agent", "coordinator") or do not in ("kill", "stop")):
            raise self._error(f"{where}.at", "a failpoint kills or stops an agent or the coordinator, nothing else")
        if moment.failpoint is not None and not (where.endswith("[0]") or moment.restarting):
            # Failpoints are given to an agent at its start.
            raise self._error(
                f"{where}.at",
                "only the first fault may wait for a failpoint; with restarting = true also one after a fault that "
                "has the target's agent started again",
            )
        if moment.failpoint is not None:
            self._checked(lambda name: require_failpoint(name, target), moment.failpoint, f"{where}.at")
        return Fault(do=do, target=target, at=moment)

    def _fault_of_store(self, table: Mapping[str, object], where: str) -> Fault:
        self._only(table, ("do", "fault", "match", "at", *_STORE_NUMBERS), where)
        kind = self._choice(table, "fault", tuple(FaultKind), f"{where}.fault")
        if kind is None:
            raise self._error(where, f"a fault of the store needs fault, one of {', '.join(FaultKind)}")
        op, prefix = self._match(self._text(table, "match", f"{where}.match") or "", f"{where}.match")
        numbers = {key: self._number(table, key, f"{where}.{key}") for key in _STORE_NUMBERS}
        order = {key: value for key, value in numbers.items() if value is not None}
        is_unbounded = kind in (FaultKind.OUTAGE, FaultKind.LIMIT) or "for_s" in order
        times = order.pop("times", None if is_unbounded else 1)
        try:
            from_json({"kind": kind, "op": op, "prefix": prefix, "times": times, **order})
        except OrderError as error:
            raise self._error(where, str(error)) from None
        if kind == FaultKind.OUTAGE and (op or prefix):
            raise self._error(
                f"{where}.match", "an outage strikes every request; for some of them use reset with for_s"
            )
        moment = self._moment_at(table, where)
        if moment.failpoint is not None:
            raise self._error(f"{where}.at", "a failpoint kills or stops an agent or the coordinator, nothing else")
        store = StoreFault(kind=kind, op=op, prefix=prefix, times=times, **order)
        return Fault(do="store", target=Target(kind="store"), at=moment, store=store)

    def _fault_of_network(self, table: Mapping[str, object], where: str) -> Fault:
        self._only(table, ("do", "at", *NETWORK_KEYS), where)
        try:
            network = read_network_fault(table)
        except WordError as error:
            raise self._error(f"{where}.{error.key}", str(error)) from None
        moment = self._moment(self._table(table, "at", _MOMENT_KEYS, f"{where}.at"), f"{where}.at")
        if moment.failpoint is not None:
            raise self._error(f"{where}.at", "a failpoint kills or stops an agent or the coordinator, nothing else")
        return Fault(do="network", target=Target(kind="network"), at=moment, network=network)

    def _match(self, text: str, where: str) -> tuple[str | None, str]:
        """Read "put", "chunks/" or "put chunks/"; a prefix ends with a slash or has one in it."""
        first, _, rest = text.partition(" ")
        if first in list(Op):
            return first, rest
        if text and "/" not in text:
            raise self._error(
                where, f"{text!r} is no match; allowed: a prefix such as chunks/, one of {', '.join(Op)}, or both"
            )
        return None, text

    def _target(self, text: str, where: str) -> Target:
        kind, _, which = text.partition(" ")
        if kind not in TARGETS:
            raise self._error(where, f"unknown target {text!r}; allowed: {_target_forms()}")
        if kind in ("coordinator", "all"):
            if which:
                raise self._error(where, f"{kind} takes no number; allowed: {_target_forms()}")
            return Target(kind=kind)
        if which in ("any", "last"):
            return Target(kind=kind, which=which)
        if not (which.isascii() and which.isdigit()):
            raise self._error(where, f"{text!r} does not say which {kind}; allowed: {_target_forms()}")
        return Target(kind=kind, which=int(which))

    def _moment_at(self, table: Mapping[str, object], where: str) -> Moment:
        return self._moment(self._table(table, "at", _MOMENT_KEYS, f"{where}.at"), f"{where}.at")

    def _moment(self, table: Mapping[str, object], where: str) -> Moment:
        moment = Moment(
            step=self._number(table, "step", where),
            event=self._text(table, "event", where),
            failpoint=self._text(table, "failpoint", where),
            nth=self._number(table, "nth", where) or 1,
            then=self._choice(table, "then", ("step",), where),
            before=self._text(table, "before", where),
            after_ms=self._number(table, "after_ms", where),
            restarting=self._truth(table, "restarting", where),
        )
        if sum(part is not None for part in (moment.step, moment.event, moment.failpoint, moment.after_ms)) != 1:
            raise self._error(where, "at needs exactly one of step, event, failpoint, after_ms")
        if (moment.then, moment.before) != (None, None) and moment.event is None:
            raise self._error(where, "then and before go with event only")
        if moment.event is not None:
            self._checked(require_event, moment.event, where)
        if moment.before is not None:
            self._checked(require_event_before, moment.before, where)
        return moment

    def _expectation(self, table: Mapping[str, object]) -> Expectation:
        tiers = table.get("restored_from", [])
        if not isinstance(tiers, list) or any(tier not in TIERS for tier in tiers):
            raise self._error("expect.restored_from", f"restored_from is a list of: {', '.join(TIERS)}")
        relaunches = table.get("relaunches")
        if relaunches is not None and not (
            isinstance(relaunches, list) and len(relaunches) == 2 and all(type(n) is int for n in relaunches)
        ):
            raise self._error("expect.relaunches", "relaunches is [fewest, most]")
        return Expectation(
            restored_from=tuple(tiers),
            restored_step=self._choice(table, "restored_step", ("fault",), "expect.restored_step"),
            committed=self._choice(table, "committed", ("fault", "after"), "expect.committed"),
            relaunches=(relaunches[0], relaunches[1]) if relaunches is not None else None,
            fenced=self._truth(table, "fenced", "expect.fenced"),
            lost_steps_max=self._bound(table, "lost_steps_max"),
            recovery_s_max=self._bound(table, "recovery_s_max"),
            may_miss=self._truth(table, "may_miss", "expect.may_miss"),
        )

    def _bound(self, table: Mapping[str, object], key: str) -> int | None:
        value = table.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise self._error(f"expect.{key}", f"{key} is a whole number from 0, not {value!r}")
        return value

    def _checked(self, check: Callable[[str], None], name: str, where: str) -> None:
        try:
            check(name)
        except NameMisfitError as error:
            raise self._error(where, str(error)) from None

    def _table(
        self, table: Mapping[str, object], key: str, allowed: tuple[str, ...], where: str = ""
    ) -> Mapping[str, object]:
        where = where or key
        value = table.get(key, {})
        if not isinstance(value, dict):
            raise self._error(where, f"{key} is a table")
        self._only(value, allowed, where)
        return value

    def _only(self, table: Mapping[str, object], allowed: tuple[str, ...], where: str) -> None:
        for key in table:
            if key not in allowed:
                full = f"{where}.{key}" if where else key
                raise self._error(full, f"unknown key {key!r}; allowed: {', '.join(allowed)}")

    def _choice(self, table: Mapping[str, object], key: str, allowed: tuple[str, ...], where: str) -> str | None:
        value = self._text(table, key, where)
        if value is not None and value not in allowed:
            raise self._error(where, f"{key} is {value!r}; allowed: {', '.join(allowed)}")
        return value

    def _text(self, table: Mapping[str, object], key: str, where: str) -> str | None:
        value = table.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error(where, f"{key} is a text, not {value!r}")
        return value

    def _number(self, table: Mapping[str, object], key: str, where: str) -> int | None:
        value = table.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self._error(where, f"{key} is a whole number from 1, not {value!r}")
        return value

    def _truth(self, table: Mapping[str, object], key: str, where: str) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            raise self._error(where, f"{key} is true or false")
        return value

    def _error(self, where: str, text: str) -> ScenarioError:
        return ScenarioError(f"{self._source}:{line_of(where, self._lines)}: {text}")


def _target_forms() -> str:
    forms = [f"{kind} N|any|last" for kind in TARGETS if kind not in ("coordinator", "all")]
    return ", ".join([*forms, "coordinator", "all"])
