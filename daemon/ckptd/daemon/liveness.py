"""Asks whether the run that wrote a claim is visibly alive.

Owns: one question to the coordinator that a claim names. Does not own: what follows from the answer; it is a courtesy to people
who start a job twice, and safety never rests on it. Invariant: only the certificate that the claim names is believed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from ckptd.protos import coordinator_pb2_grpc
from ckptd.protos.coordinator_pb2 import PingReply, PingRequest
from ckptd.protos.snapshot_pb2 import Claim

from . import rpc

TIMEOUT_S = 3.0


async def ask_run(claim: Claim) -> tuple[str, int] | None:
    """Return run id and number of living ranks as the claim's coordinator says, or None where nobody answers for it."""
    if not claim.endpoint:
        return None
    try:
        shown = await asyncio.to_thread(rpc.shown_certificate, claim.endpoint, timeout_s=TIMEOUT_S)
        if rpc.certificate_sha256(shown) != claim.certificate_sha256:
            return None
        async with rpc.pinned_channel(claim.endpoint, shown) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
            answer: PingReply = await stub.Ping(PingRequest(), timeout=TIMEOUT_S)
    except (OSError, ValueError, grpc.aio.AioRpcError):
        return None
    return answer.run_id, answer.live_ranks


def living_ranks(claim: Claim) -> int:
    """Return how many ranks of the claim's run are alive, as far as can be seen from here; blocks a few seconds at most."""
    answer = asyncio.run(ask_run(claim))
    return answer[1] if answer is not None and answer[0] == claim.run_id else 0
