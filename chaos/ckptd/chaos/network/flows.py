"""Which traffic is lost or late at the moment, and the proof that it was. Shared by both ways; runs in their processes.

Owns: the faults that are ordered, when they end, what each of them has struck. Does not own: how traffic is stopped
(`hub`, `relay`). A flow is what one end sends to another: an ordered pair of names ("0", "1", "1.1", "store").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptd.chaos.network.words import ALL, STORE
from ckptd.chaos.store_proxy.ledger import Ledger


@dataclass(kw_only=True, slots=True)
class Ordered:
    """A fault that was ordered.

    Attributes:
        number: Its position in the schedule.
        kind: One of NETWORK_FAULTS.
        one: Names of the first end.
        other: Names of the second one; None: all nodes that are not in `one`, later ones included. ALL among them: the
            store too.
        delay_s: For "delay".
        for_s: How long it lasts from the first thing that it struck; None: to the end.
        struck: Packets (or pieces of a stream) that it stopped or delayed, or connections that it reset.
        bytes: Their bytes.
        open: Whether it still lasts.
    """

    number: int
    kind: str
    one: frozenset[str]
    other: frozenset[str] | None
    delay_s: float = 0.0
    for_s: float | None = None
    struck: int = 0
    bytes: int = 0
    open: bool = True
    _told: set[tuple[str, str]] = field(default_factory=set)

    def is_of(self, source: str, to: str) -> bool:
        """Whether it stands in the way of what `source` sends to `to`."""
        return self._leads(source, to) or (self.kind != "one-way" and self._leads(to, source))

    def _leads(self, source: str, to: str) -> bool:
        if self.other is None:
            return source in self.one and to not in self.one and to != STORE
        return source in self.one and (to in self.other or (ALL in self.other and to not in self.one))


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to traffic now: it is lost (or held), or it is late by some seconds."""

    lost: bool = False
    delay_s: float = 0.0


FREE = Fate()


class Flows:
    """The faults of one network. For one event loop.

    Args:
        ledger: Is told of each fault: its begin, the first thing that it struck in each flow, its end.
        way: One of WAYS.
    """

    def __init__(self, ledger: Ledger, way: str) -> None:
        self._ledger, self._way = ledger, way
        self._faults: dict[int, Ordered] = {}
        self._on_end: dict[int, Callable[[Ordered], None]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def begin(self, order: Mapping[str, object], on_end: Callable[[Ordered], None]) -> Ordered:
        """Let a fault begin; `on_end` is called when it is over.

        Raises:
            ValueError: The order makes no sense.
        """
        fault = _ordered(order)
        if fault.number in self._faults:
            raise ValueError(f"fault {fault.number} was ordered before")
        self._faults[fault.number] = fault
        self._say(fault, begins=True, one=sorted(fault.one), other=sorted(fault.other) if fault.other else None)
        self._on_end[fault.number] = on_end
        self._change()
        return fault

    def look(self, source: str, to: str, size: int) -> Fate:
        """Return what happens to `size` bytes of a flow, and count them where it is not nothing."""
        fate = FREE
        for fault in self._faults.values():
            if not fault.open or fault.kind == "reset" or not fault.is_of(source, to):
                continue
            self.count(fault, source, to, size)
            fate = Fate(fate.lost or fault.kind != "delay", fate.delay_s + fault.delay_s)
        return fate

    def is_lost(self, source: str, to: str) -> bool:
        """Whether what `source` sends to `to` is lost now; counts nothing."""
        return any(
            fault.open and fault.kind in ("partition", "one-way") and fault.is_of(source, to)
            for fault in self._faults.values()
        )

    async def until_free(self, source: str, to: str) -> None:
        """Wait until nothing of this flow is lost any more."""
        while self.is_lost(source, to):
            changed = self._changed
            await changed.wait()

    def count(self, fault: Ordered, source: str, to: str, size: int, *, struck: int = 1) -> None:
        """Note what a fault has struck."""
        if not fault.struck and fault.for_s is not None:
            # A short fault must not be over before anything was said that it could strike.
            task = asyncio.get_running_loop().create_task(self._end_after(fault, fault.for_s))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)
        fault.struck += struck
        fault.bytes += size
        if (source, to) not in fault._told:  # noqa: SLF001 - a value of this module
            fault._told.add((source, to))  # noqa: SLF001
            self._say(fault, source=source, to=to, bytes=size)

    def finish(self, fault: Ordered) -> None:
        """End a fault and say what it struck in all. Idempotent."""
        if fault.open:
            fault.open = False
            self._say(fault, begins=False, struck=fault.struck, bytes=fault.bytes)
            self._change()

    def heal(self) -> int:
        """End all faults that last; return how many there were."""
        lasting = [fault for fault in self._faults.values() if fault.open]
        for fault in lasting:
            self._on_end[fault.number](fault)
            self.finish(fault)
        return len(lasting)

    def counts(self) -> dict[str, list[int]]:
        """Return number, and [struck, bytes], of each fault."""
        return {str(fault.number): [fault.struck, fault.bytes] for fault in self._faults.values()}

    def close(self) -> None:
        """End all faults."""
        for task in self._ends:
            task.cancel()
        for fault in self._faults.values():
            self.finish(fault)

    async def _end_after(self, fault: Ordered, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if fault.open:
            self._on_end[fault.number](fault)
            self.finish(fault)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _say(self, fault: Ordered, **more: object) -> None:
        self._ledger.say(fault.kind, number=fault.number, way=self._way, **more)


def _ordered(order: Mapping[str, object]) -> Ordered:
    number, kind, one, other, for_s = (order.get(key) for key in ("number", "kind", "one", "other", "for_s"))
    delay_s = order.get("delay_s", 0.0)
    if (
        not isinstance(number, int)
        or not isinstance(kind, str)
        or not isinstance(delay_s, int | float)
        or not isinstance(for_s, int | float | None)
    ):
        raise ValueError(f"no fault of the network: {dict(order)}")  # noqa: TRY004 - one kind of refusal
    return Ordered(
        number=number,
        kind=kind,
        one=_names(one),
        other=None if other is None else _names(other),
        delay_s=delay_s,
        for_s=for_s,
    )


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, Iterable) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{value!r} is no list of names")
    return frozenset(value)
