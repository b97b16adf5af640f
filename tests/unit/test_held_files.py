"""What an agent writes beside the slots: after its death a step is described as it was begun, or given up loudly."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.at_rest import small_state
from fixtures.coordinated import Play
from fixtures.held_jobs import held_job

from ckptd.daemon.agent import Agent as NodeAgent
from ckptd.daemon.config import AgentConfig
from ckptd.daemon.slot_header import SlotState
from ckptd.daemon.snapshots import Snapshot
from ckptd.daemon.telemetry import EventLog
from ckptd.protos import shard_table
from ckptd.protos.snapshot_pb2 import AliasTable, HeldPlan, HeldSnapshot

TIMELINE = "00000001-aaaaaaaaaaaa"
PLAN = b"p" * 32
ROWS = Play(states=small_state).run().layouts[0]


def plan(tied_to: str = "a", place: int = 0) -> HeldPlan:
    """Return the one rank's plan: its digest is always the same, ties and place may be others."""
    return HeldPlan(
        rank=0,
        rows=ROWS,
        writer=[0] * shard_table.row_count(ROWS),
        aliases=AliasTable(alias=["tied"], target=[tied_to]),
        coordinate=[place],
        plan_digest=PLAN,
    )


class Agent:
    """An agent's part of one job, without uploads."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.log = EventLog(folder.parent / "events")
        self.held = held_job(folder, threads, log=self.log)
        self.held.uploads.add = lambda _: None  # type: ignore[method-assign, assignment]

    async def stage(self, step: int, how: HeldPlan) -> Snapshot:
        """Save a step that nobody decides."""
        await self.held.learn_plan(how)
        about = HeldSnapshot(
            step=step,
            timeline=TIMELINE,
            world=1,
            ranks=[0],
            plan_digest=PLAN,
            root="memory://held",
            job="job",
            run_id="run",
        )
        snapshot = await self.held.begin(about, {0: 1000}, {0: "process"}, 4)
        self.held.stage(snapshot, 0, objects_bytes=0, trailer_bytes=0)
        return snapshot

    def killed(self) -> None:
        """End as SIGKILL does it: nothing is cleaned up, and nobody holds the files."""
        self.held.pool.close()
        self.log.close()

    def adopted(self) -> dict[int, tuple[list[str], list[int]]]:
        """Take over what is there; return ties and place of each step."""
        return {one.about.step: described(one) for one in self.held.adopt()}


def described(snapshot: Snapshot) -> tuple[list[str], list[int]]:
    """Return ties and place as an index would say them."""
    held = snapshot.plans[0].held
    return list(held.aliases.target), list(held.coordinate)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of slots."""
    (tmp_path / "shm").mkdir(mode=0o700)
    return tmp_path / "shm"


@pytest.fixture
def agent(folder: Path) -> Iterator[Callable[[], Agent]]:
    """Makes agents, one after the other's death."""
    made: list[Agent] = []
    with ThreadPoolExecutor(2) as threads:

        def make() -> Agent:
            made.append(Agent(folder, threads))
            return made[-1]

        yield make
        made[-1].held.forget()
        made[-1].killed()


def given_up(folder: Path) -> list[tuple[int, str]]:
    """Return step and error of each step that an agent says it has given up."""
    lines = [json.loads(line) for line in (folder.parent / "events").read_text().splitlines()]
    return [(line["step"], line["error"]) for line in lines if line["kind"] == "slots_given_up"]


def plans(folder: Path) -> list[str]:
    """Return the names of all files with plans."""
    return sorted(path.name for path in folder.glob("*.plan.*.pb"))


def snapshot_of(folder: Path, step: int) -> Path:
    """Return the file that says what a step is."""
    (path,) = folder.glob(f"*.snapshot.*.{step:012d}.pb")
    return path


def plan_of(folder: Path, step: int) -> Path:
    """Return the file with the plan that a step names."""
    (digest,) = HeldSnapshot.FromString(snapshot_of(folder, step).read_bytes()).plans
    (path,) = folder.glob(f"*.plan.r0.{digest.hex()[:32]}.pb")
    return path


