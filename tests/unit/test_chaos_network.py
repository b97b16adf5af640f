"""Faults of the network: their words, which traffic they strike, and the proxies that lose, delay and reset."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.launcher import Torchrun
from ckptd.chaos.cluster.node import Node, Place
from ckptd.chaos.conductor import Limits
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.nemesis.network import cut
from ckptd.chaos.nemesis.process import Harm, NemesisError
from ckptd.chaos.network import sockets
from ckptd.chaos.network.flows import Flows, Ordered
from ckptd.chaos.network.relay import Relay
from ckptd.chaos.network.way import HelperNetwork, NotRunError, choose_way
from ckptd.chaos.network.words import NetworkFault
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.scenario import Fault, Moment, Target
from ckptd.chaos.scenario_reader import ScenarioError, load, parse
from ckptd.chaos.schedule import PlannedFault, ScheduleError, schedule
from ckptd.chaos.store_proxy.ledger import Ledger, read_ledger
from ckptd.chaos.trial import Stage, run_trial
from ckptd.chaos.verdict import Verdict

GOOD = """\
title = "t"

[[fault]]
do = "network"
fault = "one-way"
between = ["node 1", "coordinator"]
for_s = 4
at = { step = 3 }
"""
SOON_S = 20.0
A_MOMENT_S = 0.05
"""Long enough that what is on its way would have come."""


def read(text: str) -> NetworkFault:
    fault = parse(text, name="x", source="x.toml").faults[0].network
    assert fault is not None
    return fault


def test_a_fault_of_the_network_says_what_lies_between_whom() -> None:
    """Every word reaches the values; one end alone means all other nodes, and a cut for good replaces its node."""
    assert parse(GOOD, name="x", source="x.toml").faults == (
        Fault(
            do="network",
            target=Target(kind="network"),
            at=Moment(step=3),
            network=NetworkFault(kind="one-way", between=("node 1", "coordinator"), for_s=4),
        ),
    )
    alone = GOOD.replace('["node 1", "coordinator"]', '"node 1"').replace("one-way", "partition")
    assert read(alone) == NetworkFault(kind="partition", between=("node 1", "nodes"), for_s=4)
    assert read(alone.replace("for_s = 4\n", "")).replaced
    assert not read(alone.replace("for_s = 4", "replaced = false")).replaced
    # From the store: training goes on, and nobody needs to be replaced.
    assert not read(alone.replace("for_s = 4\n", "").replace('"node 1"', '["node 1", "store"]')).replaced
    everything = read(alone.replace("for_s = 4\n", "").replace('"node 1"', '["node 1", "all"]'))
    assert everything.replaced
    assert str(everything) == "partition between node 1 and the other nodes and the store"
    assert read('[[fault]]\ndo = "network"\nfault = "heal"\nat = { step = 1 }\n') == NetworkFault(kind="heal")
    slow = read(GOOD.replace("one-way", "delay").replace("for_s = 4", "delay_ms = 150"))
    assert str(slow) == "delay of 150 ms between node 1 and coordinator"
    assert str(replace(read(GOOD), way="netns")) == "one-way from node 1 to coordinator for 4 s, by netns"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('fault = "one-way"', 'fault = "flood"', 5, "one of partition, one-way, delay, reset, heal, not 'flood'"),
        ('fault = "one-way"\n', "", 3, "one of partition, one-way, delay, reset"),
        (
            '"coordinator"]',
            '"moon"]',
            6,
            "unknown end 'moon'; allowed: node N, coordinator, nodes (all others), store, all (both)",
        ),
        ('["node 1", "coordinator"]', '"rank 1"', 6, "unknown end 'rank 1'"),
        ('["node 1", "coordinator"]', '["node 1"]', 6, "one end or a list of two"),
        ('["node 1", "coordinator"]', '["node 1", "node 1"]', 6, "nothing lies between node 1 and node 1"),
        ('["node 1", "coordinator"]', '["store", "all"]', 6, "nothing lies between store and all"),
        ('["node 1", "coordinator"]', '["all", "node 1"]', 6, "the first end is node N, coordinator or store"),
        ('fault = "one-way"', 'fault = "heal"', 6, "it takes no between"),
        ('["node 1", "coordinator"]', '"nodes"', 6, "nothing lies between nodes and nodes"),
        ("for_s = 4", "for_s = 0", 7, "for_s is a whole number from 1, not 0"),
        ("for_s = 4", "delay_ms = 5", 7, "delay needs delay_ms, and nothing else takes it"),
        ('fault = "one-way"', 'fault = "delay"', 3, "delay needs delay_ms"),
        ('fault = "one-way"', 'fault = "reset"', 7, "it takes no for_s"),
        ("for_s = 4", 'replaced = "yes"', 7, "replaced is true or false"),
        (
            "for_s = 4",
            "times = 4",
            7,
            "unknown key 'times'; allowed: do, at, fault, between, for_s, delay_ms, replaced",
        ),
        ("{ step = 3 }", '{ failpoint = "x" }', 8, "a failpoint kills or stops an agent"),
    ],
)
def test_what_is_wrong_is_refused_with_line_and_allowed_words(old: str, new: str, line: int, words: str) -> None:
    """An unknown fault, end or key names its line and what may stand there."""
    with pytest.raises(ScenarioError) as caught:
        parse(GOOD.replace(old, new, 1), name="x", source="x.toml")
    assert str(caught.value).startswith(f"x.toml:{line}: ")
    assert words in str(caught.value)


def test_a_network_needs_two_nodes_and_its_ends_to_be_there() -> None:
    """A cluster without the ends of a fault is refused before anything starts."""
    bare = replace(load("partition-heals"), min_nodes=1)
    with pytest.raises(ScheduleError, match="at least 2 nodes; raise --nnodes"):
        schedule(bare, nnodes=1, nproc=4, seed=1)
    far = parse(GOOD.replace("node 1", "node 7"), name="x", source="x.toml")
    with pytest.raises(ScheduleError, match=r"there is no node 7; they are 0\.\.1"):
        schedule(far, nnodes=2, nproc=1, seed=1)
    (planned,) = schedule(load("partition-heals"), nnodes=2, nproc=1, seed=1)
    assert planned.target == "partition between node 1 and the other nodes for 4 s"


def planned(**words: object) -> list[PlannedFault]:
    fault = NetworkFault(**{"kind": "partition", "between": ("node 1", "nodes"), **words})  # type: ignore[arg-type]
    return [PlannedFault(index=0, do="network", kind="network", which=None, at=Moment(step=1), network=fault)]


def test_the_way_is_chosen_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces where they are allowed, else proxies; what was asked for and cannot be had is not run, with the reason."""
    monkeypatch.setattr("ckptd.chaos.network.namespaces.missing", lambda: "")
    monkeypatch.setattr("ckptd.chaos.network.namespaces.cannot_reset", lambda: "this kernel does not")
    assert choose_way("auto", [], has_endpoint=False) == ""
    assert choose_way("auto", planned(), has_endpoint=False) == "netns"
    assert choose_way("proxy", planned(), has_endpoint=False) == "proxy"
    assert choose_way("auto", planned(kind="reset"), has_endpoint=False) == "proxy"
    with pytest.raises(NotRunError, match="not run: this kernel does not; --network proxy needs no root"):
        choose_way("netns", planned(kind="reset"), has_endpoint=False)
    monkeypatch.setattr("ckptd.chaos.network.namespaces.missing", lambda: "network namespaces need root")
    assert choose_way("auto", planned(), has_endpoint=False) == "proxy"
    with pytest.raises(NotRunError, match="not run: network namespaces need root"):
        choose_way("netns", planned(), has_endpoint=False)
    with pytest.raises(ScheduleError, match="say --store s3"):
        choose_way("auto", planned(between=("node 1", "store")), has_endpoint=False)
    with pytest.raises(ScheduleError, match="allowed: auto, netns, proxy"):
        choose_way("pigeon", planned(), has_endpoint=False)


