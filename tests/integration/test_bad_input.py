"""Roots, names and starts that cannot work: every rank hears what, where and the way out; the next proper save commits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fixtures.agents import AgentProcess, Agents, running_agents
from fixtures.raw_job import Job, error_of
from fixtures.raw_rank import RawRank, options, run_credentials
from fixtures.small_disk import small_disk

from ckptd.chaos.seaweed import SeaweedServer
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest, DetachRequest, Event, HelloRequest, RunOptions
from ckptd.protos.error_pb2 import Error
from ckptd.protos.snapshot_pb2 import Mesh

pytestmark = pytest.mark.integration

SOON_S = 10.0
SECRET = "hunter2"  # noqa: S105 - what must never be told


@pytest.fixture(scope="module")
def node() -> Iterator[AgentProcess]:
    """One agent for all that is refused: nothing of it may stay behind in it."""
    with running_agents() as made:
        yield made.new()


def rank_of(
    node: AgentProcess, root: str, *, rank: int = 0, world: int = 1, job: str = "job", **changes: object
) -> RawRank:
    """Return a rank of a run of its own that has not called its agent yet."""
    return RawRank(
        node.socket,
        root=root,
        job=job,
        rank=rank,
        world=world,
        run=secrets.token_hex(8),
        credentials=run_credentials(),
        opts=options(**changes),
    )


def refusal(call: Callable[[], object]) -> Error:
    """Call what must be refused soon; returns the error."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    return error_of(caught.value)


def start_refused(rank: RawRank) -> Error:
    """Lead, and attach as another rank would: both must be refused alike; returns the error."""
    led = refusal(rank.lead)
    rank.about.endpoint = "127.0.0.1:1"
    attached = refusal(lambda: list(rank.stub.Attach(rank.about)))
    assert (attached.reason, attached.hint, attached.object) == (led.reason, led.hint, led.object)
    return led


def save_properly(node: AgentProcess, root: str, *, job: str = "job") -> None:
    """A run on two ranks saves and another one restores it."""
    first = Job(root, [node], 2, job=job)
    first.restored()
    first.save(1)
    first.wait(1)
    first.detach()
    second = Job(root, [node], 2, job=job)
    second.check(second.restored(), 1)
    second.detach()


# ---------------------------------------------------------------- roots


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("", "is no URL"),
        ("memory://x", "ends with the agent's process"),
        ("sfx://bucket/x", "unknown scheme 'sfx://'"),
        ("relative/folder", "is a relative path"),
        ("file://host/folder", "names a host"),
        ("file:///data/../etc", "has a '..' segment"),
        ("file:///data/%2e%2e/etc", "has a '..' segment"),
        ("file:///data/%ff", "no UTF-8"),
        ("file:///data/a\nb", "is no URL"),
        ("file:///", "the root of the file system"),
        ("file:///dev/shm/" + "x" * 300, "a segment of the path has more than 255 bytes: /dev/shm/xxx"),
        ("file:///etc/hostname/x", "Not a directory"),
        ("file:///proc/ckptd", "No such file or directory"),
        ("s3://ab/x", "is no bucket name"),
        (f"s3://user:{SECRET}@bucket/x", "credentials"),
        (f"ftp://user:{SECRET}@127.0.0.1:1/x", "is no place for snapshots"),
    ],
)
def test_a_root_that_cannot_be_used_is_refused_on_every_rank(node: AgentProcess, root: str, words: str) -> None:
    """Lead and Attach fail with INVALID_ROOT, what is wrong and a way out; no password of the URL is told or logged."""
    error = start_refused(rank_of(node, root, store_driver="auto"))
    assert (error.reason, error.phase) == (error_pb2.REASON_INVALID_ROOT, "register")
    assert words in error.message
    assert error.hint
    assert error.hint not in error.message, "the hint is told once"
    assert SECRET not in str(error)
    assert SECRET not in node.events_path.read_text()


def test_an_unknown_driver_is_refused_with_those_there_are(node: AgentProcess, tmp_path: Path) -> None:
    """INVALID_ARGUMENT names the driver; the root is not touched."""
    error = start_refused(rank_of(node, f"file://{tmp_path}/root", store_driver="ftp"))
    assert error.reason == error_pb2.REASON_INVALID_ARGUMENT
    assert "'ftp' is not one of auto, obstore, fsspec" in error.message
    assert not (tmp_path / "root").exists()


def test_a_root_beyond_those_an_agent_serves_is_refused(agents: Agents, tmp_path: Path) -> None:
    """NOT_ALLOWED for everything that is not below an allowed prefix, a longer name that begins alike included."""
    node = agents.new("--root", f"file://{tmp_path}/mine")
    for root in (f"file://{tmp_path}/mine2", f"file://{tmp_path}", f"{tmp_path}/mine/x", "s3://bucket/x"):
        error = start_refused(rank_of(node, root))
        assert (error.reason, error.object) == (error_pb2.REASON_NOT_ALLOWED, root)
        assert f"file://{tmp_path}/mine" in error.message
    save_properly(node, f"file://{tmp_path}/mine/a")


