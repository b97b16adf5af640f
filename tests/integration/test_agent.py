"""Real agents with ranks that speak the protocol by hand."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from fixtures.agents import Agents
from fixtures.raw_job import Job, error_of, state_of
from fixtures.raw_rank import RawRank

from ckptd.daemon.log_reader import read_committed, read_newest
from ckptd.daemon.verify import Verdict, verify_step
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.shard_table import ShardRow
from ckptd.storage_backends.local import LocalStore

pytestmark = pytest.mark.integration


def test_a_saved_step_is_durable_and_restores_bit_for_bit_on_two_nodes(agents: Agents, tmp_path: Path) -> None:
    """Four ranks on two agents save; a second run restores the same bytes from memory, a third on fresh nodes from the store."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(), agents.new()]
    job = Job(root, nodes, 2)
    assert [found.found for found, _, _ in job.restored()] == [False] * 4
    for step in (1, 2, 3):
        assert all(reply.go for reply in job.save(step))
        job.wait(step)
    job.detach()

    again = Job(root, nodes, 2)
    answers = again.restored()
    again.check(answers, 3)
    assert {found.tier for found, _, _ in answers} == {"memory"}
    again.detach()

    for node in nodes:
        node.kill()
        node.wipe()
        node.start()
    fresh = Job(root, nodes, 2)
    answers = fresh.restored()
    fresh.check(answers, 3)
    assert {found.tier for found, _, _ in answers} == {"store"}
    fresh.save(4)
    fresh.wait(4)
    fresh.detach()


def test_a_step_staged_before_its_trainers_died_is_adopted_and_comes_from_memory(
    agents: Agents, tmp_path: Path
) -> None:
    """The ranks die while the upload waits; the next run restores that very step, from the agents' slots."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(env={"CKPTD_FAILPOINTS": "uploader.before_put=delay:2@3"}) for _ in range(2)]
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    job.wait(2, Event.STAGED)
    job.die()
    again = Job(root, nodes, 1)
    answers = again.restored()
    again.check(answers, 2)
    assert {found.tier for found, _, _ in answers} == {"memory"}
    adopted = nodes[0].wait_event("adopted", step=2)
    assert adopted["of"] != adopted["timeline"], "the step must have been decided by the new timeline"
    again.detach()


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator's agent", "other agent"])
def test_an_agent_killed_in_the_midst_of_an_upload_finishes_it_after_its_restart(
    agents: Agents, tmp_path: Path, victim: int
) -> None:
    """The agent dies after its first put of step 2; restarted, it adopts the slots and the step becomes durable."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(start=False) for _ in range(2)]
    for at, node in enumerate(nodes):
        node.start(env={"CKPTD_FAILPOINTS": "uploader.after_put=kill@3"} if at == victim else {})
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    process = nodes[victim].process
    assert process is not None
    assert process.wait(timeout=30) == -9, "the failpoint must have fired"
    job.die()
    nodes[victim].start()
    nodes[victim].wait_event("slots_adopted", step=2)
    nodes[victim].wait_event("sealed-local", step=2)
    again = Job(root, nodes, 1)
    again.check(again.restored(), 2)
    again.detach()