@asynccontextmanager
async def flows_in(folder: Path) -> AsyncIterator[Flows]:
    ledger = Ledger(folder / "faults.jsonl")
    flows = Flows(ledger, "proxy")
    yield flows
    flows.close()
    ledger.close()


def order(kind: str, one: str, other: str | None, *, number: int = 0, **more: object) -> dict[str, object]:
    return {"number": number, "kind": kind, "one": [one], "other": None if other is None else [other], **more}


def test_a_fault_strikes_its_flows_and_no_others(tmp_path: Path) -> None:
    """A cut strikes both directions and nodes that come later, one-way one of them; the store is an end of its own."""

    async def look() -> None:
        async with flows_in(tmp_path) as flows:
            cut = flows.begin(order("partition", "1", None), lambda _: None)
            for source, to in (("1", "0"), ("0", "1"), ("1", "0.1"), ("0.1", "1")):
                assert flows.look(source, to, 10).lost, (source, to)
            for source, to in (("0", "0.1"), ("1", "store"), ("store", "1"), ("1", "1")):
                assert not flows.look(source, to, 10).lost, (source, to)
            flows.finish(cut)
            assert not flows.look("1", "0", 10).lost
            ended: list[int] = []

            def end(fault: Ordered) -> None:
                ended.append(fault.number)

            flows.begin(order("one-way", "1", "0", number=1), end)
            assert flows.look("1", "0", 10).lost
            assert not flows.look("0", "1", 10).lost
            flows.begin(order("delay", "0", "store", number=2, delay_s=0.5), end)
            assert flows.look("store", "0", 10).delay_s == 0.5
            assert flows.counts() == {"0": [4, 40], "1": [1, 10], "2": [1, 10]}
            flows.begin(order("partition", "0", "all", number=3), end)
            assert flows.look("0", "store", 10).lost
            assert flows.look("1.1", "0", 10).lost
            assert flows.heal() == 3
            assert ended == [1, 2, 3]
            assert not flows.look("0", "store", 10).lost
            with pytest.raises(ValueError, match="was ordered before"):
                flows.begin(order("partition", "1", None), lambda _: None)

    asyncio.run(look())
    lines = list(read_ledger(tmp_path / "faults.jsonl"))
    assert [line["begins"] for line in lines if line["number"] == 0 and "begins" in line] == [True, False]
    assert {(line["source"], line["to"]) for line in lines if line["number"] == 1 and "source" in line} == {("1", "0")}
    assert {line["way"] for line in lines} == {"proxy"}


