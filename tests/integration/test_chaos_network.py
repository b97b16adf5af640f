"""The network between nodes is hurt: real namespaces or proxies, real agents, torchrun and gloo; and what comes back is right.

CKPTD_TEST_SCENARIOS=all takes more scenarios; or name some, see `fixtures.asked`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fixtures.asked import asked

from ckptd.chaos import cache
from ckptd.chaos.cluster.fabric import NodeNetwork
from ckptd.chaos.conductor import Limits
from ckptd.chaos.network import namespaces
from ckptd.chaos.network.netns_way import NamespaceNetwork
from ckptd.chaos.network.words import NetworkFault
from ckptd.chaos.report import Report
from ckptd.chaos.scenario_reader import load
from ckptd.chaos.store_proxy.ledger import read_ledger
from ckptd.chaos.trial import Stage, run_trial
from ckptd.chaos.verdict import Verdict
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

HERE = Path(__file__).parent.parent
SCRIPT = (str(HERE / "fixtures" / "tiny_trainer.py"), "--root", "{root}", "--digests", "{digests}")
SEED = 7
WITHIN = timedelta(seconds=30)
A_MOMENT_S = 0.2
"""Long enough that what is on its way would have come."""
NAMES = {"node 0": "0", "node 1": "1"}


class Pair:
    """Two nodes of a network of namespaces, a connection between them, and a way to open more."""

    def __init__(self, network: NamespaceNetwork) -> None:
        self.network = network
        self.homes = [network.join(index, str(index)) for index in range(2)]
        self._end = ExitStack()
        self.server = self._end.enter_context(self.at(1, lambda: socket.create_server((self.homes[1].listen, 0))))
        self.near, self.far = self.connected()

    def at(self, index: int, work: Any) -> Any:
        """Call `work` on a node."""
        return namespaces.inside(_path(self.homes[index]), work)

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection from node 0 to node 1."""
        address = self.server.getsockname()
        near = self._end.enter_context(self.at(0, lambda: socket.create_connection(address, timeout=30)))
        far = self._end.enter_context(self.server.accept()[0])
        far.settimeout(30)
        return near, far

    def order(self, number: int, **words: Any) -> int | None:
        """Do a fault between both nodes."""
        fault = NetworkFault(**{"between": ("node 0", "node 1"), **words})
        return self.network.order(fault, number, NAMES)

    def struck(self, number: int) -> int:
        """Return what a fault has struck."""
        counts = self.network.helper.ask("counts")["counts"]
        return int(counts[str(number)][0])

    def close(self) -> None:
        """Close the sockets."""
        self._end.close()


def _path(home: NodeNetwork) -> str:
    (path,) = (word.removeprefix("--net=") for word in home.inside if word.startswith("--net="))
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two nodes with a connection between them; skips where namespaces are not allowed."""
    if why := namespaces.missing():
        pytest.skip(why)
    network = NamespaceNetwork(tmp_path, {})
    try:
        both = Pair(network)
        yield both
        both.close()
    finally:
        network.close()


def hears_nothing(end: socket.socket) -> bool:
    """Whether nothing comes for a moment: no byte, no end, no reset."""
    end.settimeout(A_MOMENT_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(30)
    return False


@pytest.mark.root
def test_packets_are_lost_without_a_word_in_the_directions_that_were_ordered(pair: Pair, tmp_path: Path) -> None:
    """A cut is silent both ways, one-way in one; the kernel sends again what was lost, and the record counts packets."""
    pair.order(0, kind="partition", for_s=3)
    pair.near.sendall(b"a")
    pair.far.sendall(b"b")
    assert wait_until(lambda: pair.struck(0) >= 2, within=WITHIN)
    assert hears_nothing(pair.near)
    assert hears_nothing(pair.far)
    assert pair.far.recv(1) == b"a"
    assert pair.near.recv(1) == b"b"

    pair.order(1, kind="one-way", between=("node 1", "node 0"))
    pair.near.sendall(b"c")
    assert pair.far.recv(1) == b"c"
    pair.far.sendall(b"d")
    assert wait_until(lambda: pair.struck(1) >= 1, within=WITHIN)
    assert hears_nothing(pair.near)
    lines = list(read_ledger(tmp_path / "network-faults.jsonl"))
    flows = {(line["number"], line["source"], line["to"]) for line in lines if "source" in line}
    assert flows == {(0, "0", "1"), (0, "1", "0"), (1, "1", "0")}
    assert {line["way"] for line in lines} == {"netns"}


@pytest.mark.root
def test_packets_are_late_and_connections_are_reset(pair: Pair) -> None:
    """A round trip takes twice the delay at least; a reset breaks both ends at once, and only what stood."""
    pair.order(0, kind="delay", delay_ms=150, for_s=60)
    begun = time.monotonic()
    pair.near.sendall(b"a")
    assert pair.far.recv(1) == b"a"
    pair.far.sendall(b"b")
    assert pair.near.recv(1) == b"b"
    assert time.monotonic() - begun >= 0.3
    if why := namespaces.cannot_reset():
        pytest.skip(why)
    assert pair.order(1, kind="reset") == 1
    for end in (pair.near, pair.far):
        with pytest.raises(ConnectionError):
            end.recv(1)
    near, far = pair.connected()
    near.sendall(b"c")
    assert far.recv(1) == b"c"


HARNESS = """\
import sys, time
from pathlib import Path
from ckptd.chaos.cluster.process import Leashed
from ckptd.chaos.network.netns_way import NamespaceNetwork
network = NamespaceNetwork(Path(sys.argv[1]), {})
home = network.join(0, "0")
inside = Leashed([*home.inside, "sleep", "1000"], environment={"PATH": "/usr/bin:/bin"})
while Path(f"/proc/{inside.pid}/comm").read_text() != "sleep\\n":
    time.sleep(0.01)
