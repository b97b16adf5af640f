"""Which steps stay when a record is written (R8).

Pure. Owns: the rules of `Retention`. Does not own: when a record is written, or deleting (`sweep`). Invariants: the
newest step always stays; what is kept is a part of what was listed, in the same order: nothing is ever listed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptd.protos.snapshot_pb2 import Retention, StepRef

from .keys import StepId


def kept(
    listed: Sequence[StepRef],
    newest: StepId | None,
    retention: Retention,
    pinned: Collection[StepId] = (),
    also_keep: Collection[StepId] = (),
) -> list[StepRef]:
    """Return what stays of `listed`; a step stays when any rule keeps it.

    Steps are newer or older by (timeline, step): after a restart from an older step the new timeline's steps are the
    newer ones, whatever their numbers.

    Args:
        listed: All steps there are, the newest one included; any order.
        newest: The step that must stay: the one just committed, or the one training goes on from.
        retention: `keep_last` newest steps stay, 0 keeps all; steps divisible by `keep_every` stay, 0 keeps none.
        pinned: Steps somebody asked to keep.
        also_keep: Bases of snapshots in flight. Dropping one would be safe, but the snapshot would be lost.

    Returns:
        The entries that stay, ascending.
    """
    ascending = sorted(listed, key=StepId.of)
    if not retention.keep_last:
        return ascending
    last = {StepId.of(ref) for ref in ascending[-retention.keep_last :]}
    held = last | set(pinned) | set(also_keep) | ({newest} if newest is not None else set())
    every = retention.keep_every
    return [ref for ref in ascending if StepId.of(ref) in held or (every and ref.step % every == 0)]