class Echo:
    """A server that sends back what it gets, and a client that talks to it through a door."""

    def __init__(self, relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self.relay, self.reader, self.writer, self.port = relay, reader, writer, port

    async def says(self, word: bytes) -> bytes:
        self.writer.write(word)
        return await asyncio.wait_for(self.reader.readexactly(len(word)), SOON_S)

    async def struck(self, number: int, times: int) -> None:
        """Wait until a fault has struck so often."""
        end = time.monotonic() + SOON_S
        while (await self.counts())[str(number)][0] < times:
            assert time.monotonic() < end, "it never struck"
            await asyncio.sleep(0.005)

    async def counts(self) -> dict[str, list[int]]:
        counts = (await self.relay.answer({"do": "counts"}))["counts"]
        assert isinstance(counts, dict)
        return counts


@asynccontextmanager
async def echo_behind_a_door(folder: Path) -> AsyncIterator[Echo]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    behind = server.sockets[0].getsockname()
    async with flows_in(folder) as flows:
        relay = Relay(flows)
        door = {"do": "door", "name": "0", "source": "1", "listen": "127.0.0.1", "to": list(behind)}
        port = int(str((await relay.answer(door))["port"]))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Echo(relay, reader, writer, port)
        finally:
            writer.close()
            await relay.close()
            server.close()


def run(folder: Path, play: Callable[[Echo], Awaitable[None]]) -> None:
    async def main() -> None:
        async with echo_behind_a_door(folder) as echo:
            assert await echo.says(b"before") == b"before"
            await play(echo)

    asyncio.run(main())


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), A_MOMENT_S)
    except TimeoutError:
        return True
    return False


