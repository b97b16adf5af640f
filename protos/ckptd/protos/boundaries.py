"""Every failpoint there is: each lies between two steps of the protocol, and stands here once.

Owns: names, and what lies before and after each. Does not own: what happens there (`failpoints`), or the faults that are
tried at each (the chaos matrix, which takes all of them from here). A call of `failpoint` with another name, and a name that
no code passes, are errors that a test finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

ROLES = ("rank", "agent", "coordinator", "verb")
"""Who passes a boundary: a trainer's process, an agent, the agent that plays the coordinator, an operator's command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """One failpoint.

    Attributes:
        name: As in CKPTD_FAILPOINTS.
        role: Who passes it, one of ROLES.
        before: What has just been done.
        after: What comes next.
    """

    name: str
    role: str
    before: str
    after: str


def _one(role: str, name: str, before: str, after: str) -> Boundary:
    return Boundary(name=name, role=role, before=before, after=after)


def _calls(*told: tuple[str, str, str]) -> Iterable[Boundary]:
    """Around each RPC of agent.proto that a rank makes: (RPC, what was done before it, what comes after its answer)."""
    for method, before, after in told:
        yield _one("rank", f"client.before_{method}", before, f"the call {method}")
        yield _one("rank", f"client.after_{method}", f"{method} is answered", after)


def _handlers(*told: tuple[str, str]) -> Iterable[Boundary]:
    """Around what an agent does for each RPC: (RPC, what it does)."""
    for method, does in told:
        yield _one("agent", f"agent.received_{method}", f"the call {method} has arrived", does)
        yield _one("agent", f"agent.before_reply_{method}", does, f"the answer to {method}")


def _node_messages(*told: tuple[str, str, str]) -> Iterable[Boundary]:
    """A message from agent to coordinator: (kind, what the agent has done, what the coordinator does with it)."""
    for kind, before, after in told:
        yield _one("agent", f"agent.before_say_{kind}", before, f"`{kind}` goes to the coordinator")
        yield _one("coordinator", f"coordinator.received_{kind}", f"`{kind}` of a node has arrived", after)


def _coordinator_messages(*told: tuple[str, str, str]) -> Iterable[Boundary]:
    """A message from coordinator to agent: (kind, what the coordinator has done, what the agent does with it)."""
    for kind, before, after in told:
        yield _one("coordinator", f"coordinator.before_send_{kind}", before, f"`{kind}` goes to a node")
        yield _one("agent", f"agent.heard_{kind}", f"`{kind}` of the coordinator has arrived", after)


def _reads(*told: tuple[str, str, str]) -> Iterable[Boundary]:
    """Before each thing the coordinator reads of the store: (label, what was done before, what is read)."""
    for label, before, after in told:
        yield _one("coordinator", f"coordinator.before_{label}", before, after)


def _writes(*told: tuple[str, str, str, str]) -> Iterable[Boundary]:
    """Around each object the coordinator writes: (label, done before, what is written, what comes after)."""
    for label, before, what, after in told:
        yield _one("coordinator", f"coordinator.before_{label}", before, f"PUT of {what}")
        yield _one("coordinator", f"coordinator.after_{label}", f"{what} is in the store", after)


def _points(role: str, *told: tuple[str, str, str]) -> Iterable[Boundary]:
    for name, before, after in told:
        yield _one(role, name, before, after)


