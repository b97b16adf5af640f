"""Two nodes on two hosts with a real link between them: TLS alone is spoken, strangers are refused, a cut link harms nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fixtures.netns import TwoHosts, hosts_with_a_cable
from fixtures.raw_job import Job, error_of, state_of
from fixtures.raw_rank import RawRank, options, run_credentials
from fixtures.sockets import listeners

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import Event

pytestmark = [pytest.mark.integration, pytest.mark.root]

DEADLINE_S = 8.0
NAMESPACES = Path("/run/netns")
CONTROL_CALLS = {"Session", "SendLayout", "FetchPlan"}


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, gone after the test."""
    with hosts_with_a_cable() as hosts:
        yield hosts


def objects_under(root: Path) -> dict[str, bytes]:
    """Return every object of a root."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def committed(root: Path) -> list[str]:
    """Return the names of the log's commit decisions of the root."""
    return sorted(path.name for path in (root / "log").iterdir() if b'"committed"' in path.read_bytes())


def test_two_hosts_save_and_restore_and_a_stranger_gets_nothing(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """Two agents on two hosts commit and restore over TLS; without TLS, the key or the token nobody is heard."""
    root = tmp_path / "root"
    nodes = [two_hosts.agent(0), two_hosts.agent(1)]
    job = Job(f"file://{root}", nodes, 2)
    assert [found.found for found, _, _ in job.restored()] == [False] * 4
    job.save(1)
    job.wait(1)

    endpoint = job.ranks[0].about.endpoint
    assert endpoint.rpartition(":")[0] == two_hosts.addresses[0]
    listening = [listeners(node) for node in nodes]
    assert [[f"{host}:{port}" for host, port in one] for one in listening] == [[endpoint], []]
    before = objects_under(root)
    credentials, about = job.ranks[0].about.credentials, job.ranks[0].about
    own, other = credentials.certificate.decode(), run_credentials()
    try_of = {"certificate": own, "run_id": about.run_id, "token": ""}
    heard = two_hosts.ask(
        1,
        endpoint=endpoint,
        plain=[list(one) for one in listening[0]],
        shown=True,
        tries=[
            try_of,
            {**try_of, "token": other.token.hex()},
            {**try_of, "token": credentials.token.hex(), "certificate": other.certificate.decode()},
        ],
    )
    for words in heard["plain"]:
        for answer in map(bytes.fromhex, words.values()):
            assert answer == b"" or answer[0] == 0x15, f"without TLS only an alert may come back, not {answer!r}"
    assert heard["shown"].split() == own.split(), "what listens shows this run's certificate"
    no_token, wrong_token, wrong_key = heard["calls"]
    for stranger in (no_token, wrong_token):
        assert {stranger[call] for call in CONTROL_CALLS} == {"PERMISSION_DENIED"}
        assert stranger["Ping"] == {"run_id": about.run_id, "live_ranks": 4}
        assert stranger["ping_bytes"] == 2 + len(about.run_id) + 2, "Ping says nothing else"
    assert {wrong_key[call] for call in [*CONTROL_CALLS, "Ping"]} == {"UNAVAILABLE"}
    assert "CERTIFICATE_VERIFY_FAILED" in wrong_key["details"]
    assert objects_under(root) == before, "strangers changed the root"

    job.save(2)
    job.wait(2)
    job.detach()
    again = Job(f"file://{root}", nodes, 2)
    again.check(again.restored(), 2)
    again.detach()


def test_an_agent_with_the_wrong_token_is_refused_and_its_rank_is_told(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """A second node that trusts the right certificate but shows another token is turned away; the run goes on without it."""
    root = tmp_path / "root"
    nodes = [two_hosts.agent(0), two_hosts.agent(1)]
    job = Job(f"file://{root}", nodes[:1], 2)
    job.save(1)
    job.wait(1)
    about = job.ranks[0].about
    thief = run_credentials()
    thief.certificate = about.credentials.certificate
    intruder = RawRank(
        nodes[1].socket,
        root=about.root,
        job=about.job,
        rank=1,
        world=2,
        run=about.run_id,
        credentials=thief,
        opts=options(),
    )
    intruder.attach(about.endpoint)
    refused = intruder.event("failed").failed
    assert refused.reason == error_pb2.REASON_PERMISSION_DENIED
    assert "token" in refused.message
    with pytest.raises(grpc.RpcError, match="token") as caught:
        intruder.save(2, state_of(2, 1), {})
    assert error_of(caught.value).reason == error_pb2.REASON_PERMISSION_DENIED
    intruder.die()
    job.save(2)
    job.wait(2)
    job.detach()


def test_an_agent_tells_its_token_to_no_coordinator_with_another_key(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """A coordinator at the right address with another run's key hears neither token nor state; the rank gets a deadline."""
    nodes = [two_hosts.agent(0), two_hosts.agent(1)]
    impostor = Job(f"file://{tmp_path}/other", nodes[:1], 1)
    credentials = run_credentials()
    victim = RawRank(
        nodes[1].socket,
        root=f"file://{tmp_path}/root",
        job="job",
        rank=0,
        world=1,
        run="0123456789abcdef",
        credentials=credentials,
        opts=options(begin_timeout_s=0.5),
    )
    victim.attach(impostor.ranks[0].about.endpoint)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError, match="did not answer") as caught:
        victim.begin(1, victim.put_layout(state_of(1, 0)), timeout_s=0.5)
    assert time.monotonic() - began < DEADLINE_S, (
        "nobody can answer, so there is nothing to wait for after the deadline"
    )
    error = error_of(caught.value)
    assert error.reason == error_pb2.REASON_DEADLINE_EXCEEDED
    assert victim.about.endpoint in error.message
    assert "CERTIFICATE_VERIFY_FAILED" in error.message, "the rank must learn what is wrong"
    assert not (tmp_path / "root" / "log").exists()
    victim.die()
    impostor.detach()


def test_a_cut_during_an_upload_only_delays_the_commit(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """The link is down while the second node seals its part; when it is back, the step commits, and restores."""
    root = tmp_path / "root"
    nodes = [two_hosts.agent(0), two_hosts.agent(1, env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:1@2"})]
    job = Job(f"file://{root}", nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    job.wait(2, Event.STAGED)
    two_hosts.cut()
    nodes[1].wait_event("sealed-local", step=2)
    assert len(committed(root)) == 1, "it cannot be decided while the link is down"
    two_hosts.mend()
    job.wait(2)
    job.save(3)
    job.wait(3)
    job.detach()
    again = Job(f"file://{root}", nodes, 1)
    again.check(again.restored(), 3)
    again.detach()


def test_a_cut_that_outlasts_the_deadline_aborts_the_step_on_every_rank(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """The step is aborted by its deadline, on the far side as soon as the link is back; the next one commits whole."""
    root = tmp_path / "root"
    nodes = [two_hosts.agent(0), two_hosts.agent(1, env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:1@2"})]
    job = Job(f"file://{root}", nodes, 1, commit_timeout_s=3.0)
    job.save(1)
    job.wait(1)
    job.save(2)
    job.wait(2, Event.STAGED)
    two_hosts.cut()
    near, far = job.ranks
    aborted = near.event("step", state=Event.ABORTED, step=2).step.error
    assert aborted.reason == error_pb2.REASON_DEADLINE_EXCEEDED
    assert list(aborted.ranks) == [1]
    two_hosts.mend()
    assert far.event("step", state=Event.ABORTED, step=2).step.error.reason == error_pb2.REASON_DEADLINE_EXCEEDED
    job.save(3)
    job.wait(3)
    assert len(committed(root)) == 2
    job.detach()
    again = Job(f"file://{root}", nodes, 1)
    again.check(again.restored(), 3)
    again.detach()


def test_a_connection_that_dies_of_a_long_cut_is_opened_again(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """Both sides give the connection up; when the link is back, the agent says again what it held, and the step commits."""
    root = tmp_path / "root"
    nodes = [two_hosts.agent(0), two_hosts.agent(1, env={"CKPTD_FAILPOINTS": "uploader.before_index=delay:1@2"})]
    job = Job(f"file://{root}", nodes, 1)
    job.save(1)
    job.wait(1)
    job.save(2)
    job.wait(2, Event.STAGED)
    two_hosts.cut()
    two_hosts.break_connections()
    nodes[0].wait_event("node_lost", seconds=60)
    nodes[1].wait_event("sealed-local", step=2)
    two_hosts.mend()
    job.wait(2)
    job.save(3)
    job.wait(3)
    job.detach()


def test_nothing_is_left_when_a_test_on_two_hosts_fails(tmp_path: Path) -> None:
    """The block fails with an agent running: its process, its shared memory and both namespaces are gone."""
    with pytest.raises(ZeroDivisionError), hosts_with_a_cable() as hosts:  # noqa: PT012 - what fails is the block
        agent = hosts.agent(0)
        assert set(hosts.names) <= {path.name for path in NAMESPACES.iterdir()}
        _ = 1 / 0
    assert agent.process is not None
    assert agent.process.poll() is not None
    assert not agent.shm.exists()
    assert not agent.folder.exists()
    assert not set(hosts.names) & {path.name for path in NAMESPACES.iterdir()}