def test_a_cut_is_silent_and_what_was_on_its_way_comes_when_it_is_over(tmp_path: Path) -> None:
    """Nothing is refused or broken: bytes do not come, a new connection hears nothing; then everything comes, in order."""

    async def play(echo: Echo) -> None:
        await echo.relay.answer({"do": "fault", **order("partition", "1", None, for_s=0.4)})
        echo.writer.write(b"lost")
        await echo.struck(0, 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(b"new")
        await echo.struck(0, 2)
        assert await is_silent(echo.reader)
        assert await is_silent(reader)
        assert await asyncio.wait_for(echo.reader.readexactly(4), SOON_S) == b"lost"
        assert await asyncio.wait_for(reader.readexactly(3), SOON_S) == b"new"
        assert await echo.says(b"after") == b"after"
        writer.close()

    run(tmp_path, play)
    lines = list(read_ledger(tmp_path / "faults.jsonl"))
    assert lines[0]["begins"] is True
    assert lines[-1]["struck"] >= 2


def test_a_one_way_loss_holds_one_direction(tmp_path: Path) -> None:
    """Answers are lost, questions are not: the server has heard what its answer to never comes."""

    async def play(echo: Echo) -> None:
        await echo.relay.answer({"do": "fault", **order("one-way", "0", "1", for_s=0.3)})
        echo.writer.write(b"heard")
        # The answer was on its way: so the question had come.
        await echo.struck(0, 1)
        assert (await echo.counts())["0"] == [1, 5]
        assert await is_silent(echo.reader)
        assert await asyncio.wait_for(echo.reader.readexactly(5), SOON_S) == b"heard"

    run(tmp_path, play)


def test_a_delay_makes_answers_late_and_loses_none(tmp_path: Path) -> None:
    """A question and its answer take twice the delay at least, and many at once come in order."""

    async def play(echo: Echo) -> None:
        await echo.relay.answer({"do": "fault", **order("delay", "1", None, delay_s=0.1)})
        begun = time.monotonic()
        assert await echo.says(b"late") == b"late"
        assert time.monotonic() - begun >= 0.2
        words = os.urandom(1 << 20)
        assert await echo.says(words) == words

    run(tmp_path, play)


def test_a_reset_breaks_standing_connections_and_lets_new_ones_pass(tmp_path: Path) -> None:
    """Both ends get a connection reset by peer, and it is counted."""

    async def play(echo: Echo) -> None:
        told = await echo.relay.answer({"do": "fault", **order("reset", "1", None)})
        assert told == {"struck": 1}
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(echo.reader.read(1), SOON_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(b"again")
        assert await asyncio.wait_for(reader.readexactly(5), SOON_S) == b"again"
        writer.close()
        assert await echo.relay.answer({"do": "fault", **order("reset", "7", None, number=1)}) == {"struck": 0}

    run(tmp_path, play)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_door_opens_where_an_agent_listens_and_knows_who_calls(family: socket.AddressFamily, tmp_path: Path) -> None:
    """The advertised address passes on to whatever port the agent has chosen; the caller is told by its process.

    gRPC uses IPv6 sockets for IPv4 addresses: what is known of both must not differ.
    """
    prefix = "::ffff:" if family is socket.AF_INET6 else ""

    async def play() -> None:
        async with flows_in(tmp_path) as flows:
            relay = Relay(flows)
            await relay.answer({"do": "agent", "name": "1", "pid": os.getpid()})
            await relay.answer({"do": "node", "name": "0", "listen": "127.91.3.1", "advertise": "127.91.3.2"})
            with socket.socket(family) as agent:
                agent.bind((f"{prefix}127.91.3.1", 0))
                agent.listen()
                port = agent.getsockname()[1]
                assert port in sockets.listening_ports("127.91.3.1")
                await relay.answer({"do": "fault", **order("partition", "1", "0")})
                end = time.monotonic() + SOON_S
                while True:
                    try:
                        _, writer = await asyncio.open_connection(f"{prefix}127.91.3.2", port, family=family)
                        break
                    except ConnectionRefusedError:
                        assert time.monotonic() < end
                        await asyncio.sleep(0.01)
                # Struck: so it is known that node 1 calls.
                while not flows.counts()["0"][0]:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.01)
                writer.close()
            await relay.close()

    asyncio.run(play())
    assert sockets.owner("127.91.3.9", 1, [os.getpid()]) is None
    told = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert {(line["source"], line["to"]) for line in told if "source" in line} == {("1", "0")}


class Recorded:
    """A network that only notes what is ordered."""

    def __init__(self, way: str = "netns", broken: int | None = None) -> None:
        self.way, self.broken = way, broken
        self.orders: list[tuple[str, dict[str, str]]] = []

    def order(self, fault: NetworkFault, number: int, names: Mapping[str, str]) -> int | None:
        del number
        self.orders.append((fault.kind, {end: names[end] for end in fault.between if end != "nodes"}))
        return self.broken


def cluster_of(tmp_path: Path, network: Recorded) -> Cluster:
    cluster = Cluster(nnodes=2, nproc=1, folder=tmp_path, launcher=Torchrun(tmp_path), environment={})
    for index, name in enumerate(("0.1", "1")):
        place = Place(name=name, evidence=tmp_path / name, run_dir=tmp_path / name / "r", shm_dir=tmp_path / name / "s")
        cluster.nodes.append(Node(index, place, {}, ["true"]))
    cluster.network = network  # type: ignore[assignment]
    return cluster


def test_ends_are_the_present_nodes_and_a_cut_for_good_replaces_the_first(tmp_path: Path) -> None:
    """The ends go by the names of the nodes that are there now; who may die and who is replaced follows from the fault."""
    network = Recorded()
    cluster = cluster_of(tmp_path, network)
    first, second = cluster.nodes

    def harm(**words: object) -> Harm:
        fault = planned(**words)[0].network
        assert fault is not None
        return cut(fault, 0, cluster, coordinator=first)

    told = harm(between=("node 1", "coordinator"), for_s=3)
    assert network.orders == [("partition", {"node 1": "1", "coordinator": "0.1"})]
    assert told == Harm(pids=(), may_end_launch=True)
    assert harm(kind="delay", delay_ms=5) == Harm(pids=())
    assert harm(between=("node 1", "store"), for_s=3) == Harm(pids=())
    assert not second.is_out_of_reach
    assert harm(replaced=True) == Harm(pids=(), replace=(second,), ends_launch=True, is_silent=True)
    assert second.is_out_of_reach
    with pytest.raises(NemesisError, match=r"both ends are node 0\.1"):
        harm(between=("node 0", "coordinator"))
    network.way = "proxy"
    assert harm(for_s=3) == Harm(pids=()), "ranks have another network"
    network.broken = 0
    with pytest.raises(NemesisError, match="no connection to reset"):
        harm(kind="reset")
    with pytest.raises(NemesisError, match="nothing to heal"):
        harm(kind="heal", between=())


def test_what_cannot_be_had_is_not_run_and_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces were asked for and are not allowed: the verdict is unknown, with the reason, and no run was begun."""
    monkeypatch.setattr("ckptd.chaos.network.namespaces.missing", lambda: "network namespaces need root")
    stage = Stage(nnodes=2, nproc=1, command=("x.py",), out=tmp_path, limits=Limits(), network="netns")
    report = run_trial(stage, load("partition-heals"), store="local", seed=1, cache_folder=None)
    assert report.verdict is Verdict.UNKNOWN
    assert "not run: network namespaces need root; --network proxy needs no root" in report.headline()
    assert "--network netns" in report.replay
    assert not (tmp_path / "undisturbed").exists()
    assert not (tmp_path / "store").exists()
    assert rebuild(tmp_path).reports == (report,)


class Counting:
    """A helper process's answers."""

    def __init__(self, counts: dict[str, list[int]]) -> None:
        self.counts = counts

    def ask(self, do: str, **_what: object) -> dict[str, object]:
        assert do == "counts"
        return {"counts": self.counts}


def test_a_fault_that_struck_nothing_was_not_done() -> None:
    """What was ordered is no proof; what was struck is. The way is told in either case."""
    faults = [replace(planned()[0], index=index) for index in range(3)]
    struck = [
        Struck(fault=faults[0], fired=True, note=""),
        Struck(fault=faults[1], fired=True, note=""),
        Struck(fault=faults[2]),
    ]
    network = HelperNetwork(Counting({"0": [3, 180], "1": [0, 0]}))  # type: ignore[arg-type]
    network.way = "netns"
    told = network.proved(struck)
    assert [(fate.fired, fate.note) for fate in told] == [
        (True, ""),
        (False, "nothing was sent that it could strike"),
        (False, "its moment never came"),
    ]
    assert told[0].fault.target == "partition between node 1 and the other nodes, by netns"
