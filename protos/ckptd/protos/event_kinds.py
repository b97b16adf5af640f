"""Every kind of line in an event log, by who writes it; docs/events.md says when each comes, and with which fields.

Owns: the names, so that whoever waits for an event can be told that there is none of that name. Does not own: writing a line
(`event_lines`). A kind that code emits and that does not stand here, or stands here and is emitted nowhere, is an error that a
test finds; so is a kind that stands under another writer.
"""

from __future__ import annotations

OF_AGENTS = (
    *("listening", "slots_adopted", "not_adopted", "attached_local", "rank_detached", "rank_lost", "staged_local"),
    *("hashed", "put", "sealed-local", "upload_failed", "fetched", "rejected", "orphans_freed", "restore_failed_local"),
    *("slots_given_up", "run_ended", "internal_error", "stopping", "stopped"),
)
"""Of every agent's own doing."""
OF_COORDINATORS = (
    *("attached", "claimed", "waiting_for_uploads", "not_adopted", "resolved", "refused", "adopted", "started"),
    *("planned", "begin_refused", "begun", "skipped", "staged", "sealed", "decided", "acknowledged"),
    *("restore_chosen", "quarantined", "restore_go", "restored", "restore_failed"),
    *("store_failed", "stale_listing", "node_lost", "rank_gone", "fenced", "coordinator_closed", "internal_error"),
)
"""Of the agent that plays the coordinator, in its own log."""
OF_CLIENTS = ("save_returned", "audited", "restored")
"""Of a rank."""
OF_ALL = ("events_lost",)
"""Of any log whose disk was full."""
OF_A_STEP = frozenset(
    {"slots_adopted", "slots_given_up", "staged_local", "hashed", "put", "sealed-local", "upload_failed", "fetched"}
    | {"not_adopted", "adopted", "planned", "begin_refused", "begun", "staged", "sealed", "decided", "acknowledged"}
    | {"restore_chosen", "quarantined", "restore_go"}
)
"""Of agents and coordinators: those that say which step they are about."""
