"""A sample of the matrix with the real client, real agents and both stores: one cell for each way of being hit.

The whole of it is `make chaos`. The rule of the sample: for each victim and action (of two that are alike, one) a boundary of
the play in which a job goes on from shared memory, drawn by the seed; an operator's verb comes from the play that has verbs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.chaos.matrix.cells import ONLY_COORDINATOR, TWO_NODES, VICTIMS, Cell, cells, reason
from ckptd.chaos.matrix.plays import PLAYS, play_named
from ckptd.chaos.matrix.pool import Pool
from ckptd.chaos.matrix.results import Results
from ckptd.chaos.matrix.running import Matrix
from ckptd.chaos.matrix.striking import Place, Strike
from ckptd.chaos.matrix.survey import choose, draw
from ckptd.chaos.verdict import Verdict
from ckptd.protos.boundaries import BOUNDARIES

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(240)]

SEED = int(os.environ.get("MATRIX_SEED", "20"))
ALIKE = {("agent", "pause"), ("verb", "pause")}
DEEDS = [(victim, action) for victim, actions in VICTIMS.items() for action in actions if (victim, action) not in ALIKE]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """One matrix for the module: fork servers and surveys are shared."""
    out = tmp_path_factory.mktemp("matrix")
    with Matrix(out, Results(out / "results", "0" * 64)) as running:
        yield running


def drawn(matrix: Matrix, victim: str, action: str) -> Cell:
    """Return the cell of the sample that does this."""
    play = play_named("moved") if victim == "verb" else PLAYS[0]
    deeds = [cell for cell in cells([TWO_NODES]) if (cell.victim, cell.action, cell.store) == (victim, action, "local")]
    fitting = [cell for cell in deeds if reason(cell) is None]
    (cell,) = draw(fitting, matrix.survey(play, TWO_NODES, "local").passes, SEED)
    return cell


@pytest.mark.parametrize(("victim", "action"), DEEDS)
def test_a_fault_at_any_boundary_costs_no_bit(matrix: Matrix, victim: str, action: str) -> None:
    """The fault fires, the job comes to its end, and everything that the checkers look at is right."""
    cell = drawn(matrix, victim, action)
    result = matrix.run_cell(cell)
    assert result.problems == {}, f"seed {SEED}: {result.replay}; {result.struck} of the play {result.play}"
    assert result.verdict is Verdict.PASS
    assert result.fired


@pytest.mark.parametrize(
    ("boundary", "victim"),
    [
        ("agent.before_say_restore_ready", "agent"),
        ("agent.before_say_restore_ready", "coordinator"),
        # The other rank has its answer already, and will not ask the next coordinator.
        ("agent.heard_restore_go", "coordinator"),
    ],
)
def test_a_death_in_the_midst_of_a_restore_does_not_end_the_job(matrix: Matrix, boundary: str, victim: str) -> None:
    """The rank is answered again by the agent that comes back, and the restore goes on: the script never notices."""
    cell = Cell(boundary=boundary, victim=victim, action="kill", store="local", shape=TWO_NODES)
    result = matrix.run_cell(cell)
    assert result.problems == {}, result.replay
    assert result.fired
    assert result.launches == len(PLAYS[0].acts)


@pytest.mark.s3
def test_a_node_is_lost_beside_a_real_store(matrix: Matrix) -> None:
    """One cell on SeaweedFS: the decision is written, its node is gone, and another one goes on from the store."""
    cell = Cell(boundary="coordinator.after_decision", victim="node", action="lose", store="s3", shape=TWO_NODES)
    result = matrix.run_cell(cell)
    assert result.problems == {}, result.replay
    assert result.fired


@pytest.mark.timeout(600)
@pytest.mark.long
def test_workers_share_what_they_found(matrix: Matrix, tmp_path: Path) -> None:
    """Two workers run a cell each: both pass, the survey that both need is there once, and nothing of the workers is left."""
    kept = Results(tmp_path / "results", "0" * 64)
    due = [drawn(matrix, victim, "kill") for victim in ("rank", "agent")]
    with Pool(tmp_path / "out", kept, 2) as pool:
        pool.run(due, tell=lambda _: None)
        pids = [worker.process.pid for worker in pool._workers]
    assert {name: result.problems for name, result in kept.known.items()} == {str(cell): {} for cell in due}
    assert [path.name for path in kept.folder.glob("survey.*.json")] == ["survey.resumed.2x1.local.json"]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list((tmp_path / "out").rglob("nodes")) == []


def test_a_boundary_that_is_not_reached_is_no_pass(matrix: Matrix) -> None:
    """A cell whose fault never fires proves nothing, however well the job goes."""
    cell = Cell(boundary="uploader.before_put", victim="agent", action="kill", store="local", shape=TWO_NODES)
    never = Strike(boundary=cell.boundary, nth=10_000, place=Place(kind="agent", number=1, start=1), action="kill")
    result = matrix._struck(cell, PLAYS[0], never)
    assert result.verdict is Verdict.FAIL
    assert not result.fired
    assert set(result.problems) == {"faults_fired"}
    assert json.loads(json.dumps(result.to_dict()))["replay"].endswith(f"--only '{cell}'")


def test_every_cell_that_applies_has_a_play_that_passes_its_boundary(matrix: Matrix) -> None:
    """A failpoint that no play passes would be struck by no cell; its play is to be written with it."""
    silent, by_coordinator = [], set()
    for cell in cells([TWO_NODES]):
        if reason(cell) is None and cell.store == "local":
            found = choose(cell, PLAYS, lambda play: matrix.survey(play, TWO_NODES, "local"))
            if found is None and ONLY_COORDINATOR.holds(cell, BOUNDARIES[cell.boundary]):
                by_coordinator.add(cell.boundary)
            elif found is None:
                silent.append(str(cell))
    assert silent == []
    # Only rank 0 asks its agent to lead.
    assert by_coordinator == {"agent.received_Lead", "agent.before_reply_Lead", "agent.before_bind"}


def test_every_bit_of_the_job_is_looked_at(matrix: Matrix, tmp_path: Path) -> None:
    """The undisturbed run tells losses, lists of SHA-256 and a root: without them nothing could be compared."""
    evidence = matrix.survey(PLAYS[0], TWO_NODES, "local").evidence
    assert [step for step, _ in evidence.losses] == [1, 2, 3, 4, 5, 6]
    assert {(entry.step, entry.rank, entry.when) for entry in evidence.digests} == {
        *((step, rank, "step") for step in range(1, 7) for rank in (0, 1)),
        *((3, rank, "restore") for rank in (0, 1)),
    }
    names = set(evidence.digests[0].sha256)
    assert {"model/0.weight", "optim/2.bias", "rng/torch", "rng/python", "loader", "position"} <= names
    assert evidence.root is not None
    assert [step for step, _ in evidence.root.listed] == [4, 5, 6]
    assert evidence.root.problems == ()
