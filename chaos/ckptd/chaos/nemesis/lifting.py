"""Takes faults back that last for a time: the disk is given its space again, the clock is set, the slow process let go.

Owns: when. Does not own: how (`Harm.undo`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptd.chaos.nemesis.harm import Harm


class Lifting:
    """The faults of one run that are yet to be taken back. For one thread.

    Args:
        say: Is told "lifted" with what was taken back.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._due: list[tuple[float, Harm]] = []

    def note(self, harm: Harm) -> None:
        """Keep what a fault did, if it can be taken back."""
        if harm.undo is not None:
            after = float("inf") if harm.undo_after_s is None else harm.undo_after_s
            self._due.append((time.monotonic() + after, harm))

    def blocks_start(self) -> bool:
        """Whether a launch that starts now may die of what lasts."""
        return any(harm.blocks_start for _, harm in self._due)

    def lift(self, *, everything: bool = False) -> None:
        """Take back what is due, or everything."""
        now = time.monotonic()
        due = [harm for at, harm in self._due if everything or at <= now]
        self._due = [(at, harm) for at, harm in self._due if not everything and at > now]
        for harm in due:
            if harm.undo is not None:
                harm.undo()
            self._say("lifted", what=harm.what)
