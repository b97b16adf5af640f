"""What the nodes of a run say, and what it means that one is silent.

Owns: who is there: nodes, their ranks, what they hold; and telling a node that comes back what it missed. Does not own:
what a word about a save or a restore leads to (`beginning`, `saving`, `restoring`). Pure, as all of this package.
"""

from __future__ import annotations

from ckptd.daemon.coordinator import beginning, restore_words, saving, starting
from ckptd.daemon.coordinator.state import Node, Phase, Rank, State
from ckptd.daemon.errors import make_error
from ckptd.protos import error_pb2
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, Held, NodeMessage
from ckptd.protos.error_pb2 import Error


def on_node(state: State, name: str, message: NodeMessage) -> None:
    """Take what a node says."""
    kind = message.WhichOneof("kind")
    if kind == "hello":
        _on_hello(state, name, message.hello)
    elif kind == "attached":
        _on_attached(state, name, message.attached)
    elif kind == "gone":
        _on_gone(state, name, message.gone)
    elif kind == "begin":
        state.asks(message.begin.rank)
        beginning.on_begin(state, message.begin)
        restore_words.on_done(state, message.begin.rank)
    elif kind == "staged":
        saving.on_staged(state, message.staged)
        _note_held(state, name, message.staged.timeline, message.staged.step, rank=message.staged.rank)
    elif kind == "sealed":
        saving.on_sealed(state, message.sealed, name)
        _note_held(state, name, message.sealed.timeline, message.sealed.step, sealed=message.sealed)
    elif kind == "failed":
        saving.on_failed(state, message.failed)
        _note_held(state, name, message.failed.timeline, message.failed.step, failed=message.failed.error)
    elif kind == "restore":
        restore_words.on_restore(state, message.restore)
    elif kind == "restore_wanted":
        restore_words.on_wanted(state, message.restore_wanted)
    elif kind == "restore_ready":
        restore_words.on_ready(state, message.restore_ready)
    elif kind == "restore_failed":
        restore_words.on_failed(state, message.restore_failed)
    elif kind == "restore_done":
        _on_restore_done(state, message.restore_done)


def _on_hello(state: State, name: str, hello: NodeMessage.NodeHello) -> None:
    before = state.nodes.get(name)
    held = {(one.timeline, one.step): one for one in hello.held}
    state.nodes[name] = Node(incarnation=hello.incarnation, hostname=hello.hostname, connected=True, held=held)
    state.send(name, CoordinatorMessage(welcome=CoordinatorMessage.Welcome(incarnation=state.incarnation)))
    if before is not None and before.incarnation != hello.incarnation:
        _restarted(state, name, held)
    if state.phase is Phase.ENDED:
        if state.fenced is not None:
            state.send(name, CoordinatorMessage(fenced=state.fenced))
        elif state.refusal is not None:
            state.send(name, CoordinatorMessage(refused=state.refusal))
    elif state.phase is Phase.RUNNING:
        starting.announce(state, name)
    for (timeline, step), one in held.items():
        if timeline == str(state.timeline):
            _retell(state, name, step, one)


def _retell(state: State, name: str, step: int, held: Held) -> None:
    """Say again what the node may have missed while it was away."""
    run = state.steps.get(step)
    if not _tell_outcome(state, name, step) and run is not None:
        for rank in held.ranks:
            saving.on_staged(state, NodeMessage.Staged(rank=rank, step=step, timeline=str(state.timeline)))
        if held.HasField("index"):
            run.sealed[name] = held.index
        elif held.HasField("failed") and run.failed is None:
            run.failed = held.failed


def _tell_outcome(state: State, name: str, step: int) -> bool:
    """Tell a node how a step of this timeline ended; return whether it is decided."""
    if step not in state.decided:
        return False
    outcome = CoordinatorMessage.Outcome(timeline=str(state.timeline), step=step)
    if (why := state.decided[step]) is not None:
        outcome.aborted.CopyFrom(why)
    state.send(name, CoordinatorMessage(outcome=outcome))
    return True


def _restarted(state: State, name: str, held: dict[tuple[str, int], Held]) -> None:
    """The node's agent is a new process: what its ranks had not staged is torn."""
    mine = [number for number, rank in state.ranks.items() if rank.node == name]
    restore_words.on_node_restarted(state, mine)
    for run in state.steps.values():
        kept = held.get((str(state.timeline), run.step))
        torn = [rank for rank in mine if kept is None or rank not in kept.ranks]
        if torn and run.failed is None and name not in run.sealed:
            run.failed = make_error(
                error_pb2.REASON_NODE_LOST,
                f"step {run.step}: the agent of ranks {torn} was lost before they were staged",
                step=run.step,
                ranks=torn,
                node=name,
                phase="stage",
            )
            state.torn[run.step] = run.failed


