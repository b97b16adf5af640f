"""Random schedules with real agents, the small job and both stores; a planted bug is found and shrunk to what it takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from ckptd.chaos.cluster.leash import descendants
from ckptd.chaos.record import load_record
from ckptd.chaos.scenario import Expectation, Fault, Moment, Scenario, Target
from ckptd.chaos.scenario_reader import load
from ckptd.chaos.scenario_writer import to_toml
from ckptd.chaos.soak.drawing import draw
from ckptd.chaos.soak.reproducing import Bounds, reproduce
from ckptd.chaos.soak.running import Setting, Soak, fired
from ckptd.chaos.soak.small_job import FLAGS
from ckptd.chaos.verdict import Verdict
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(600)]

SEED = int(os.environ.get("SOAK_SEED", "148"))
PLANTED = Path(__file__).parent.parent / "fixtures" / "flipping_trainer.py"


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    """One soak for the module: fork servers and undisturbed runs are shared."""
    with Soak(Setting(nnodes=2, nproc=1), tmp_path_factory.mktemp("soak")) as running:
        yield running


# One seed on each store: `ckptd chaos soak` draws the others; SOAK_SEED takes another one here.
@pytest.mark.parametrize(
    ("seed", "store"), [(SEED, "local"), pytest.param(SEED, "s3", marks=[pytest.mark.s3, pytest.mark.long])]
)
def test_several_faults_in_one_run_cost_no_bit(soak: Soak, seed: int, store: str) -> None:
    """Whatever the seed has happen one after the other: the job comes to its end, and every checker is content."""
    scenario = draw(seed, nnodes=2, nproc=1, store=store)
    report = soak.run(scenario, store=store, seed=seed, name=scenario.name, replay=f"ckptd chaos soak --seed {seed}")
    problems = {f.check: f.text for f in report.findings if f.verdict is not Verdict.PASS}
    assert problems == {}, report.replay
    done, planned = fired([report])
    assert planned == len(scenario.faults)
    assert done >= 2, report.accounts


def test_a_fault_strikes_in_the_midst_of_a_recovery(soak: Soak) -> None:
    """A node dies; its agent, started again, dies at a failpoint of the start, and rank 0 as soon as it lives again."""
    scenario = Scenario(
        name="recovering",
        title="three deaths, one in the recovery from the other",
        faults=(
            Fault(do="kill", target=Target(kind="node", which=1), at=Moment(event="acknowledged", nth=2)),
            Fault(
                do="kill",
                target=Target(kind="agent", which=1),
                at=Moment(failpoint="agent.received_Attach", restarting=True),
            ),
            Fault(do="kill", target=Target(kind="rank", which=0), at=Moment(event="resolved", restarting=True)),
        ),
    )
    report = soak.run(scenario, store="local", seed=0, name="recovering", replay="again {file}")
    assert {f.check: f.text for f in report.findings if f.verdict is not Verdict.PASS} == {}
    history = load_record(report.out).performance
    assert history is not None
    told = history.history
    _, second, third = told.of("fault", source="harness")
    assert (second.fields["target"], third.fields["target"]) == ("agent 1", "rank 0")
    # Since the first death no launch had trained a step before the last one.
    later = told.of("step", source="script", before=third.t, where=lambda event: event.source != "script 1")
    assert later == []
    assert report.launches >= 3


# More than a minute; how schedules are shrunk is tried without a job in test_chaos_soak_shrinking.
@pytest.mark.long
def test_a_schedule_that_fails_is_shrunk_to_the_fault_that_matters(soak: Soak, tmp_path: Path) -> None:
    """Of four faults one brings the planted bug out; that one is left, in a file that can be run, and fails there."""

    def of(do: str, kind: str, which: int | None, at: Moment) -> Fault:
        return Fault(do=do, target=Target(kind=kind, which=which), at=at)

    scenario = Scenario(
        name="planted",
        title="four faults",
        agent_failpoints="uploader.before_put=delay:0.01",
        faults=(
            of("kill", "rank", 1, Moment(event="staged", nth=2)),
            of("stop", "agent", 1, Moment(event="decided")),
            of("continue", "agent", 1, Moment(after_ms=100)),
            of("lose", "all", None, Moment(event="acknowledged", nth=2)),
            of("kill", "coordinator", None, Moment(event="decided")),
        ),
        expect=Expectation(may_miss=True),
    )
    command = (str(PLANTED), *FLAGS[:-1], "14")
    with Soak(Setting(nnodes=2, nproc=1, command=command), tmp_path / "out") as planted:
        report = planted.run(scenario, store="local", seed=0, name="planted", replay="again {file}")
        failed = {finding.check for finding in report.findings if finding.verdict is Verdict.FAIL}
        assert "same_digests" in failed, report.findings
        told: list[str] = []
        shrunk = reproduce(planted, report, replay="again {file}", bounds=Bounds(repeats=1), tell=told.append)
    assert shrunk.is_minimal, told
    assert (shrunk.again, shrunk.shrunk) == ((1, 1), (1, 1))
    left = load(shrunk.file)
    assert [(fault.do, fault.target.kind) for fault in left.faults] == [("lose", "all")]
    assert left.agent_failpoints == ""
    assert shrunk.replay == f"again {shrunk.file}"
    assert len(told) == shrunk.tries + 2
    # Tries leave nothing behind; the evidence of the failure stays.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["planted", "undisturbed-local"]
    # The same schedule on the job without the bug passes: it is the bug that was found.
    sound = soak.run(left, store="local", seed=0, name="sound", replay="again {file}")
    assert sound.verdict is Verdict.PASS, sound.findings


@pytest.mark.long
@pytest.mark.mesh
def test_what_is_left_of_a_schedule_is_a_scenario_like_any_other(tmp_path: Path) -> None:
    """The verb for one scenario finds the planted bug by the file that shrinking writes, under torchrun."""
    fault = Fault(do="lose", target=Target(kind="all"), at=Moment(event="acknowledged", nth=2))
    left = Scenario(name="left", title="what is left", faults=(fault,), expect=Expectation(may_miss=True))
    (tmp_path / "shrunk.toml").write_text(to_toml(left), encoding="utf-8")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "ckptd.daemon.cli", "chaos", "run", tmp_path / "shrunk.toml", "--network", "proxy"),
            *("--nnodes", "2", "--nproc", "1", "--store", "local", "--no-cache", "--once"),
            *("--out", tmp_path / "again", "--json", "--", PLANTED, *FLAGS[:-1], "14"),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    assert [account["kind"] for account in told["accounts"]] == ["lose"]
    assert "same_digests" in {finding["check"] for finding in told["findings"] if finding["verdict"] == "fail"}


@pytest.mark.long
def test_a_signal_ends_everything_and_what_was_seen_so_far_is_told(tmp_path: Path) -> None:
    """SIGTERM in the midst of a run: no process stays, the summary says that it was broken off, and it is no pass."""
    command = [sys.executable, "-m", "ckptd.daemon.cli", "chaos", "soak", "--seed", "1", "--json"]
    running = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        launched = tmp_path / "out" / "seed-1-local" / "hurt" / "launches" / "1" / "0.out"
        assert wait_until(lambda: launched.exists() and b"step" in launched.read_bytes(), within=timedelta(minutes=4))
        children = descendants(running.pid)
        assert len(children) >= 4
        running.send_signal(signal.SIGTERM)
        told = json.loads(running.communicate(timeout=120)[0])
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 128 + signal.SIGTERM
    assert told["broken_off"] is True
    assert told["trials"] == 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert (tmp_path / "out" / "index.html").exists()
