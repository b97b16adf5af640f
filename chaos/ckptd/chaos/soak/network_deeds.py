"""What random schedules do to the network between nodes, and to the one to an S3 store. Pure.

Owns: how these deeds are drawn, and their bounds. Does not own: how often (`deeds`), nor by which way they are done
(`network.way`). A cut is shorter than the wait for a node that is silent (`way.AGENT_SETTINGS`), so that nobody may die of it;
one that lasts costs the node its place, as when it is frozen, and heals when the job has moved on.
"""

from __future__ import annotations

from ckptd.chaos.network.words import ALL, NODES, STORE, NetworkFault
from ckptd.chaos.scenario import Fault, Moment, Target
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.moments import Ground, moment

_NETWORK = Target(kind="network")
_MOST_CUT_S, _MOST_DELAY_S = 3, 5
_DELAYS_MS = (50, 100, 200)


def disturb(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """What is said between a node and the others is lost or late for some seconds, or their connections are reset."""
    one = chance.below(ground.nnodes)
    return (_disturbance(chance, ground, (f"node {one}", NODES)),)


def disturb_store(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """The same between a node and an S3 store."""
    one = chance.below(ground.nnodes)
    return (_disturbance(chance, ground, (f"node {one}", STORE)),)


def cut_off(chance: Chance, ground: Ground) -> tuple[Fault, ...]:
    """A node is out of reach, a fresh one takes its place, and it comes back when the job has moved on."""
    other = ALL if ground.store == "s3" and chance.percent(50) else NODES
    fault = NetworkFault(kind="partition", between=(f"node {chance.below(ground.nnodes)}", other), replaced=True)
    cut = Fault(do="network", target=_NETWORK, at=moment(chance, ground, "node"), network=fault)
    back = Moment(event="decided", nth=chance.between(1, 2))
    if chance.percent(40):
        back = Moment(after_ms=chance.between(50, 3000))
    return cut, Fault(do="network", target=_NETWORK, at=back, network=NetworkFault(kind="heal"))


def _disturbance(chance: Chance, ground: Ground, between: tuple[str, str]) -> Fault:
    kind = chance.weighted(("partition", "one-way", "delay", "reset"), (3, 3, 2, 3))
    if kind == "one-way" and chance.percent(50):
        between = (between[1], between[0]) if between[1] == STORE else between
    for_s = None if kind == "reset" else chance.between(1, _MOST_DELAY_S if kind == "delay" else _MOST_CUT_S)
    delay_ms = chance.one_of(_DELAYS_MS) if kind == "delay" else 0
    fault = NetworkFault(kind=kind, between=between, for_s=for_s, delay_ms=delay_ms)
    return Fault(do="network", target=_NETWORK, at=moment(chance, ground, "node"), network=fault)