_ALL: tuple[Boundary, ...] = (
    # ------------------------------------------------------------ a rank
    *_calls(
        ("Hello", "the agent's socket is found", "the session is asked for"),
        ("Lead", "rank 0 has made the run's credentials", "the other ranks are told"),
        ("Attach", "the coordinator is known", "the session is there"),
        ("PutLayout", "the state is collected, and its layout is new to the session", "the rank asks to save"),
        ("Begin", "the layout is known to the agent", "the plan and the slot are looked up"),
        ("GetPlan", "the step is go, and its plan is new", "the copy into the slot"),
        ("WriteSlot", "bytes are cut into messages", "the next part of the copy"),
        ("Staged", "slot and trailer are full", "`save` returns"),
        ("FailStep", "this rank cannot save the step", "`save` raises"),
        ("Restore", "the script asks for a step", "what is stored is compared with what is tracked"),
        ("Want", "what is stored fits what is tracked", "verified bytes are copied into place"),
        ("ReadRestored", "verified bytes are the agent's, and cannot be mapped", "they are copied into place"),
        ("RestoreDone", "tensors are filled", "objects are loaded"),
        ("Detach", "nothing is in flight any more", "the connection ends"),
    ),
    *_points(
        "rank",
        ("client.before_publish", "the agent leads the run", "the other ranks are told where"),
        ("client.before_invitation", "the agent is greeted", "the rank waits for rank 0's word"),
        ("client.before_copy", "the slot is mapped", "tensors are copied into it"),
        ("client.before_tail", "tensors are in the slot", "objects and trailer are copied"),
        ("client.before_copy_in", "places of verified bytes are known", "they are opened"),
        ("client.before_fill", "the verified bytes are open, objects are read", "the script's tensors are filled"),
        ("client.before_load", "the agent knows that this rank has copied", "objects and generators are loaded"),
        ("client.heard_attached", "the agent has opened the session", "calls may go out"),
        ("client.heard_timeline", "the agent told the run's timeline", "it is noted"),
        ("client.heard_step", "the agent told how a save stands", "its handle moves on"),
        ("client.heard_fenced", "the agent told that a newer run has taken over", "every call raises"),
        ("client.heard_failed", "the agent told that the run is refused", "every call raises"),
    ),
    # ------------------------------------------------------------ an agent
    *_handlers(
        ("Hello", "versions are compared"),
        ("Lead", "the coordinator is made and listens"),
        ("Attach", "the session is made"),
        ("PutLayout", "the layout is checked and kept"),
        ("Begin", "the coordinator is asked, and the slot reserved"),
        ("GetPlan", "the plan is looked up"),
        ("WriteSlot", "bytes are written into the slot"),
        ("Staged", "the slot is the agent's, and its upload may begin"),
        ("FailStep", "the step is given up"),
        ("Restore", "the coordinator is asked, and indexes are read"),
        ("Want", "bytes are fetched and verified, and all ranks are waited for"),
        ("ReadRestored", "verified bytes are read from shared memory"),
        ("RestoreDone", "memory of the restore is given back"),
        ("Detach", "the rank's session ends"),
    ),
    *_points(
        "agent",
        ("agent.before_open_root", "a job is new to the agent", "its root is opened and tried"),
        ("agent.before_adopt_slots", "the root is open", "slots that an agent before left are taken over"),
        ("agent.before_bind", "the root is open, and the agent is to lead", "the coordinator listens"),
        ("saves.before_SendLayout", "the coordinator wants a layout", "the call SendLayout"),
        ("saves.after_SendLayout", "the coordinator has the layout", "the plan is waited for"),
        ("saves.before_FetchPlan", "the step is go, and its plan is new", "the call FetchPlan"),
        ("saves.after_FetchPlan", "the plan has arrived", "the stream is laid out"),
        ("held.before_plan_file", "a stream is laid out by a plan", "the plan is kept for a restart"),
        ("held.before_reserve", "plans of all ranks are known", "slots are reserved"),
        ("held.before_snapshot_file", "slots are reserved", "the step is noted for a restart"),
        ("held.before_stage", "a rank says its slot is full", "the slot's header says STAGED"),
        ("held.after_stage", "the slot's header says STAGED", "the coordinator is told"),
        ("held.before_free", "a step is given up or its memory needed", "its slots are freed"),
        ("uploader.before_base", "a snapshot is staged on the node", "the base's indexes are read"),
        ("uploader.before_hash", "the base is known", "chunks are hashed"),
        ("uploader.before_put", "a chunk is hashed, and new", "PUT of the chunk"),
        ("uploader.before_head", "an object is put", "HEAD of it"),
        ("uploader.after_put", "a chunk was seen in the store", "the next chunk"),
        ("uploader.before_index", "all chunks are in the store", "PUT of the index"),
        ("uploader.after_index", "the index was seen in the store", "the node's part is sealed"),
        ("uploader.before_told", "the node's part is sealed", "every run of the job hears of it"),
        ("restores.before_load", "a step is on offer", "its indexes are read"),
        ("restores.before_fetch", "all ranks of the node said what they want", "slots are hashed, chunks read"),
        ("fetcher.before_get", "a chunk is in no slot", "GET of it"),
        ("fetcher.after_get", "a chunk was read", "its digest is checked"),
    ),
    # ------------------------------------------------------------ between agent and coordinator
    *_node_messages(
        ("hello", "the agent is connected to the coordinator", "the node is known, with what it holds"),
        ("attached", "a rank has opened its session", "the run starts when all are there"),
        ("gone", "a rank has ended", "what it had not staged is given up"),
        ("begin", "a rank asked to save", "the step is begun when all have asked"),
        ("staged", "a rank's slot is the agent's", "all ranks are told when all are staged"),
        ("sealed", "the node's part is in the store", "the step is decided when all nodes are sealed"),
        ("failed", "the node cannot finish a step", "the step is aborted"),
        ("restore", "a rank asked to restore", "a step is chosen when all have asked"),
        ("restore_wanted", "a rank said what it wants", "what all ranks want is held side by side"),
        ("restore_ready", "a rank's bytes are verified", "all copy when all are ready"),
        ("restore_failed", "a rank cannot use the step, or its bytes cannot be had", "another one is chosen, or none"),
        ("restore_done", "a rank has copied", "it is noted"),
    ),
    *_coordinator_messages(
        ("welcome", "a node has said hello", "the node is connected"),
        ("refused", "the run cannot start", "the node's ranks are told"),
        ("need_layout", "all ranks asked to save, and a layout is unknown", "the layout is sent"),
        ("begin", "a step is go, skipped or refused", "plan and slots are made"),
        ("staged", "all ranks have staged", "the ranks are told"),
        (
            "outcome",
            "a decision is in the store, and the claims were looked at after it",
            "the step counts or is dropped",
        ),
        (
            "started",
            "the start record is in the store, and the claims were looked at after it",
            "older steps are settled",
        ),
        ("restore_chosen", "a step is chosen", "what it holds is read"),
        ("restore_go", "every rank's bytes are verified, and the start record is written", "ranks copy"),
        ("restore_error", "the restore has failed on some rank", "it fails on all"),
        ("fenced", "a newer claim was seen", "the node's ranks are told"),
    ),
    # ------------------------------------------------------------ the coordinator and the store
    *_reads(
        ("read_job", "all ranks are attached", "GET of job.json"),
        ("reread_job", "job.json was put", "GET of job.json again"),
        ("list_claims", "the root is this job's", "LIST of the log for the highest claim"),
        ("read_other_claim", "an older claim was seen", "GET of that claim"),
        ("probe", "the older run's endpoint is known", "its coordinator is asked whether it lives"),
        ("look_after_claim", "the claim is in the store", "LIST of the claims"),
        ("list_log", "the claim is the highest", "LIST of the log for the newest record"),
        ("read_newest", "the log is listed", "GET of the newest record"),
        ("read_newest_claim", "the newest record is known", "GET of its timeline's claim"),
        ("list_uploads", "the claim of the newest record is known", "LIST of the indexes, for uploads to wait for"),
        ("list_candidates", "no upload is waited for any more", "LIST of the indexes, for steps to adopt"),
        ("read_candidates", "a step may be adopted", "GET of its indexes"),
        ("list_pins_to_start", "every rank's bytes are verified, or nothing is restored", "LIST of the pins"),
        ("look_after_start", "the start record is in the store", "LIST of the claims"),
        ("read_indexes", "all nodes are sealed", "GET of the step's indexes"),
        ("list_pins", "the step is proved whole", "LIST of the pins"),
        ("second_look", "a decision is in the store", "LIST of the claims"),
        ("read_decision", "a listed step is to be offered", "GET of the record that decides it"),
    ),
    *_writes(
        ("job", "the root is empty", "job.json", "it is read back"),
        ("claim", "the highest claim is known", "the claim", "the claims are looked at"),
        ("start_record", "history is resolved", "the start record", "the claims are looked at"),
        ("decision", "a step is whole, and its base listed", "the decision", "the claims are looked at"),
        ("abort", "a step cannot become whole", "the marker of the abort", "the claims are looked at"),
    ),
    *_points(
        "coordinator",
        ("coordinator.received_SendLayout", "a rank's layout arrives", "it is checked and kept"),
        ("coordinator.received_FetchPlan", "a node wants a rank's plan", "the plan is sent"),
    ),
    # ------------------------------------------------------------ an operator's verbs
    *_points(
        "verb",
        ("sweep.before_record", "the root is open", "the newest record is read"),
        ("sweep.before_claims", "the newest record is read", "LIST of the claims"),
        ("sweep.before_indexes", "the newest record is settled", "indexes of all listed steps are read"),
        ("sweep.before_list", "it is known which chunks are needed", "LIST of everything"),
        ("sweep.before_delete", "an object is known to be dead", "DELETE of it"),
        ("sweep.after_delete", "a dead object is deleted", "the next one"),
        ("offline.before_claim", "the job is not running, and the newest record is known", "PUT of the claim"),
        ("offline.after_claim", "the claim is in the store", "the claims are looked at"),
        ("offline.before_resolve", "the claim is the highest", "the log is listed and the newest record read"),
        ("offline.before_candidates", "the newest record is known", "LIST of the indexes, for steps to adopt"),
        ("offline.before_start_record", "history is resolved", "PUT of the start record"),
        ("offline.after_start_record", "the start record is in the store", "the claims are looked at"),
    ),
)

BOUNDARIES: Mapping[str, Boundary] = MappingProxyType({one.name: one for one in _ALL})
"""By name, in the order of the protocol."""

if len(BOUNDARIES) != len(_ALL):
    raise ValueError("a failpoint is declared twice")
