"""The event log: one JSON line for every boundary a snapshot crosses.

Owns: its name. Does not own: what is worth saying, nor how a line is written (`event_lines`). Chaos judges by this log; metrics
and reports are views of it.
"""

from __future__ import annotations

from ckptd.protos.event_lines import EventLines


class EventLog(EventLines):
    """The events of one agent; their kinds are the words of docs/events.md. Thread-safe."""
