"""Random kills at random moments, seed by seed: what comes back is whole, of one cut, and never older than what was acknowledged.

One seed, of five runs, by default. `CKPTD_SOAK_SEEDS=100 pytest tests/integration/test_soak.py` runs longer; a failing seed is
printed and replays with `CKPTD_SOAK_FIRST=<seed> CKPTD_SOAK_SEEDS=1`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import random
import threading
from pathlib import Path

import grpc
import pytest
from fixtures.agents import Agents
from fixtures.raw_job import Job
from fixtures.raw_rank import RawRank

from ckptd.daemon import log_reader, verify
from ckptd.protos.agent_pb2 import Event
from ckptd.storage_backends.urls import open_store

pytestmark = pytest.mark.integration

FIRST = int(os.environ.get("CKPTD_SOAK_FIRST", "0"))
SEEDS = int(os.environ.get("CKPTD_SOAK_SEEDS", "1"))
ROUNDS = 5
NODES = 2
PER_NODE = 2
STOPPED = (grpc.RpcError, EOFError, queue.Empty, FileNotFoundError)
"""How a run ends that was hurt; the last: the slot of a node that was lost."""


def state_of(salt: bytes, step: int, rank: int) -> list[bytes]:
    """Return a state that only this run at this step on this rank has, and a tensor that never changes."""
    own = hashlib.sha256(salt + b"%d.%d" % (step, rank)).digest()
    return [own * 4000, bytes([rank]) * 100_000, own[:5]]


class Soak:
    """One seed's run."""

    def __init__(self, seed: int, agents: Agents, root: Path) -> None:
        self.random = random.Random(seed)
        self.root = f"file://{root}"
        self.nodes = [agents.new() for _ in range(NODES)]
        self.acknowledged = 0
        self.fired: list[str] = []

    def round(self, number: int) -> None:
        """Start a run, check what it restores, save on, and be hurt."""
        salt = b"%d." % number
        job = Job(self.root, self.nodes, PER_NODE)
        step = self.check(job.restored())
        hurt = threading.Timer(self.random.uniform(0.0, 1.5), self.hurt, [job])
        hurt.start()
        try:
            for _ in range(self.random.randrange(3, 9)):
                step += 1
                goes = job.each(lambda rank, step=step: self.save(rank, salt, step))
                assert len(set(goes)) == 1, "a step is saved on all ranks, or skipped on all"
                if goes[0] and self.random.random() < 0.4:
                    job.wait(step)
        except STOPPED as failure:
            print(f"round {number} stopped at step {step}: {repr(failure)[:200]}")  # noqa: T201 - shown where the seed fails
        hurt.join()
        for rank in job.ranks:
            self.note(rank)
        job.die()
        for node in self.nodes:
            if node.process is not None and node.process.poll() is not None:
                node.start()

    def save(self, rank: RawRank, salt: bytes, step: int) -> bool:
        """Save a step on one rank; False where it was skipped."""
        try:
            reply = rank.save(step, state_of(salt, step, rank.about.rank), {"salt": salt})
        except ValueError as closed:  # what gRPC says of a channel that is closed
            raise EOFError(f"rank {rank.about.rank} is dead") from closed
        return reply.go

    def note(self, rank: RawRank) -> None:
        """Remember what the rank was told is durable."""
        with contextlib.suppress(queue.Empty):
            while (event := rank.events.get_nowait()) is not None:
                rank.seen.append(event)
        for event in rank.seen:
            if event.step.state == Event.COMMITTED:
                self.acknowledged = max(self.acknowledged, event.step.step)

    def hurt(self, job: Job) -> None:
        """Do one harmful thing."""
        what = self.random.choice(["rank", "ranks", "agent", "agents", "node", "nothing"])
        node = self.random.choice(self.nodes)
        self.fired.append(what)
        if what == "rank":
            self.random.choice(job.ranks).die()
        elif what == "ranks":
            job.die()
        elif what == "agent":
            node.kill()
        elif what == "agents":
            for one in self.nodes:
                one.kill()
        elif what == "node":
            node.kill()
            node.wipe()

    def check(self, answers: list[tuple[object, list[bytes], dict[str, bytes]]]) -> int:
        """All ranks have the same step of the same run, bit for bit, no older than the newest acknowledged one."""
        steps = {found.step for found, _, _ in answers}  # type: ignore[attr-defined]
        assert len(steps) == 1, steps
        step = steps.pop()
        assert step >= self.acknowledged, (step, self.acknowledged)
        if not any(found.found for found, _, _ in answers):  # type: ignore[attr-defined]
            return 0
        salts = {objects["salt"] for _, _, objects in answers}
        assert len(salts) == 1, salts
        salt = salts.pop()
        for rank, (_, state, _) in enumerate(answers):
            assert state == state_of(salt, step, rank), f"rank {rank} of step {step}"
        return int(step)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_whatever_dies_what_comes_back_is_whole_and_nothing_acknowledged_is_lost(
    seed: int, agents: Agents, tmp_path: Path
) -> None:
    """Five runs in a row, each hurt at a random moment; at the end every listed step verifies."""
    print(f"seed {seed}: CKPTD_SOAK_FIRST={seed} CKPTD_SOAK_SEEDS=1")  # noqa: T201 - the replay line
    soak = Soak(seed, agents, tmp_path / "root")
    for number in range(ROUNDS):
        soak.round(number)
    last = Job(soak.root, soak.nodes, PER_NODE)
    soak.check(last.restored())
    last.detach()
    assert len(soak.fired) == ROUNDS
    assert soak.acknowledged > 0
    with open_store(soak.root) as store:
        _, newest = log_reader.read_newest(store)
        assert newest is not None
        for ref in newest.listed:
            report = verify.verify_step(store, newest, ref)
            assert report.verdict is verify.Verdict.GOOD, report