print(network.helper.pid, inside.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.root
def test_nothing_of_a_network_outlives_a_killed_harness(tmp_path: Path) -> None:
    """The harness gets SIGKILL: router and nodes end, no process is in their namespaces, and the host never saw them."""
    if why := namespaces.missing():
        pytest.skip(why)
    before = sorted(Path("/sys/class/net").iterdir())
    command = [sys.executable, "-c", HARNESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pids = [int(word) for word in harness.stdout.readline().split()]
        own = _namespace(Path("/proc/self"))
        theirs = {_namespace(Path(f"/proc/{pid}")) for pid in pids}
        assert len(theirs | {own}) == 3, "router and node have a namespace each"
        assert sorted(Path("/sys/class/net").iterdir()) == before
        harness.kill()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within=WITHIN)
    assert not theirs & {_namespace(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def _namespace(process: Path) -> str:
    with suppress(OSError):
        return str((process / "ns" / "net").readlink())
    return ""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One undisturbed run for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "code_digest", lambda _script: "this test run")
        yield tmp_path_factory.mktemp("undisturbed")


def trial(name: str, way: str, store: str, tmp_path: Path, undisturbed: Path) -> Report:
    stage = Stage(
        nnodes=2,
        nproc=1,
        command=SCRIPT,
        out=tmp_path,
        limits=Limits(run=timedelta(seconds=400), progress=timedelta(seconds=150), woken=timedelta(seconds=120)),
        network=way,
    )
    return run_trial(stage, load(name), store=store, seed=SEED, cache_folder=undisturbed)


# Namespaces where they are allowed; where not, the same by proxies. Both ways are run by `ckptd chaos run --network`.
RUNS = {
    "partition-heals": pytest.param("partition-heals", "auto", "local"),
    "connections-reset": pytest.param("connections-reset", "proxy", "local"),
    "coordinator-cut-off": pytest.param("coordinator-cut-off", "proxy", "local"),
    "partition-for-good": pytest.param("partition-for-good", "auto", "local"),
    "coordinator-partitioned": pytest.param("coordinator-partitioned", "auto", "s3", marks=pytest.mark.s3),
}
# None: each takes a minute. Cuts, losses and resets are shown packet by packet above, and random schedules draw them for a
# small job of real agents (test_chaos_soak).
USUALLY: tuple[str, ...] = ()
_CUT_OFF_ENDED = {
    "coordinator-cut-off": "waits ended: agent 0",
    "partition-for-good": "waits ended: agent 1",
    # It is back when the job has moved on.
    "coordinator-partitioned": "waits ended: agent 0",
}


@pytest.mark.parametrize(("name", "way", "store"), [RUNS[name] for name in asked(USUALLY, tuple(RUNS))])
def test_a_hurt_network_costs_no_bit(name: str, way: str, store: str, tmp_path: Path, undisturbed: Path) -> None:
    """The fault is proved by what it struck, every promise holds, and every bit is that of the undisturbed run."""
    report = trial(name, way, store, tmp_path, undisturbed)
    problems = {f.check: f.text for f in report.findings if f.verdict is not Verdict.PASS}
    assert problems == {}, report.replay
    compared = {f.check: f.compared for f in report.findings}
    assert compared["same_losses"] >= 15
    assert compared["same_state_digests"] >= 3
    lines = list(read_ledger(tmp_path / "hurt" / "network-faults.jsonl"))
    assert any("source" in line for line in lines), "nothing was struck"
    # Whoever was cut off for good had waits that ended, and said so.
    (ended,) = [finding.text for finding in report.findings if finding.check == "cut_off_ended"]
    assert ended == _CUT_OFF_ENDED.get(name, "no node was cut off for good")
    done = "netns" if way == "auto" and not namespaces.missing() else "proxy"
    assert {line["way"] for line in lines} == {done}
    assert report.accounts[0].target.endswith(f"by {done}")