def older(folder: Path, how: HeldPlan, steps: dict[int, int], *, written_at: int) -> None:
    """Make the files what an agent of the version before had left: one plan for all steps, named by the plan's digest.

    Args:
        folder: Where.
        how: What the plan's file says.
        steps: When each step's file was written, in nanoseconds since 1970.
        written_at: When the plan's file was.
    """
    for path in folder.glob("*.plan.*.pb"):
        path.unlink()
    job = next(folder.glob("*.slot")).name[:16]
    path = folder / f"{job}.plan.{PLAN.hex()[:32]}.r0.pb"
    path.write_bytes(how.SerializeToString())
    os.utime(path, ns=(written_at, written_at))
    for step, begun_at in steps.items():
        path = snapshot_of(folder, step)
        about = HeldSnapshot.FromString(path.read_bytes())
        about.ClearField("plans")
        path.write_bytes(about.SerializeToString())
        os.utime(path, ns=(begun_at, begun_at))


@pytest.mark.parametrize("newer", [plan(tied_to="b"), plan(place=1)], ids=["ties", "place"])
def test_a_step_keeps_the_ties_and_the_place_it_was_begun_with(
    agent: Callable[[], Agent], folder: Path, newer: HeldPlan
) -> None:
    """The next step has others and the same plan: the next agent must not describe the one by what the other was."""

    async def act() -> None:
        first = agent()
        expected = {5: described(await first.stage(5, plan())), 6: described(await first.stage(6, newer))}
        assert expected[5] != expected[6]
        first.killed()
        assert agent().adopted() == expected
        assert given_up(folder) == []

    asyncio.run(act())


def test_a_plan_that_was_changed_on_the_node_is_used_for_nothing(agent: Callable[[], Agent], folder: Path) -> None:
    """Its name says what it holds: bytes of another plan under it are found, the step is given up, and its slot is free."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        first.killed()
        path = plan_of(folder, 5)
        path.write_bytes(plan(tied_to="b").SerializeToString())
        second = agent()
        assert second.adopted() == {}
        ((step, error),) = given_up(folder)
        assert (step, path.name in error) == (5, True)
        assert [slot.header.state for slot in second.held.pool.slots] == [SlotState.FREE]

    asyncio.run(act())


@pytest.mark.parametrize("what", ["plan", "snapshot"])
@pytest.mark.parametrize("how", ["gone", "no message"])
def test_what_cannot_be_read_is_given_up(agent: Callable[[], Agent], folder: Path, what: str, how: str) -> None:
    """A file that is lost or garbage costs its step, and nothing else."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        await first.stage(6, plan(tied_to="b"))
        first.killed()
        path = plan_of(folder, 5) if what == "plan" else snapshot_of(folder, 5)
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(b"\xff" * 40)
        assert agent().adopted() == {6: (["b"], [0])}
        assert [step for step, _ in given_up(folder)] == [5]

    asyncio.run(act())


def test_what_an_older_agent_left_is_taken_over_and_described_anew(agent: Callable[[], Agent], folder: Path) -> None:
    """An agent is updated while steps are staged. Its files are gone then: the older one, back again, misreads nothing."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        await first.stage(6, plan())
        first.killed()
        older(folder, plan(), {5: 2000, 6: 3000}, written_at=1000)
        left = plans(folder)
        second = agent()
        assert second.adopted() == {5: (["a"], [0]), 6: (["a"], [0])}
        assert not set(left) & set(plans(folder))
        await second.stage(7, plan(tied_to="b"))
        second.killed()
        assert agent().adopted() == {5: (["a"], [0]), 6: (["a"], [0]), 7: (["b"], [0])}
        assert given_up(folder) == []

    asyncio.run(act())


def test_a_plan_that_an_older_agent_wrote_anew_describes_no_step_of_before(
    agent: Callable[[], Agent], folder: Path
) -> None:
    """It overwrote the plan when ties changed: step 5 may have had others, step 6 was begun with these."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        await first.stage(6, plan())
        first.killed()
        older(folder, plan(tied_to="b"), {5: 1000, 6: 3000}, written_at=2000)
        assert agent().adopted() == {6: (["b"], [0])}
        ((step, error),) = given_up(folder)
        assert (step, "written anew" in error) == (5, True)

    asyncio.run(act())