def test_an_uncompared_step_is_finished_by_the_next_agent_and_adopted_by_the_next_run(
    agents: Agents, tmp_path: Path
) -> None:
    """The agent dies before its index of step 2; what the coordinator had said of the step survives it, and backs the step."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(start=False), agents.new()]
    nodes[0].start(env={"CKPTD_FAILPOINTS": "uploader.before_index=kill@2"})
    job = Job(root, nodes, 1, verify_replicas="first")

    def save(step: int) -> list[bool]:
        def one(rank: RawRank) -> bool:
            state = [b"w" * 300_000, bytes([step]) * 300_000, bytes([step, 7])]  # each the same on both ranks
            rows = [
                ShardRow(
                    name=f"t{at}",
                    dtype="uint8",
                    global_shape=(len(data),),
                    offset=(0,),
                    length=(len(data),),
                    scope=0,
                    nbytes=len(data),
                )
                for at, data in enumerate(state)
            ]
            reply = rank.begin(step, rank.put_rows(rows))
            rank.stub.Staged(rank.fill(reply, step, state, {}), timeout=30)
            return reply.leave_uncompared

        left: list[bool] = job.each(one)
        return left

    assert save(1) == [False, False]
    job.wait(1)
    assert save(2) == [True, True]
    assert nodes[0].process is not None
    assert nodes[0].process.wait(timeout=30) == -9, "the failpoint must have fired"
    job.die()
    nodes[0].start()
    nodes[0].wait_event("sealed-local", step=2)
    again = Job(root, nodes, 1)
    assert {found.step for found, _, _ in again.restored()} == {2}
    nodes[0].wait_event("adopted", step=2)
    again.detach()
    store = LocalStore(tmp_path / "root")
    _, newest = read_newest(store)
    assert newest is not None
    ref = next(ref for ref in newest.listed if ref.step == 2)
    commit = read_committed(store, newest, ref)
    assert commit.posthumous
    assert (commit.compared_in.step, commit.compared_in.timeline) == (1, ref.timeline)
    report = verify_step(store, newest, ref)
    assert report.verdict is Verdict.GOOD, report.bad


def test_a_flipped_bit_at_rest_is_found_named_and_left_for_the_step_before(agents: Agents, tmp_path: Path) -> None:
    """Fresh nodes refuse the damaged newest step, name its object, and all ranks restore the older one."""
    root = tmp_path / "root"
    nodes = [agents.new(), agents.new()]
    job = Job(f"file://{root}", nodes, 1)
    for step in (1, 2):
        job.save(step)
        job.wait(step)
    job.detach()
    for node in nodes:
        node.kill()
        node.wipe()
        node.start()
    victim = min(path for path in (root / "chunks").rglob("*") if path.is_file() and ".000000000002." in path.name)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)

    strict = Job(f"file://{root}", nodes, 1)
    with pytest.raises(grpc.RpcError) as caught:
        strict.restored(raise_on_corrupt=True)
    assert error_of(caught.value).reason == error_pb2.REASON_CORRUPT
    assert victim.name in error_of(caught.value).message
    strict.detach()

    again = Job(f"file://{root}", nodes, 1)
    answers = again.restored()
    again.check(answers, 1)
    for found, _, _ in answers:
        assert [bad.step.step for bad in found.fell_back_from] == [2]
        assert victim.name in found.fell_back_from[0].why.message
    again.save(3)
    again.wait(3)
    again.detach()
    assert victim.exists(), "a quarantined step is left alone"


def test_two_bad_steps_in_a_row_are_left_for_the_one_before(agents: Agents, tmp_path: Path) -> None:
    """A chunk of the newest is gone, then the indexes of the next: ranks that ask once more for that one get the third."""
    root = tmp_path / "root"
    nodes = [agents.new(), agents.new()]
    job = Job(f"file://{root}", nodes, 1)
    for step in (1, 2, 3):
        job.save(step)
        job.wait(step)
    job.detach()
    for node in nodes:
        node.kill()
        node.wipe()
        node.start()
    next(path for path in (root / "chunks").rglob("*.000000000003.*") if path.is_file()).unlink()
    for path in list((root / "index").glob("000000000002.*/*.pb")):
        path.unlink()
    again = Job(f"file://{root}", nodes, 1)
    answers = again.restored()
    again.check(answers, 1)
    assert [[bad.step.step for bad in found.fell_back_from] for found, _, _ in answers] == [[3, 2]] * 2
    again.detach()


def test_a_second_start_of_a_living_job_is_refused_and_a_takeover_fences_the_first(
    agents: Agents, tmp_path: Path
) -> None:
    """Without takeover the second run gets JOB_ALIVE on every rank; with it, the first run is told that it is fenced."""
    root = f"file://{tmp_path}/root"
    first_node, second_node = agents.new(), agents.new()
    first = Job(root, [first_node], 2)
    first.save(1)
    first.wait(1)
    second = Job(root, [second_node], 2)
    for rank in second.ranks:
        assert rank.event("failed").failed.reason == error_pb2.REASON_JOB_ALIVE
    second.detach()
    third = Job(root, [second_node], 2, takeover=True)
    third.check(third.restored(), 1)
    third.save(2)
    third.wait(2)
    first.save(2)
    for rank in first.ranks:
        assert rank.event("fenced").fenced.reason == error_pb2.REASON_FENCED
    third.save(3)
    third.wait(3)
    third.detach()
    first.die()


def test_s032_only_some_ranks_saving_names_the_missing_and_harms_nothing(agents: Agents, tmp_path: Path) -> None:
    """One rank saves alone: it gets an error naming the others within the deadline, and the next proper save commits."""
    job = Job(f"file://{tmp_path}/root", [agents.new()], 4, begin_timeout_s=1.0)
    job.restored()
    with pytest.raises(grpc.RpcError) as caught:
        job.ranks[0].save(1, state_of(1, 0), {})
    error = error_of(caught.value)
    assert (error.reason, list(error.ranks)) == (error_pb2.REASON_RANKS_MISSING, [1, 2, 3])
    job.save(2)
    job.wait(2)
    with pytest.raises(grpc.RpcError) as caught:
        job.save(2)
    assert error_of(caught.value).reason == error_pb2.REASON_INVALID_STEP
    job.detach()


def test_another_job_on_the_root_is_refused_on_every_rank(agents: Agents, tmp_path: Path) -> None:
    """A root holds one job: a run under another name is refused and nothing of it is written."""
    node = agents.new()
    first = Job(f"file://{tmp_path}/root", [node], 1)
    first.restored()
    first.detach()
    second = Job(f"file://{tmp_path}/root", [node], 2, job="other")
    for rank in second.ranks:
        refused = rank.event("failed").failed
        assert refused.reason == error_pb2.REASON_JOB_MISMATCH
        assert "'job'" in refused.message
    second.detach()


@pytest.mark.parametrize("point", ["before", "after"])
def test_the_coordinators_agent_dies_around_a_decision_and_the_job_goes_on(
    agents: Agents, tmp_path: Path, point: str
) -> None:
    """Whichever side of the decision's put the agent dies on, the step is committed exactly once and restores."""
    root = f"file://{tmp_path}/root"
    nodes = [agents.new(start=False) for _ in range(2)]
    nodes[0].start(env={"CKPTD_FAILPOINTS": f"coordinator.{point}_decision=kill@2"})
    nodes[1].start()
    job = Job(root, nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    assert nodes[0].process is not None
    assert nodes[0].process.wait(timeout=30) == -9, "the failpoint must have fired"
    job.die()
    nodes[0].start()
    again = Job(root, nodes, 1)
    again.check(again.restored(), 2)
    again.save(3)
    again.wait(3)
    again.detach()
    log = sorted(path.name for path in (tmp_path / "root" / "log").iterdir())
    assert sum(name.endswith(".000000000002.json") for name in log) == (1 if point == "after" else 0), log


def test_a_run_that_only_reads_writes_nothing_and_the_next_one_tries_the_store(agents: Agents, tmp_path: Path) -> None:
    """The probe writes, so it waits for the first run that does: then a root that cannot be written is said at once."""
    root = tmp_path / "root"
    job = Job(f"file://{root}", [agents.new()], 1)
    job.save(1)
    job.wait(1)
    job.detach()
    before = {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}
    node = agents.new()
    for name in ("job", ""):
        reader = Job(f"file://{root}", [node], 1, job=name, read_only=True)
        reader.check(reader.restored(), 1)
        reader.detach()
    assert {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]} == before
    with pytest.raises(grpc.RpcError) as refused:
        Job(f"file://{root}", [node], 1, job="")
    assert error_of(refused.value).reason == error_pb2.REASON_INVALID_ARGUMENT

    (root / "probe").touch()  # no key below it can be put
    with pytest.raises(grpc.RpcError) as refused:
        Job(f"file://{root}", [node], 1)
    assert "probe/" in error_of(refused.value).message
    (root / "probe").unlink()
    again = Job(f"file://{root}", [node], 1)
    again.check(again.restored(), 1)
    again.save(2)
    again.wait(2)
    again.detach()