def _on_attached(state: State, name: str, said: NodeMessage.RankAttached) -> None:
    if said.world != state.world or said.mesh != state.lead.mesh or said.rank >= state.world:
        error = make_error(
            error_pb2.REASON_RANKS_DISAGREE,
            f"rank {said.rank} comes with world {said.world} and mesh {list(said.mesh.axes)} {list(said.mesh.sizes)}, "
            f"rank 0 with world {state.world} and mesh {list(state.lead.mesh.axes)} {list(state.lead.mesh.sizes)}",
            rank=said.rank,
            phase="register",
        )
        starting.refuse(state, error)
        return
    theirs, ours = (one.verify_replicas or "always" for one in (said.options, state.lead.options))
    if theirs != ours:
        error = make_error(
            error_pb2.REASON_RANKS_DISAGREE,
            f"rank {said.rank} comes with verify_replicas {theirs!r}, rank 0 with {ours!r}",
            hint="give every rank the same value, as argument or in CKPTD_VERIFY_REPLICAS on every node",
            rank=said.rank,
            ranks=sorted({0, said.rank}),
            phase="register",
        )
        starting.refuse(state, error)
        return
    restored = (said.restored.timeline, said.restored.step) if said.HasField("restored") else None
    state.ranks[said.rank] = Rank(node=name, coordinate=tuple(said.coordinate), restored=restored)
    state.log("attached", rank=said.rank, node=name)
    for ref in said.in_flight:
        if ref.timeline == str(state.timeline):
            _tell_outcome(state, name, ref.step)


def _on_restore_done(state: State, said: NodeMessage.RestoreDone) -> None:
    """A rank has copied, or could not, or knows that there was nothing: said in each session, and logged once."""
    is_new = restore_words.on_done(state, said.rank, said.attempt)
    if is_new and state.attempt is not None and state.attempt.step is not None:
        state.log("restored", rank=said.rank, error=said.error.message or None)


def _on_gone(state: State, name: str, said: NodeMessage.RankGone) -> None:
    rank = state.ranks.get(said.rank)
    if rank is None or rank.node != name or not rank.attached:
        return
    rank.attached, rank.clean = False, said.clean
    state.begins.pop(said.rank, None)
    state.restores.pop(said.rank, None)
    state.log("rank_gone", rank=said.rank, clean=said.clean)
    why = make_error(
        error_pb2.REASON_RANK_FAILED,
        f"rank {said.rank} ended" if said.clean else f"rank {said.rank} died: {said.why.message}",
        rank=said.rank,
        phase="stage",
    )
    saving.fail_unstaged(state, [said.rank], why)


def _note_held(
    state: State,
    name: str,
    timeline: str,
    step: int,
    *,
    rank: int | None = None,
    sealed: NodeMessage.Sealed | None = None,
    failed: Error | None = None,
) -> None:
    node = state.nodes.get(name)
    if node is None:
        return
    held = node.held.setdefault((timeline, step), Held(timeline=timeline, step=step))
    if rank is not None and rank not in held.ranks:
        held.ranks.append(rank)
    if sealed is not None:
        held.index.CopyFrom(sealed.index)
    if failed is not None:
        held.failed.CopyFrom(failed)


def on_lost(state: State, name: str, incarnation: str) -> None:
    """A node's session broke: it may come back, within its grace."""
    node = state.nodes.get(name)
    if node is not None and node.incarnation == incarnation and node.connected:
        node.connected, node.lost_at = False, state.now
        state.log("node_lost", node=name)


def give_up_lost(state: State) -> None:
    """A node that was away for too long takes its ranks with it, and what it had not uploaded."""
    for name, node in state.nodes.items():
        if node.connected or state.now < node.lost_at + state.node_grace_s:
            continue
        lost = [number for number, rank in state.ranks.items() if rank.node == name and rank.attached]
        _fail_unsealed(state, name)
        for number in lost:
            state.ranks[number].attached = False
        if lost:
            why = make_error(
                error_pb2.REASON_NODE_LOST,
                f"node {name} ({node.hostname}) with ranks {lost} is lost",
                node=name,
                ranks=lost,
                phase="stage",
            )
            saving.fail_unstaged(state, lost, why)


def _fail_unsealed(state: State, name: str) -> None:
    """A node that does not come back cannot finish its uploads."""
    for run in state.steps.values():
        if run.failed is None and name not in run.sealed:
            run.failed = make_error(
                error_pb2.REASON_NODE_LOST,
                f"step {run.step}: node {name} ({state.nodes[name].hostname}) was lost before its upload was done",
                step=run.step,
                node=name,
                phase="upload",
            )
