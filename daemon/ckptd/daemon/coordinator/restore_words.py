"""What nodes say of a restore: who asks, what ranks want, what is verified, what has failed, who has copied.

Pure. Owns: noting it, and saying again what a node has missed. Does not own: which step is offered, or when all may copy
(`restoring`). Invariant: a question that is only said again is answered with what was answered; a new one is a new restore of all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.daemon.coordinator.state import RestoreCall, State
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage


def on_restore(state: State, call: NodeMessage.Restore) -> None:
    """Note that a rank asks to restore; one that was answered and asks again, its agent having died, is answered again.

    The others have their answer and do not ask again, so this one must not wait for them. One that has restored, and asks
    anew, waits for the others, which are to do so too, whatever their agents say of the restore before.
    """
    limit = state.lead.options.restore_timeout_s
    timeout = min(limit, call.timeout_s) if call.timeout_s > 0 else limit
    state.schedule.reset()
    known, attempt, before = state.ranks.get(call.rank), state.attempt, state.restores.get(call.rank)
    anew = (
        (attempt is not None and call.rank in attempt.done)
        or (known is not None and known.restored is not None)
        or (before is not None and before.anew)
    )
    state.asks(call.rank)
    asked = RestoreCall(
        step=call.step if call.HasField("step") else None,
        raise_on_corrupt=call.raise_on_corrupt,
        rollback=call.rollback,
        deadline=state.now + timeout,
        anew=anew,
    )
    if attempt is not None and attempt.failed is None and not anew and asked.question == attempt.question:
        tell(state, attempt.offer, [state.ranks[call.rank].node])
        return
    state.restores[call.rank] = asked


def on_wanted(state: State, said: NodeMessage.RestoreWanted) -> None:
    """A rank has said what it wants: when all have, what is wrong with it is known, long before all bytes are there."""
    attempt = state.attempt
    if attempt is None or attempt.number != said.attempt:
        _say_missed(state, said.rank, said.attempt)
        return
    if attempt.step is None:
        return
    attempt.terms.take(said.rank, said.terms if said.HasField("terms") else None)
    if attempt.failed is None and not state.missing(attempt.terms.said):
        refusal = attempt.terms.refusal(attempt.step)
        if refusal is not None:
            attempt.failed, attempt.unused = refusal


def on_ready(state: State, said: NodeMessage.RestoreReady) -> None:
    """A rank's bytes are found and verified."""
    attempt = state.attempt
    if attempt is None or attempt.number != said.attempt:
        _say_missed(state, said.rank, said.attempt)
        return
    attempt.ready.add(said.rank)
    if attempt.go is not None:  # told before, to an agent that is no more, or over a connection that broke
        state.send(state.ranks[said.rank].node, attempt.go)


def on_done(state: State, rank: int, attempt: int | None = None) -> bool:
    """A rank has copied, or goes on to save: it needs no answer to Restore any more. Whether that was not known yet."""
    if state.attempt is None or attempt not in (None, state.attempt.number) or rank in state.attempt.done:
        return False
    state.attempt.done.add(rank)
    return True


def on_node_restarted(state: State, ranks: list[int]) -> None:
    """An agent is a new process: what its ranks were ready with is gone."""
    if state.attempt is not None and state.attempt.go is None:
        state.attempt.ready.difference_update(ranks)


def on_failed(state: State, said: NodeMessage.RestoreFailed) -> None:
    """A rank's bytes cannot be had, or the rank cannot use this step."""
    attempt = state.attempt
    if attempt is None or attempt.number != said.attempt:
        _say_missed(state, said.rank, said.attempt)
        return
    if attempt.failed is not None:
        return
    if attempt.go is not None:  # the others have copied: only the ranks that asked again can fail now
        error = CoordinatorMessage.RestoreError(attempt=attempt.number, error=said.error)
        state.send(state.ranks[said.rank].node, CoordinatorMessage(restore_error=error))
        return
    attempt.failed = said.error


def tell(state: State, message: CoordinatorMessage, nodes: Iterable[str] | None = None) -> None:
    """Tell nodes, all of them by default, of the newest attempt: what it offers, or the error it ended with."""
    for name in list(state.nodes if nodes is None else nodes):
        node = state.nodes.get(name)
        if node is not None and node.connected:
            node.heard = state.attempts
            state.send(name, message)


def _say_missed(state: State, rank: int, number: int) -> None:
    """A node speaks of an attempt that is over: its session broke meanwhile, and what took the attempt's place was lost with it.

    Not to one that was told in its present session, and whose words were on their way: its ranks may ask anew by now, and
    would take an error for the answer.
    """
    known = state.ranks.get(rank)
    node = state.nodes.get(known.node) if known is not None else None
    if known is None or node is None or node.heard >= state.attempts or number > state.attempts:
        return
    message = state.attempt.offer if state.attempt is not None else state.failed_restore
    if message is not None:
        tell(state, message, [known.node])
