"""Faults from the field: whole jobs on object stores that limit, lie, or are full of odd names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fixtures.agents import Agents
from fixtures.client_job import ClientJob, config_of
from fixtures.raw_job import Job
from fixtures.s3_double import Request, S3Double, Verdict, s3_double
from fixtures.stored_root import latest, objects_of, states, unproved

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.chaos.store_proxy.handle import StoreProxy
from ckptd.client import Checkpointer, CkptdError, InvalidRequest
from ckptd.daemon.catalog import StepState
from ckptd.daemon.sweep import sweep
from ckptd.protos import agent_pb2
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.error_pb2 import REASON_CORRUPT
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.fault_script import Fault, FaultKind, Op
from ckptd.storage_backends.urls import Driver, open_store

pytestmark = pytest.mark.integration

MIB = 1 << 20
MOST_BYTES = 64 * MIB
DRIVERS: tuple[Driver, ...] = ("obstore", "fsspec")
FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def double() -> Iterator[S3Double]:
    with s3_double() as made:
        yield made


def variables(double: S3Double) -> dict[str, str]:
    """Return what leads an agent to it."""
    return {"AWS_ENDPOINT_URL": double.endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.mark.parametrize(
    ("driver", "transport"), [("obstore", "shm"), ("fsspec", "stream")], ids=["obstore-shm", "fsspec-stream"]
)
def test_s051_s052_a_large_shard_is_single_puts_of_at_most_64_mib(
    agents: Agents, double: S3Double, driver: Driver, transport: Any
) -> None:
    """A store that takes no part, no copy, and nothing above 64 MiB keeps a shard of three times that; counted at the store."""
    refused: list[str] = []

    def judge(asked: Request) -> Verdict:
        is_multipart = asked.command == "POST" or {"uploads", "uploadId", "partNumber"} & set(asked.query)
        if is_multipart or "x-amz-copy-source" in asked.headers:
            refused.append(f"{asked.command} {asked.path} {asked.query}")
            return 501, "NotImplemented"
        return None

    double.judge, double.max_put_bytes = judge, MOST_BYTES
    shard = torch.arange(3 * MOST_BYTES // 4, dtype=torch.int32)
    agent = agents.new(env=variables(double))
    url = "s3://bucket/root"
    with Checkpointer(config=config_of(url, agent, transport=transport, store_driver=driver)) as one:
        one.save(1, {"shard": shard}).wait()
    assert refused == []
    chunks = [asked for asked in double.of("PUT") if "/chunks/" in asked.path]
    assert max(asked.nbytes for asked in chunks) <= MOST_BYTES
    assert sum(asked.nbytes for asked in chunks) >= 3 * MOST_BYTES
    assert 3 <= len(chunks) <= 6, "as few objects as the bound allows, each put once"
    other = agents.new(env=variables(double))
    found = {"shard": torch.zeros_like(shard)}
    with Checkpointer(config=config_of(url, other, store_driver=driver)) as one:
        restored = one.restore_into(found, required=True)
    assert restored is not None
    assert restored.tier == "store"
    assert torch.equal(found["shard"], shard)
    assert refused == []


@pytest.mark.parametrize("mib", [1, 80], ids=["one-chunk", "many-chunks"])
def test_s054_a_source_that_raises_half_way_leaves_no_object(agents: Agents, tmp_path: Path, mib: int) -> None:
    """The trainer's stream of bytes raises at half: no object of that step is ever put, the next one commits."""
    root = tmp_path / "root"
    job = Job(f"file://{root}", [agents.new()], 1)
    [rank] = job.ranks
    state = [bytes([7]) * (mib * MIB)]
    job.restored()
    assert rank.save(1, state, {}).go
    job.wait(1)
    reply = rank.begin(2, rank.put_layout(state))

    def half() -> Iterator[agent_pb2.SlotBytes]:
        for at in range(0, len(state[0]) // 2, MIB):
            part = agent_pb2.SlotBytes(offset=reply.data_offset + at, data=bytes([9]) * MIB)
            part.session, part.step, part.slot = rank.session, 2, reply.slot
            yield part
        raise ValueError("the source ended half way")

    with pytest.raises(grpc.RpcError):
        rank.stub.WriteSlot(half(), timeout=60)
    refusal = agent_pb2.FailStepRequest(session=rank.session, step=2)
    refusal.error.message = "the source ended half way"
    rank.stub.FailStep(refusal, timeout=60)
    rank.event("step", state=Event.ABORTED, step=2)
    assert objects_of(root, 2, "chunks") == objects_of(root, 2, "index") == []
    assert rank.save(3, state, {}).go
    job.wait(3)
    assert states(f"file://{root}") == {1: StepState.COMMITTED, 3: StepState.COMMITTED}
    assert unproved(f"file://{root}") == []
    job.detach()


def test_s054_an_upload_that_fails_half_way_is_referred_to_by_nothing(agents: Agents, tmp_path: Path) -> None:
    """A later one of its chunks cannot be put: no record refers to what is there, the step before restores, a sweep takes it."""
    root = tmp_path / "root"
    url = f"file://{root}"
    agent = agents.new(start=False)
    agent.start(env={"CKPTD_FAILPOINTS": "uploader.before_put=error:broken@6"})
    job = Job(url, [agent], 1)
    [rank] = job.ranks
    job.restored()

    def state(step: int) -> list[bytes]:
        return [bytes([step, at]) * (16 * MIB) for at in range(4)]

    assert rank.save(1, state(1), {}).go
    job.wait(1)
    assert rank.save(2, state(2), {}).go
    rank.event("step", state=Event.ABORTED, step=2)
    left = objects_of(root, 2, "chunks")
    assert 0 < len(left) < 5, "the failpoint must have fired in the midst"
    assert objects_of(root, 2, "index") == []
    assert latest(url) == 1
    assert unproved(url) == []
    assert rank.save(3, state(3), {}).go
    job.wait(3)
    job.detach()
    with open_store(url) as store:
        sweep(store)
    assert objects_of(root, 2, "chunks") == []
    assert unproved(url) == []


@pytest.fixture
def proxied(seaweed_env: SeaweedServer, tmp_path: Path) -> Iterator[StoreProxy]:
    with StoreProxy(seaweed_env.endpoint, tmp_path / "proxy") as proxy:
        yield proxy


def prefix_of(root: str) -> str:
    return root.split("/", 3)[3] + "/"


@pytest.mark.s3
def test_s056_many_ranks_under_a_request_limit_all_commit(
    agents: Agents, proxied: StoreProxy, fresh_root: Callable[[], str]
) -> None:
    """64 ranks, 50 puts a second under their prefix: refused ones are put again; objects stay few, names spread by themselves."""
    root = fresh_root()
    through = {"AWS_ENDPOINT_URL": proxied.endpoint, "CKPTD_PUT_CONCURRENCY": "64"}
    nodes = [agents.new(env=through) for _ in range(2)]
    job = Job(root, nodes, 32, begin_timeout_s=60.0, commit_timeout_s=120.0)
    job.restored()
    proxied.add(Fault(kind=FaultKind.LIMIT, op=Op.PUT, prefix=prefix_of(root), per_s=50))

    def state(rank: int) -> list[bytes]:
        return [bytes([rank, at]) * 300 for at in range(100)]

    for step in (1, 2):
        changed = step * 64
        replies = job.each(lambda rank, c=changed, s=step: rank.save(s, state(c + rank.about.rank), {}))
        assert all(reply.go for reply in replies)
        job.wait(step)
    assert any(line["fault"] == "limit" for line in proxied.done()), "the limit was never reached"
    with open_store(root) as store:
        keys = [info.key for info in store.list()]
    chunks = [key for key in keys if key.startswith("chunks/")]
    assert len(chunks) <= 2 * 64, "100 small tensors of a rank are one object"
    assert len([key for key in keys if key.startswith("index/")]) == 2 * 2
    assert len({key.split("/")[1] for key in chunks}) >= 60, (
        "first folders follow from digests: the load spreads over prefixes"
    )
    assert states(root) == {1: StepState.COMMITTED, 2: StepState.COMMITTED}
    assert unproved(root) == []
    job.detach()


@pytest.mark.s3
@pytest.mark.parametrize("driver", DRIVERS)
def test_s059_what_others_write_is_seen_at_once(agents: Agents, fresh_root: Callable[[], str], driver: Driver) -> None:
    """A has listed; B commits a step; A lists and restores it in the same session. An object of a new length is read whole."""
    root = fresh_root()
    reader, writer = agents.new(), agents.new()
    with (
        Checkpointer(config=config_of(root, writer, store_driver=driver)) as one,
        Checkpointer(config=config_of(root, reader, store_driver=driver, read_only=True)) as other,
        open_store(root, driver=driver) as store,
    ):
        one.save(10, {"x": torch.full((5,), 10.0)}).wait()
        found = {"x": torch.zeros(5)}
        first = other.restore_into(found)
        before = [info.key for info in store.list()]
        one.save(20, {"x": torch.full((5,), 20.0)}).wait()
        assert latest(root) == 20
        second = other.restore_into(found)
        assert first is not None
        assert second is not None
        assert (first.step, second.step, second.tier) == (10, 20, "store")
        assert found["x"].tolist() == [20.0] * 5
        assert len(list(store.list())) > len(before)
        for data in (b"short", b"a good deal longer than before", b"", b"again"):
            store.put("pins/x", data, mode=PutMode.OVERWRITE)
            assert store.get("pins/x") == data
            assert store.head("pins/x").size == len(data)
            assert {info.key: info.size for info in store.list("pins/")} == {"pins/x": len(data)}
        store.delete("pins/x")
        assert list(store.list("pins/")) == []


NAMES = ["exp[1]", "a?b", "a*b", "a b", "a+b%20", "ü", "#1", "my.run.2", "x" * 255]
TENSORS = ["a/b", "a.b", "a:b", "ü-ẞ", "x[0]", "..", "#?*%20"]


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_s060_odd_names_of_runs_buckets_and_tensors_are_names(
    agents: Agents, seaweed_env: SeaweedServer, tmp_path: Path, kind: str
) -> None:
    """Save, list, restore and delete work under every one of them, and touch nothing of the others."""
    if kind == "s3":
        seaweed_env.make_bucket("my.bucket")
    base = "s3://my.bucket/runs" if kind == "s3" else f"file://{tmp_path}"
    saver, loader = agents.new(), agents.new()
    state = {name: torch.full((3,), float(at)) for at, name in enumerate(TENSORS)}

    def one_run(at: int, name: str) -> None:
        root = f"{base}/{name}" if kind == "s3" else (tmp_path / name).as_uri()
        with Checkpointer(config=config_of(root, saver, job=name[:100], keep_last=1)) as one:
            one.save(1, {"at": at, "tensors": state}).wait()
            one.save(2, {"at": at, "tensors": state}).wait()
        found: dict[str, Any] = {"at": -1, "tensors": {tensor: torch.zeros(3) for tensor in TENSORS}}
        with Checkpointer(config=config_of(root, loader, job=name[:100])) as one:
            restored = one.restore_into(found, required=True)
        assert restored is not None
        assert (restored.step, restored.tier, found["at"]) == (2, "store", at)
        assert all(torch.equal(found["tensors"][tensor], state[tensor]) for tensor in TENSORS)
        assert latest(root) == 2
        with open_store(root) as store:
            # What step 1 shares with step 2 stays; its index and its record go.
            assert [info.key.split("/")[0] for info in sweep(store).delete] != []
        assert states(root) == {2: StepState.COMMITTED}
        assert unproved(root) == []

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(one_run, at, name) for at, name in enumerate(NAMES)]:
            done.result(timeout=120)
    for bad in ("..", "x" * 300):
        with pytest.raises(InvalidRequest) as caught:
            Checkpointer(config=config_of(f"{base}/{bad}/run", saver))
        assert caught.value.reason_name == "INVALID_ROOT"
        assert "1 to 255 bytes" in str(caught.value), "the allowed set is said"


