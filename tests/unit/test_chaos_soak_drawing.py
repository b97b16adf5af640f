"""Random schedules: a seed stands for one schedule, everywhere, and every schedule is one that can be run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.chaos.local_faults import DISK_FAULTS_OF, DiskFault
from ckptd.chaos.network.words import NETWORK_FAULTS
from ckptd.chaos.scenario import Scenario, StoreFault
from ckptd.chaos.scenario_reader import parse
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.schedule import schedule
from ckptd.chaos.soak.chance import Chance
from ckptd.chaos.soak.deeds import DEEDS
from ckptd.chaos.soak.drawing import draw
from ckptd.chaos.soak.moments import CLAIMING, DECIDING, JOINING, SAVING
from ckptd.daemon.log_view import MAX_LOOKS
from ckptd.protos.boundaries import BOUNDARIES
from ckptd.storage_backends.fault_script import FaultKind

GOLDEN = Path(__file__).parent.parent / "golden" / "soak.txt"
DRAWN = [(7, 2, 1, "local"), (8, 2, 1, "s3"), (9, 3, 2, "s3"), (10, 1, 2, "local")]
sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))
seeds = st.integers(0, 1 << 40)
stores = st.sampled_from(["local", "s3"])


def texts() -> str:
    drawn = [draw(seed, nnodes=nnodes, nproc=nproc, store=store) for seed, nnodes, nproc, store in DRAWN]
    return "".join(f"# {scenario.name}\n{to_toml(scenario)}\n" for scenario in drawn)


def test_a_seed_stands_for_the_same_schedule_as_ever() -> None:
    """Text for text what was written when this was first run: whatever the machine and the version of Python.

    Who changes the table of deeds on purpose writes the file anew: `python tests/unit/test_chaos_soak_drawing.py`.
    """
    assert texts() == GOLDEN.read_text(encoding="utf-8")


def test_the_hash_seed_of_a_process_changes_nothing() -> None:
    """Nothing is drawn from a set or by hash()."""
    code = (
        "import sys; from ckptd.chaos.scenario_writer import to_toml; from ckptd.chaos.soak.drawing import draw\n"
        "sys.stdout.write(to_toml(draw(8, nnodes=2, nproc=1, store='s3')))"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert told.stdout == to_toml(draw(8, nnodes=2, nproc=1, store="s3"))


@settings(max_examples=50, deadline=None)
@given(seeds, sizes, stores)
def test_every_schedule_is_valid_and_survives_its_file(seed: int, size: tuple[int, int], store: str) -> None:
    """What is written is read again as it was; its targets exist; only what there is is made to fail."""
    nnodes, nproc = size
    scenario = draw(seed, nnodes=nnodes, nproc=nproc, store=store)
    assert parse(to_toml(scenario), name=scenario.name, source="x.toml") == scenario
    planned = schedule(scenario, nnodes=nnodes, nproc=nproc, seed=0)
    assert 2 <= len(planned) <= 10
    needs_s3 = [fault for fault in planned if fault.store is not None or (fault.network and fault.network.needs_store)]
    assert store == "s3" or not needs_s3
    assert store == "local" or not [fault for fault in planned if fault.do == "disk" and fault.kind == "store"]
    assert nnodes > 1 or not [fault for fault in planned if fault.network is not None and fault not in needs_s3]
    # Whatever is stopped goes on with the very next fault: nothing hangs because a schedule is badly drawn.
    for fault, following in zip(planned, [*planned[1:], None], strict=True):
        if fault.do == "stop":
            assert following is not None
            assert (following.do, following.target) == ("continue", fault.target)
        if fault.network is not None and fault.network.replaced:
            assert following is not None
            assert following.network is not None
            assert following.network.kind == "heal"
    # Who is woken twice a second does not stand still.
    assert not {"stop", "hang"} & {fault.do for fault in planned} or "slow" not in {fault.do for fault in planned}


@settings(max_examples=50, deadline=None)
@given(seeds, sizes, stores)
def test_a_failpoint_is_only_waited_for_where_an_agent_starts(seed: int, size: tuple[int, int], store: str) -> None:
    """Failpoints are given to agents at their start: the first one, or one that the fault before has made necessary."""
    faults = draw(seed, nnodes=size[0], nproc=size[1], store=store).faults
    for index, fault in enumerate(faults):
        if fault.at.failpoint is not None and index > 0:
            before = faults[index - 1]
            hit = {"all": fault.target.which, "coordinator": 0}.get(before.target.kind, before.target.which)
            assert before.do in ("kill", "lose", "reboot", "segfault", "terminate")
            assert before.target.kind in ("agent", "node", "coordinator", "all")
            assert hit == fault.target.which
            assert fault.at.restarting


def test_every_deed_is_drawn() -> None:
    """Seeds reach the whole table: every kind of fault, and moments in the midst of a recovery."""
    drawn = [fault for seed in range(400) for fault in draw(seed, nnodes=2, nproc=2, store="s3").faults]
    kinds = Counter((fault.do, fault.target.kind) for fault in drawn)
    assert {("kill", kind) for kind in ("rank", "agent", "coordinator", "node", "all")} <= set(kinds)
    assert {("lose", "node"), ("lose", "all"), ("stop", "rank"), ("stop", "agent"), ("stop", "node")} <= set(kinds)
    assert {("reboot", "node"), ("reboot", "all"), ("segfault", "rank"), ("segfault", "agent")} <= set(kinds)
    assert {("terminate", "agent"), ("terminate", "rank"), ("raise", "rank"), ("hang", "rank")} <= set(kinds)
    assert {("slow", kind) for kind in ("rank", "agent")} <= set(kinds)
    assert {("clock", kind) for kind in ("node", "rank", "agent")} <= set(kinds)
    assert {fault.network.kind for fault in drawn if fault.network is not None} == set(NETWORK_FAULTS)
    assert {fault.store.kind for fault in drawn if fault.store is not None} == set(FaultKind)
    assert sum(fault.at.restarting for fault in drawn) > 100
    assert {fault.target.which for fault in drawn if fault.target.kind == "rank"} == {0, 1, 2, 3}


def test_every_way_of_a_disk_is_drawn() -> None:
    """On local files: whatever the disk of a store, or a node's shared memory, can say while it is in use."""
    drawn = [fault for seed in range(400) for fault in draw(seed, nnodes=2, nproc=1, store="local").faults]
    ways = {(fault.local.disk, fault.local.kind) for fault in drawn if isinstance(fault.local, DiskFault)}
    assert ways == {(disk, kind) for disk in ("store", "shm") for kind in DISK_FAULTS_OF[disk]}


