"""How large things may be: one place for what readers refuse, and what writers therefore must not write or send.

Owns: the numbers. Does not own: refusing. Invariant: whatever a record may hold fits a message, so that what counts at
rest can be told to every rank.
"""

from __future__ import annotations

MAX_RECORD_BYTES = 64 << 20
"""Of a record, a claim or job.json, as stored; 64 MiB of JSON list some 200,000 steps."""

MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + (1 << 20)
"""Of a message of gRPC. Parts of records travel in one: a decision, and what is quarantined, in `RestoreChosen`, the listed
steps in `Started`. No part is larger in the binary form than in JSON; the rest of the message has the MiB to spare."""

MESSAGE_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
"""For every channel and every server. gRPC's own default takes 4 MiB and sends any size: what one end says the other may
refuse, and a session that breaks on a message breaks on it again whenever it is opened anew."""

MAX_LABEL_BYTES = 1 << 20
"""Of a step's tags, names and texts together in UTF-8, and likewise of the names of its metrics."""
