"""The matrix before anything runs: it is complete by construction, leaves out only what it says why, and forgets nothing."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import pytest
import typer
from typer.testing import CliRunner

from ckptd.chaos import matrix_cli
from ckptd.chaos.cli import app
from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.launcher import Torchrun
from ckptd.chaos.cluster.store import STORES
from ckptd.chaos.evidence import Evidence
from ckptd.chaos.history import History
from ckptd.chaos.matrix import cells as cells_module
from ckptd.chaos.matrix.cells import (
    ONE_NODE,
    REASONS,
    SHAPES,
    TWO_NODES,
    VICTIMS,
    Cell,
    cells,
    is_victim,
    may_pass,
    reason,
)
from ckptd.chaos.matrix.plays import PLAYS, Accident, Play, play_named
from ckptd.chaos.matrix.results import NOT_APPLICABLE, CellResult, Results
from ckptd.chaos.matrix.striking import BoundaryInjector, Place, Strike
from ckptd.chaos.matrix.summary import summarize
from ckptd.chaos.matrix.survey import Survey, choose, load_survey
from ckptd.chaos.matrix_cli import sampled
from ckptd.chaos.verdict import Verdict
from ckptd.protos import failpoints
from ckptd.protos.boundaries import BOUNDARIES, ROLES, Boundary

AGENT_0, AGENT_1 = Place(kind="agent", number=0, start=1), Place(kind="agent", number=1, start=1)
RANK_1 = Place(kind="rank", number=1, start=2)


def cell(boundary: str, victim: str = "all", action: str = "kill all", store: str = "local") -> Cell:
    return Cell(boundary=boundary, victim=victim, action=action, store=store, shape=TWO_NODES)


# ---------------------------------------------------------------- the product


def test_the_matrix_is_the_whole_product() -> None:
    """Every boundary meets every victim, action, store and shape, once."""
    deeds = sum(map(len, VICTIMS.values()))
    counted = Counter(map(str, cells()))
    assert len(counted) == len(BOUNDARIES) * deeds * len(STORES) * len(SHAPES)
    assert set(counted.values()) == {1}


def test_a_new_failpoint_is_in_the_matrix_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declaring it is enough: its cells are there, and apply as its role says."""
    new = Boundary(name="agent.new", role="agent", before="x", after="y")
    monkeypatch.setattr(cells_module, "BOUNDARIES", MappingProxyType({new.name: new}))
    found = [one for one in cells() if reason(one) is None]
    hit = {(one.victim, one.action) for one in found if one.shape == TWO_NODES and one.store == "s3"}
    assert hit == {
        *(("agent", "kill"), ("agent", "pause"), ("coordinator", "kill"), ("coordinator", "pause")),
        *(("node", "lose"), ("node", "freeze"), ("all", "kill all")),
    }
    assert {one.victim for one in found if one.shape == ONE_NODE} == {"coordinator", "all"}


def test_every_boundary_is_struck_where_its_role_says_and_nowhere_else() -> None:
    """Of each boundary's own process, a death and a pause apply on both stores; another process's never do."""
    own = {"rank": {"rank"}, "agent": {"agent", "coordinator"}, "coordinator": {"coordinator"}, "verb": {"verb"}}
    applies = {str(one) for one in cells() if reason(one) is None}
    for name, boundary in BOUNDARIES.items():
        for victim in ROLES:
            for action in VICTIMS[victim]:
                for store in STORES:
                    is_in = str(cell(name, victim, action, store)) in applies
                    assert is_in == (victim in own[boundary.role]), (name, victim)
        for victim, action in (("node", "lose"), ("node", "freeze"), ("all", "kill all")):
            assert (str(cell(name, victim, action)) in applies) == (boundary.role != "verb")


def test_each_reason_keeps_something_out() -> None:
    """A reason that holds for no cell explains nothing, and one without a sentence explains it to nobody."""
    counted = Counter(found.name for one in cells() if (found := reason(one)) is not None)
    assert set(counted) == {one.name for one in REASONS}
    assert all(len(one.text) > 20 for one in REASONS)


# ---------------------------------------------------------------- surveys


def survey(passes: dict[Place, dict[str, int]]) -> Survey:
    return Survey(evidence=Evidence(losses=((1, "0x1p+0"),)), passes=passes)


def test_what_a_survey_saw_can_contradict_the_declarations() -> None:
    """A pass by a process of another role is named; the same pass by the right one is none."""
    assert survey({RANK_1: {"client.before_Begin": 3}, AGENT_0: {"coordinator.after_claim": 1}}).contradictions() == []
    wrong = survey({RANK_1: {"coordinator.after_claim": 1}, AGENT_1: {"coordinator.after_claim": 1}}).contradictions()
    assert len(wrong) == 2
    assert "rank 1, start 2 passed coordinator.after_claim" in wrong[0]
    assert not may_pass(AGENT_1, "coordinator")
    assert may_pass(AGENT_0, "agent")