@pytest.mark.root
def test_a_root_that_becomes_unwritable_aborts_the_step_and_the_next_one_commits(
    node: AgentProcess, tmp_path: Path
) -> None:
    """Read-only from the start: refused with PERMISSION_DENIED. In the midst of a run: that step is aborted, no other."""
    with small_disk(tmp_path / "disk") as disk:
        root = f"file://{disk.folder}/root"
        disk.remount("ro")
        error = start_refused(rank_of(node, root))
        assert (error.reason, error.object) == (error_pb2.REASON_PERMISSION_DENIED, root)
        assert "Read-only file system" in error.message
        assert error.hint
        disk.remount("rw")
        job = Job(root, [node], 2)
        job.save(1)
        job.wait(1)
        disk.remount("ro")
        job.save(2)
        node.wait_event("upload_failed", step=2)
        disk.remount("rw")
        for rank in job.ranks:
            told = rank.event("step", state=Event.ABORTED, step=2).step.error
            assert told.reason == error_pb2.REASON_PERMISSION_DENIED
            assert "Read-only file system" in told.message
        job.save(3)
        job.wait(3)
        job.detach()
        again = Job(root, [node], 2)
        again.check(again.restored(), 3)
        again.detach()


@pytest.mark.s3
def test_a_missing_bucket_and_wrong_credentials_are_told_apart(agents: Agents, seaweed: SeaweedServer) -> None:
    """INVALID_ROOT for the bucket, PERMISSION_DENIED for key or secret, by both drivers; no secret is told."""
    node = agents.new(env=seaweed.env())
    wrong = agents.new(env={**seaweed.env(), "AWS_SECRET_ACCESS_KEY": SECRET})
    unknown = agents.new(env={**seaweed.env(), "AWS_ACCESS_KEY_ID": "AKNOBODY", "AWS_SECRET_ACCESS_KEY": SECRET})
    for driver, agent in (("obstore", wrong), ("obstore", unknown), ("fsspec", wrong)):
        error = start_refused(rank_of(node, "s3://ckptd-nowhere/x", store_driver=driver))
        assert error.reason == error_pb2.REASON_INVALID_ROOT
        assert "ckptd-nowhere" in error.message
        assert "make the bucket first" in error.hint
        error = start_refused(rank_of(agent, seaweed.url(f"bad/{driver}"), store_driver=driver))
        assert (error.reason, error.object) == (error_pb2.REASON_PERMISSION_DENIED, seaweed.url(f"bad/{driver}"))
        assert "credentials" in error.hint
        assert SECRET not in str(error)
        assert SECRET not in agent.events_path.read_text()
    save_properly(node, seaweed.url("good"))


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("job", ["", ".", "..", " x", "x ", "a\nb", "a\0b", "x" * 129, "x" * 300, "\u202egnp"])
def test_a_job_name_that_cannot_be_shown_is_refused(node: AgentProcess, tmp_path: Path, job: str) -> None:
    """INVALID_ARGUMENT with the name and what is allowed; nothing is written."""
    error = start_refused(rank_of(node, f"file://{tmp_path}/root", job=job))
    assert error.reason == error_pb2.REASON_INVALID_ARGUMENT
    assert repr(job)[:60] in error.message
    assert "1 to 128 printable characters" in error.hint
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("job", ["a/../../b", "[x]?*", "modèle ✓ 模型", "x" * 128])
def test_any_printable_job_name_and_path_works(node: AgentProcess, tmp_path: Path, job: str) -> None:
    """Dots, brackets, question marks, blanks and letters of any script in job and root: saved, listed and restored."""
    folder = tmp_path / "a b" / job.replace("/", "%")
    save_properly(node, str(folder), job=job)
    assert {path.name for path in tmp_path.iterdir()} == {"a b"}
    assert (folder / "job.json").exists()


# ---------------------------------------------------------------- starts


