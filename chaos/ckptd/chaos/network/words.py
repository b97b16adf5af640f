"""Faults of the network as values, and which ends they lie between. Pure.

Owns: the words. Does not own: their spelling in TOML (`reader`), nor how they are done (`netns_way`, `proxy_way`).
"""

from __future__ import annotations

from dataclasses import dataclass

NETWORK_FAULTS = ("partition", "one-way", "delay", "reset", "heal")
STORE = "store"
NODES = "nodes"
"""As an end: every other node, those that come later included."""
ALL = "all"
"""As an end: every other node, and the store."""
WAYS = ("netns", "proxy")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFault:
    """What the network does from the fault's moment on.

    Attributes:
        kind: One of NETWORK_FAULTS. "partition" loses everything between the ends without a word, "one-way" what the first
            end sends to the second, "delay" delays both directions, "reset" breaks the standing connections, "heal" ends the
            faults that last.
        between: The two ends: "node N", "coordinator" (the node that plays it then), "store", "nodes", "all"; none of heal.
        for_s: How long, seconds from the first thing that it struck; None: to the end.
        delay_ms: For "delay", milliseconds in each direction.
        replaced: The scheduler gives the first end's node up at once and puts a fresh one in its place; the old one
            lives on where nobody reaches it.
        way: How it was done, one of WAYS; empty in a plan.
    """

    kind: str
    between: tuple[str, ...] = ()
    for_s: int | None = None
    delay_ms: int = 0
    replaced: bool = False
    way: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        by = f", by {self.way}" if self.way else ""
        if self.kind == "heal":
            return f"heal{by}"
        others = {NODES: "the other nodes", ALL: "the other nodes and the store"}
        first, second = (others.get(end, end) for end in self.between)
        ends = f"from {first} to {second}" if self.kind == "one-way" else f"between {first} and {second}"
        delay = f" of {self.delay_ms} ms" if self.kind == "delay" else ""
        lasts = f" for {self.for_s} s" if self.for_s is not None else ""
        return f"{self.kind}{delay} {ends}{lasts}{by}"

    def node_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the nodes that are named."""
        return tuple(int(end.partition(" ")[2]) for end in self.between if end.startswith("node "))

    def misfit(self, nnodes: int) -> str:
        """Return why it cannot be done to a cluster of so many nodes; empty if it can."""
        if nnodes < 2 and not self.needs_store:
            return "a network between nodes needs at least 2 nodes; raise --nnodes"
        strange = [number for number in self.node_numbers() if number >= nnodes]
        return f"there is no node {strange[0]}; they are 0..{nnodes - 1}" if strange else ""

    @property
    def needs_store(self) -> bool:
        """Whether it lies between a node and the store."""
        return STORE in self.between or ALL in self.between
