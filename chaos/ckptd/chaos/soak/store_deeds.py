"""What random schedules do to an S3 store: it fails, lies, or stands still. Pure.

Owns: how these deeds are drawn, and their bounds. Does not own: how often (`deeds`), nor how a fault is done (`store_proxy`).
Bounds are such that the job must get over them. Its deadlines are 20 to 40 s, so nothing stands still for longer than some
seconds in all. What no rule of the protocol finds out is not drawn: a LIST shows the past of the log alone (docs/protocol.md),
and for fewer looks than a start has. That the clock is wrong is said of chunks alone: at worst a save is lost, and said so.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.chaos.scenario import Fault, Moment, StoreFault, Target
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.deed import any_node, any_rank
from ckptd.chaos.soak.moments import Ground, moment


def fail(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """It fails or lies for some calls, or for some seconds."""
    at = moment(chance, ground, "store")
    return (_of_store(at, chance.one_of(_FAULTS)(chance)),)


def stale_list(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """Some looks at the log show the past; most often to a job that starts again just then.

    To be drawn once in a schedule: what is left of two would be more looks than a start has.
    """
    at = moment(chance, ground, "store")
    if chance.percent(35):
        return (_of_store(at, _stale(chance.between(1, 3))),)
    # While a look at its own record waits for a second before the next one, the job dies: its next start gets the rest.
    stale = _of_store(at, _stale(chance.between(2, 3)))
    return stale, Fault(do="kill", target=_whoever(chance, ground), at=Moment(after_ms=chance.between(1, 800)))


def hang(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """Some calls get no answer for seconds, and then the connection ends. To be drawn once in a schedule: it adds up."""
    at = moment(chance, ground, "store")
    op, prefix = chance.one_of(_HANGING)
    times, delay_s = chance.between(1, 3), chance.between(1, 3)
    return (_of_store(at, StoreFault(kind="hang", op=op, prefix=prefix, times=times, delay_s=delay_s)),)


_HANGING: tuple[tuple[str | None, str], ...] = (
    (None, ""),
    ("put", ""),
    ("put", "chunks/"),
    ("get", ""),
    ("list", "log/"),
)


def _of_store(at: Moment, store: StoreFault) -> Fault:
    return Fault(do="store", target=Target(kind="store"), at=at, store=store)


def _stale(times: int) -> StoreFault:
    return StoreFault(kind="stale_list", op="list", prefix="log/", times=times)


def _whoever(chance: Chance, ground: Ground) -> Target:
    kind = chance.one_of(("rank", "node", "coordinator", "all"))
    if kind == "rank":
        return any_rank(chance, ground)
    return any_node(chance, ground) if kind == "node" else Target(kind=kind)


def _times(kind: str, op: str | None = None, prefix: str = "", *, most: int = 3) -> Callable[[Chance], StoreFault]:
    return lambda chance: StoreFault(kind=kind, op=op, prefix=prefix, times=chance.between(1, most))


def _for_some_time(kind: str, op: str | None = None) -> Callable[[Chance], StoreFault]:
    return lambda chance: StoreFault(kind=kind, op=op, times=None, for_s=chance.between(1, 3))


def _drip(op: str, least: int, most: int) -> Callable[[Chance], StoreFault]:
    """Bodies pass at so many thousand bytes a second."""
    return lambda chance: StoreFault(
        kind="drip", op=op, times=chance.between(1, 4), bytes_per_s=1000 * chance.between(least, most)
    )


_FAULTS: tuple[Callable[[Chance], StoreFault], ...] = (
    _times("error"),
    _times("error", "put"),
    _times("reset"),
    _times("reset", "put"),
    _times("answer_lost", "put", "chunks/"),
    _times("answer_lost", "put", "log/"),
    _times("answer_lost", "put", "index/"),
    _times("put_lost", "put", "chunks/"),
    _times("put_lost", "put", "index/"),
    _times("put_lost", "put", "log/"),
    _times("truncated", "get"),
    lambda _chance: StoreFault(kind="corrupted", op="get", prefix="chunks/", times=1),
    _for_some_time("slow_down"),
    _for_some_time("slow_down", "put"),
    _for_some_time("outage"),
    lambda chance: StoreFault(kind="delay", times=chance.between(2, 20), delay_s=1),
    lambda chance: StoreFault(kind="limit", times=None, per_s=chance.between(5, 20), for_s=3),
    _times("expired"),
    _times("expired", "put"),
    # The third answer of this kind to one call would be believed.
    _times("skewed", "put", "chunks/", most=2),
    _drip("put", 5, 50),
    # A restore that is late is no save that is lost.
    _drip("get", 20, 200),
)
"""What a store that keeps its contract may do, and what a lie of it must not cost."""