def store_faults(scenario: Scenario) -> list[StoreFault]:
    return [fault.store for fault in scenario.faults if fault.store is not None]


@settings(max_examples=100, deadline=None)
@given(seeds, sizes)
def test_what_the_store_does_can_be_got_over(seed: int, size: tuple[int, int]) -> None:
    """No lie that nothing finds out, and no silence that the job's deadlines do not bear: what is red then is a bug."""
    faults = store_faults(draw(seed, nnodes=size[0], nproc=size[1], store="s3"))
    stale = [fault for fault in faults if fault.kind == "stale_list"]
    # LIST of index/ and pins/ has no defence; a start gives up after MAX_LOOKS at the log.
    assert {(fault.op, fault.prefix) for fault in stale} <= {("list", "log/")}
    assert sum(fault.times or MAX_LOOKS for fault in stale) < MAX_LOOKS
    hanging = [fault for fault in faults if fault.kind == "hang"]
    # A job attaches within 30 s; without delay_s a call hangs until the driver's own timeout, which is as long.
    assert all(fault.delay_s for fault in hanging)
    assert sum((fault.times or 100) * fault.delay_s for fault in hanging) < 10
    for fault in faults:
        if fault.kind == "skewed":
            assert (fault.op, fault.prefix, (fault.times or 3) < 3) == ("put", "chunks/", True)
        if fault.kind == "drip":
            assert (fault.times or 100) <= 4
            assert fault.bytes_per_s >= (20_000 if fault.op == "get" else 5_000)


def test_a_stale_list_meets_a_job_that_starts_again() -> None:
    """Of the looks that show the past some are left when the job dies within a second: its next start gets them."""
    met = starting = 0
    for seed in range(400):
        faults = draw(seed, nnodes=2, nproc=1, store="s3").faults
        kinds = Counter(fault.store.kind for fault in faults if fault.store is not None)
        assert max(kinds["stale_list"], kinds["hang"]) <= 1, seed
        for fault, following in itertools.pairwise(faults):
            if fault.store is not None and fault.store.kind == "stale_list":
                starting += fault.at.restarting
                soon = following.at.after_ms is not None and following.at.after_ms <= 800
                met += following.do == "kill" and soon and (fault.store.times or 0) >= 2
    assert met >= 30
    assert starting >= 3


def test_the_failpoints_of_the_table_exist() -> None:
    """A name that was changed in the code would make a fault that never fires; each stands with who passes it."""
    for name in (*SAVING, *JOINING):
        assert BOUNDARIES[name].role == "agent"
    for name in (*DECIDING, *CLAIMING):
        assert BOUNDARIES[name].role == "coordinator"


def test_a_table_that_fits_nothing_is_refused() -> None:
    """No schedule without a fault."""
    with pytest.raises(ValueError, match="no deed of the table"):
        draw(1, nnodes=1, nproc=1, store="local", deeds=[deed for deed in DEEDS if deed.only_s3])


def test_weights_are_kept() -> None:
    """What weighs nothing is never drawn, and of two things the heavier one is drawn more often."""
    chance = Chance("weights")
    drawn = Counter(chance.weighted(["none", "light", "heavy"], [0, 1, 3]) for _ in range(2000))
    assert drawn["none"] == 0
    assert 400 < drawn["light"] < 600


if __name__ == "__main__":
    GOLDEN.write_text(texts(), encoding="utf-8")