def test_a_start_that_contradicts_itself_is_refused(node: AgentProcess, tmp_path: Path) -> None:
    """Rank beyond the world, mesh of another size, coordinate outside it, no run, no secrets: INVALID_ARGUMENT says which."""

    def attach(rank: RawRank, change: dict[str, Any]) -> object:
        for name in ("endpoint", *change):
            rank.about.ClearField(name)  # type: ignore[arg-type] # the stubs want literals
        rank.about.MergeFrom(AttachRequest(**{"endpoint": "127.0.0.1:1", **change}))
        return list(rank.stub.Attach(rank.about))

    def lead(rank: RawRank, change: dict[str, Any]) -> object:
        for name, value in change.items():
            holder = rank.about.options if name == "verify_replicas" else rank.about
            setattr(rank.credentials if name in {"token", "private_key"} else holder, name, value)
        return rank.lead()

    calls: list[tuple[str, Callable[[RawRank, dict[str, Any]], object], dict[str, Any]]] = [
        ("rank 2 is not in a world of 2", attach, {"rank": 2}),
        ("world of 0", attach, {"world": 0}),
        ("does not have 2 ranks", attach, {"mesh": Mesh(axes=["dp"], sizes=[3])}),
        ("coordinate [1, 0] does not fit", attach, {"coordinate": [1, 0]}),
        ("coordinate [2] does not fit", attach, {"coordinate": [2]}),
        ("must be set", attach, {"run_id": ""}),
        ("'never' is none of always, first, every:N", attach, {"options": RunOptions(verify_replicas="never")}),
        ("world of 0", lead, {"world": 0}),
        ("does not have 3 ranks", lead, {"world": 3}),
        ("must be set", lead, {"run_id": ""}),
        ("'every:0' is none of always, first, every:N", lead, {"verify_replicas": "every:0"}),
        ("token", lead, {"token": b""}),
        ("private_key", lead, {"private_key": b"nonsense"}),
    ]
    for words, call, change in calls:
        rank = rank_of(node, f"file://{tmp_path}/root", rank=1, world=2)
        error = refusal(lambda call=call, rank=rank, change=change: call(rank, change))  # type: ignore[misc]
        assert error.reason == error_pb2.REASON_INVALID_ARGUMENT, error
        assert words in error.message
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("how", ["missing", "other mesh"])
def test_ranks_that_do_not_make_one_run_are_all_told(node: AgentProcess, tmp_path: Path, how: str) -> None:
    """One rank never comes, or comes with another mesh: every rank that is there hears it within attach_timeout_s."""
    root = f"file://{tmp_path}/root"
    ranks = [rank_of(node, root, rank=at, world=3, attach_timeout_s=1.0) for at in range(2 if how == "missing" else 3)]
    for rank in ranks[1:]:
        rank.about.run_id = ranks[0].about.run_id
        rank.about.credentials.CopyFrom(ranks[0].about.credentials)
    if how == "other mesh":
        ranks[2].about.mesh.CopyFrom(Mesh(axes=["tp"], sizes=[3]))
    endpoint = ranks[0].lead()
    began = time.monotonic()
    for rank in ranks:
        rank.attach(endpoint)
    for rank in ranks:
        told = rank.event("failed").failed
        if how == "missing":
            assert (told.reason, list(told.ranks)) == (error_pb2.REASON_RANKS_MISSING, [2])
        else:
            assert (told.reason, told.rank) == (error_pb2.REASON_RANKS_DISAGREE, 2)
            assert "['tp'] [3]" in told.message
            assert "['dp'] [3]" in told.message
    assert time.monotonic() - began < SOON_S
    assert not (tmp_path / "root" / "log").exists(), "nothing is written before all ranks are there"
    for rank in ranks:
        rank.detach()
    save_properly(node, root)


def test_no_protocol_version_in_common_is_said_with_both_ranges(node: AgentProcess, tmp_path: Path) -> None:
    """VERSION_MISMATCH for a client that is too new, too old, or says nothing; the agent serves the next one."""
    rank = rank_of(node, f"file://{tmp_path}/root")
    for lowest, highest in ((7, 9), (0, 0), (5, 1)):
        hello = HelloRequest(min_version=lowest, max_version=highest)
        error = refusal(lambda hello=hello: rank.stub.Hello(hello, timeout=SOON_S))  # type: ignore[misc]
        assert error.reason == error_pb2.REASON_VERSION_MISMATCH
        assert f"speaks {lowest} to {highest}, this agent 1 to 1" in error.message
        assert "at most one apart" in error.hint
    assert rank.stub.Hello(HelloRequest(min_version=1, max_version=9), timeout=SOON_S).version == 1


def test_a_session_the_agent_does_not_know_is_refused(node: AgentProcess, tmp_path: Path) -> None:
    """A call with a session of nobody says to attach again."""
    rank = rank_of(node, f"file://{tmp_path}/root")
    error = refusal(lambda: rank.stub.Detach(DetachRequest(session="f" * 32), timeout=SOON_S))
    assert (error.reason, error.hint) == (error_pb2.REASON_UNAVAILABLE, "attach again")


def test_an_agent_on_an_ipv6_address_serves_its_job(agents: Agents, tmp_path: Path) -> None:
    """The endpoint of ::1 is one that ranks can reach."""
    save_properly(agents.new("--listen", "::1"), f"file://{tmp_path}/root")