@pytest.mark.s3
def test_s065_a_corrupt_read_is_read_again_and_a_rotten_object_is_named(
    agents: Agents, proxied: StoreProxy, fresh_root: Callable[[], str]
) -> None:
    """Once: one retry, and the restore is right. Always: an error with object and both digests; older ones only where allowed."""
    root = fresh_root()
    through = {"AWS_ENDPOINT_URL": proxied.endpoint}
    with ClientJob(root, [agents.new(env=through)], 2) as job:
        for step in (1, 2):
            job.wait(job.save(step))
    with open_store(root) as store:
        [rotten, *_] = [info.key for info in store.list("chunks/") if ".000000000002." in info.key]
    wrong: dict[str, Any] = {"kind": FaultKind.CORRUPTED, "op": Op.GET, "prefix": prefix_of(root) + rotten}

    def digests(text: str) -> set[str]:
        words = text.replace(",", " ").split()
        return {word for word in words if len(word) == 64 and set(word) <= set("0123456789abcdef")}

    node = agents.new(env=through)
    proxied.add(Fault(**wrong))
    with ClientJob(root, [node], 2) as job:
        job.check(job.restore(step=2), 2)
    assert [event["key"] for event in node.events("rejected")] == [rotten]

    proxied.add(Fault(**wrong, times=None))
    with ClientJob(root, [agents.new(env=through)], 2) as job:
        for asked in ({"step": 2}, {"on_corrupt": "raise"}):
            with pytest.raises(CkptdError) as caught:
                job.restore(**asked)
            error = caught.value
            assert (error.reason, error.key) == (REASON_CORRUPT, rotten)
            assert len(digests(str(error))) == 2, f"expected and found digest: {error}"
        answers = job.restore()
        job.check(answers, 1)
        assert [[bad.step for bad in found.fell_back_from] for found, _ in answers if found] == [[2], [2]]
    assert {line["key"].endswith(rotten) for line in proxied.done()} == {True}


@pytest.mark.s3
def test_s066_a_client_works_whatever_loop_runs_around_it(agents: Agents, seaweed: SeaweedServer) -> None:
    """Plain thread, two loops, inside a running one, four threads at once: all commit; nothing is said on stderr at the end."""
    agent = agents.new(env=seaweed.env())
    command = [sys.executable, "-X", "dev", str(FIXTURES / "event_loops.py"), str(agent.socket)]
    done = subprocess.run(
        [*command, *(seaweed.url(f"loops/{driver}") for driver in DRIVERS)],
        env={**os.environ, **seaweed.env()},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    complaints = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("Executing ")  # dev mode's word on slow callbacks, with the code's own names in it
        and any(word in line for word in ("loop", "nclosed", "ResourceWarning", "never awaited", "Traceback"))
    ]
    assert (done.returncode, complaints) == (0, []), done.stderr
    assert done.stdout.split() == ["12"]
