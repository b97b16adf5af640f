"""The client's event log: one JSON line for every boundary a snapshot crosses on this rank.

Owns: its name. Does not own: what is worth saying, nor how a line is written (`event_lines`): lines of several ranks in one file
never mix, and a full disk does not end the training.
"""

from __future__ import annotations

from ckptd.protos.event_lines import EventLines


class Journal(EventLines):
    """The events of one rank. Thread-safe."""