def test_a_cell_strikes_in_the_first_play_that_passes_its_boundary() -> None:
    """Of several processes the last one is taken, and of its passes the one behind the middle."""
    asked: list[str] = []

    def survey_of(play: Play) -> Survey:
        asked.append(play.name)
        if play == PLAYS[0]:
            return survey({AGENT_0: {"uploader.before_put": 9}})
        again = Place(kind="agent", number=1, start=2)
        return survey({AGENT_1: {"uploader.before_put": 4}, again: {"uploader.before_put": 4}})

    found = choose(cell("uploader.before_put", "agent", "kill"), PLAYS, survey_of)
    assert found is not None
    assert found[0] == PLAYS[1]
    assert found[1] == Strike(
        boundary="uploader.before_put", nth=3, place=Place(kind="agent", number=1, start=2), action="kill"
    )
    assert found[1].failpoint == "uploader.before_put=kill@3"
    assert asked == [PLAYS[0].name, PLAYS[1].name]
    assert choose(cell("uploader.after_put", "agent", "kill"), PLAYS, survey_of) is None
    found = choose(cell("uploader.before_put", "coordinator", "pause"), PLAYS, survey_of)
    assert found is not None
    assert found[1].place == AGENT_0
    assert found[1].failpoint == "uploader.before_put=stop@5"
    assert is_victim(cell("uploader.before_put", "node", "lose"), AGENT_1)


def test_a_survey_comes_back_from_its_file(tmp_path: Path) -> None:
    """Passes and evidence are the same; a damaged file is as good as none."""
    made = survey({RANK_1: {"client.before_Begin": 3}})
    path = tmp_path / "survey.json"
    assert load_survey(path) is None
    path.write_text(made.to_json())
    assert load_survey(path) == made
    path.write_text(made.to_json()[:-3])
    assert load_survey(path) is None


def test_accidents_of_plays_are_failpoints_that_exist() -> None:
    """A play whose accident never happens would be another play."""
    for play in PLAYS:
        if play.accident is not None:
            failpoints.configure(play.accident.failpoint)
    failpoints.configure("")
    assert play_named("moved").acts[1].before[0] == ("retain", "{root}", "--keep-last", "1")


def test_only_the_struck_process_is_armed(tmp_path: Path) -> None:
    """One process of one start has the fault; the play's accident goes with it, and a survey counts everything."""
    cluster = Cluster(nnodes=2, nproc=1, folder=tmp_path, launcher=Torchrun(tmp_path), environment={})
    accident = Accident(failpoint="coordinator.before_decision=kill@3", takes_all=True)
    strike = Strike(boundary="uploader.before_put", nth=2, place=AGENT_1, action="kill")
    armed = BoundaryInjector(strike, accident, cluster, History(), nproc=1)
    assert armed.failpoints(AGENT_1) == "uploader.before_put=kill@2"
    assert armed.failpoints(AGENT_0) == "coordinator.before_decision=kill@3"
    assert armed.failpoints(Place(kind="agent", number=1, start=2)) == ""
    assert armed.failpoints(RANK_1) == ""
    surveyed = BoundaryInjector(None, None, cluster, History(), nproc=1).failpoints(RANK_1)
    assert set(failpoints.parse(surveyed)) == set(BOUNDARIES)


# ---------------------------------------------------------------- results


def result(of: Cell, verdict: str, **more: object) -> CellResult:
    return CellResult(cell=str(of), verdict=verdict, problems={}, **more)  # type: ignore[arg-type]


def test_a_matrix_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    """What has a verdict is settled, also after a line was cut; unknown is not, nor is anything for other code."""
    one, two, three = (cell("uploader.before_put", "agent", "kill", store) for store in ("a", "b", "c"))
    kept = Results(tmp_path, "c" * 64)
    kept.begin(commit="abc", code="c" * 64, begun=1.0)
    kept.add(result(one, Verdict.PASS, fired=True, seconds=2.5))
    kept.add(result(two, Verdict.UNKNOWN))
    with kept.path.open("a") as file:
        file.write(json.dumps({"kind": "cell", "cell": str(three)})[:-5])
    again = Results(tmp_path, "c" * 64)
    assert [again.is_settled(str(each)) for each in (one, two, three)] == [True, False, False]
    assert again.known[str(one)] == result(one, Verdict.PASS, fired=True, seconds=2.5)
    assert json.loads(kept.path.read_text().splitlines()[0])["commit"] == "abc"
    assert Results(tmp_path, "d" * 64).known == {}


def test_a_failpoint_that_fires_in_no_cell_fails_the_matrix() -> None:
    """Only once all its cells were run; a result that did not fire counts as none."""
    mine = [cell("uploader.before_put", "agent", "kill", store) for store in STORES]
    half = summarize(mine, {str(mine[0]): result(mine[0], Verdict.PASS)})
    assert half.silent == ()
    assert half.totals["open"] == 1
    whole = summarize(mine, {str(each): result(each, Verdict.PASS) for each in mine})
    assert whole.silent == ("uploader.before_put",)
    assert whole.verdict is Verdict.FAIL
    fired = summarize(mine, {str(each): result(each, Verdict.PASS, fired=each.store == "s3") for each in mine})
    assert fired.silent == ()
    assert fired.verdict is Verdict.PASS