def test_a_plan_that_an_older_agent_kept_for_later_goes_when_it_is_learned(
    agent: Callable[[], Agent], folder: Path
) -> None:
    """No step needs it. Were the older agent started again, it would describe by it what was begun with other ties."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        older(folder, plan(), {5: 2000}, written_at=1000)
        left = plans(folder)
        await first.held.learn_plan(plan(tied_to="b"))
        assert not set(left) & set(plans(folder))

    asyncio.run(act())


def test_a_full_folder_leaves_an_older_agents_files_as_they_are(
    agent: Callable[[], Agent], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is finished all the same, now and by the agent after; and no step is begun with a plan that has no file."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        first.killed()
        older(folder, plan(), {5: 2000}, written_at=1000)
        left = plans(folder)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("ckptd.daemon.held_files._write", full)
            second = agent()
            assert second.adopted() == {5: (["a"], [0])}
        assert second.held.plan_of(0, PLAN) is None
        assert plans(folder) == left
        assert second.held.free_empty() == (0, 0)
        second.killed()
        assert agent().adopted() == {5: (["a"], [0])}

    asyncio.run(act())


def test_plans_that_no_step_was_begun_with_do_not_pile_up(agent: Callable[[], Agent], folder: Path) -> None:
    """Ties that change with each step: a step's plan stays for as long as the step, and the newest for the next one."""

    async def act() -> None:
        first = agent()
        snapshots = [await first.stage(step, plan(tied_to=str(step))) for step in range(3)]
        assert len(plans(folder)) == 3
        for snapshot in snapshots:
            first.held.drop(snapshot)
        await first.held.learn_plan(plan(tied_to="another"))
        assert len(plans(folder)) == 1
        await first.stage(9, plan(tied_to="another"))
        first.killed()
        second = agent()
        assert second.adopted() == {9: (["another"], [0])}
        second.held.free_empty()
        assert len(plans(folder)) == 1
        second.held.drop(next(iter(second.held.snapshots.values())))
        second.held.free_empty()
        assert plans(folder) == []

    asyncio.run(act())


@pytest.mark.parametrize("cut_off", ["plan", "snapshot"])
def test_a_file_that_an_agent_was_killed_while_writing_goes_with_the_next_one(
    agent: Callable[[], Agent], folder: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    """At once, also where that takes over another step of the job, and a run goes on with it."""

    async def act() -> None:
        first = agent()
        await first.stage(5, plan())
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", _die if cut_off == "plan" else _die_at_snapshot)
            with pytest.raises(Death):
                await first.stage(6, plan(tied_to="another"))
        first.killed()
        assert len(cut_short(folder)) == 1
        second = agent()
        assert second.adopted() == {5: (["a"], [0])}
        assert cut_short(folder) == []
        second.killed()
        assert agent().adopted() == {5: (["a"], [0])}

    asyncio.run(act())


def test_a_file_that_another_agent_sweeps_away_is_written_again(
    agent: Callable[[], Agent], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that starts in the same folder at that very moment takes it for a dead agent's."""
    swept: list[str] = []

    def sweep_first(path: Path, target: Path) -> Path:
        if not swept:
            swept.append(path.name)
            path.unlink()
        return _replace(path, target)

    async def act() -> None:
        first = agent()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", sweep_first)
            await first.stage(5, plan())
        assert len(swept) == 1
        first.killed()
        assert agent().adopted() == {5: (["a"], [0])}

    asyncio.run(act())


def cut_short(folder: Path) -> list[Path]:
    """Return the files that were begun and never came to their names."""
    return list(folder.glob("*.new"))


class Death(BaseException):
    """The process was killed here."""


_replace = Path.replace


def _die(*_: Any) -> None:
    raise Death


def _die_at_snapshot(path: Path, target: Path) -> Path:
    if ".snapshot." in path.name:
        raise Death
    return _replace(path, target)


def test_a_file_that_is_no_message_ends_no_agent(tmp_path: Path) -> None:
    """An agent that starts beside one says so, gives it up, and serves."""
    folders = {name: str(tmp_path / name) for name in ("run_dir", "data_dir", "shm_dir")}
    config = AgentConfig.model_validate(folders)

    async def start() -> None:
        agent = NodeAgent(config, EventLog(tmp_path / "events"))
        bad = config.shm_dir / f"job.snapshot.{TIMELINE}.000000000005.pb"
        bad.write_bytes(b"\xff" * 9)
        await agent.adopt()
        await agent.close(forget=False)
        assert not bad.exists()
        assert agent.jobs == {}

    asyncio.run(start())
    (event,) = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert (event["kind"], event["job"]) == ("not_adopted", "")
    assert "000000000005.pb cannot be read" in event["error"]