def test_the_summary_counts_every_cell_once() -> None:
    """Rows, reasons and totals add up, and one bad cell decides the verdict."""
    every = list(cells())
    known = {str(one): result(one, Verdict.PASS, fired=True, seconds=1.0) for one in every if reason(one) is None}
    summary = summarize(every, known)
    assert summary.totals[Verdict.PASS] == len(known)
    assert sum(summary.not_applicable.values()) == summary.totals[NOT_APPLICABLE] == len(every) - len(known)
    assert sum(sum(row.values()) for row in summary.rows.values()) == len(known)
    assert summary.seconds == len(known)
    assert summary.verdict.exit_code == 0
    name = next(iter(known))
    assert summarize(every, known | {name: result_named(name, Verdict.UNKNOWN)}).verdict.exit_code == 3
    assert summarize(every, known | {name: result_named(name, Verdict.FAIL)}).verdict.exit_code == 1
    assert summarize([], {}).verdict.exit_code == 3


def result_named(name: str, verdict: str) -> CellResult:
    return CellResult(cell=name, verdict=verdict, problems={"x": "y"}, fired=True)


def test_a_sample_is_the_same_for_the_same_seed_and_spreads_over_boundaries() -> None:
    """No boundary comes twice before each has come once."""
    every = list(cells())
    some = sampled(every, 40, 7)
    assert some == sampled(every, 40, 7)
    assert some != sampled(every, 40, 8)
    assert len({one.boundary for one in some}) == 40
    assert all(reason(one) is None for one in some)


# ---------------------------------------------------------------- commands


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, arguments)
    return found.exit_code, found.output


def test_failpoints_are_listed_as_they_are_declared() -> None:
    """The list for programs is the registry, and the one for people names each."""
    code, output = run("failpoints", "--json")
    assert code == 0
    told = json.loads(output)
    assert {one["name"]: (one["role"], one["before"], one["after"]) for one in told} == {
        one.name: (one.role, one.before, one.after) for one in BOUNDARIES.values()
    }
    code, output = run("failpoints", "--role", "verb")
    assert code == 0
    assert all((one.name in output) == (one.role == "verb") for one in BOUNDARIES.values())


@pytest.mark.parametrize(
    "arguments",
    [
        *(("failpoints", "--role", "nobody"), ("matrix", "--store", "tape"), ("matrix", "--role", "nobody")),
        *(("matrix", "--only", "nothing.of_this"), ("matrix", "--only", "sweep.*", "--role", "rank")),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...]) -> None:
    """Nothing is run, and the exit code is that of wrong usage."""
    code, output = run(*arguments)
    assert code == typer.BadParameter("x").exit_code == 2
    assert "nothing.of_this" in output or "allowed" in output or "no cell" in output


def test_the_cells_of_a_pattern_are_listed() -> None:
    """A pattern means cells by their name or by their boundary, and what does not apply is left out."""
    code, output = run("matrix", "--list", "--only", "client.before_Begin", "--store", "local")
    assert code == 0
    assert output.split() == [
        "client.before_Begin/kill/rank/local/2x1",
        "client.before_Begin/kill/rank/local/1x2",
        "client.before_Begin/pause/rank/local/2x1",
        "client.before_Begin/lose/node/local/2x1",
        "client.before_Begin/freeze/node/local/2x1",
        "client.before_Begin/kill-all/all/local/2x1",
        "client.before_Begin/kill-all/all/local/1x2",
    ]
    assert run("matrix", "--list", "--only", "*/freeze/*", "--sample", "3", "--seed", "1")[1].count("/freeze/") == 3


# ---------------------------------------------------------------- its end


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_signal_ends_the_matrix_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_failed: bool) -> None:
    """What was broken off leaves nothing, what failed before stays; the pages are written, and say what is open."""
    evidence: list[Path] = []

    def broken_off(*_: object) -> None:
        with matrix_cli._evidence() as out:
            evidence.append(out)
            (out / "worker" / "nodes").mkdir(parents=True)
            if has_failed:
                (out / "cell" / "evidence").mkdir(parents=True)
                (out / "cell" / "evidence" / "trial.json").write_text("{}")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(matrix_cli, "_run", broken_off)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended:
        matrix_cli.matrix(
            only="client.before_Hello",
            store="local",
            results=tmp_path / "results",
            out=tmp_path / "pages",
            as_json=True,
        )
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert evidence[0].exists() is has_failed
    assert "client.before_Hello" in (tmp_path / "pages" / "index.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is before
    shutil.rmtree(evidence[0], ignore_errors=True)
