"""Scenarios with real agents, torchrun, a real script and both stores; and the judges say no when they should.

None of them unless asked: a run takes half a minute, and what they hurt is hurt elsewhere (see USUALLY).
CKPTD_TEST_SCENARIOS=all takes all; or name some, see `fixtures.asked`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from fixtures.asked import asked

from ckptd.chaos import cache
from ckptd.chaos.conductor import Limits
from ckptd.chaos.local_faults import LOCAL_DEEDS
from ckptd.chaos.report import Report
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.scenario_reader import load, scenario_names
from ckptd.chaos.trial import Stage, run_trial
from ckptd.chaos.verdict import FailureClass, Verdict

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.mesh, pytest.mark.timeout(400)]

HERE = Path(__file__).parent.parent
SCRIPT = (str(HERE / "fixtures" / "tiny_trainer.py"), "--root", "{root}", "--digests", "{digests}")
SEED = 7
OF_STORES = ("store-outage", "store-slow-down")
# What the network does is in test_chaos_network.
OF_NETWORKS = tuple(name for name in scenario_names() if any(fault.network is not None for fault in load(name).faults))
ON_S3 = ("agent-killed-mid-upload", "node-lost", "rank-killed-while-uploading", "zombie-coordinator", *OF_STORES)
# None: the preset for ci runs three with torchrun (test_chaos_own_script), a coordinator that is fenced and others are in
# test_chaos_conductor, the matrix has a cell for each moment at which somebody may be killed, on both stores, and random
# schedules draw among them (test_chaos_soak).
USUALLY: tuple[str, ...] = ()
# None: a store that is away is in test_store_faults with real agents, one that says SlowDown is tried request by request in
# s055 (unit/test_cases_store), and the matrix loses a node beside a real store (test_chaos_matrix).
USUALLY_ON_S3: tuple[str, ...] = ()


def is_light(name: str) -> bool:
    """Whether a scenario is run without torchrun, in test_chaos_local; of these faults one with it is enough, when asked."""
    return name != "rank-raises" and any(fault.do in LOCAL_DEEDS for fault in load(name).faults)


LOCALLY = [name for name in scenario_names() if name not in (*OF_STORES, *OF_NETWORKS) and not is_light(name)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One undisturbed run per store and command, for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "code_digest", lambda _script: "this test run")
        yield tmp_path_factory.mktemp("undisturbed")


def trial(name: str, store: str, tmp_path: Path, undisturbed: Path, *more: str) -> Report:
    stage = Stage(
        nnodes=2,
        nproc=1,
        command=(*SCRIPT, *more),
        out=tmp_path,
        limits=Limits(run=timedelta(seconds=150), progress=timedelta(seconds=90), woken=timedelta(seconds=60)),
    )
    return run_trial(stage, load(name), store=store, seed=SEED, cache_folder=undisturbed)


@pytest.mark.parametrize(
    ("name", "store"),
    [
        *((name, "local") for name in asked(USUALLY, LOCALLY)),
        *(pytest.param(name, "s3", marks=pytest.mark.s3) for name in asked(USUALLY_ON_S3, ON_S3)),
    ],
)
def test_what_comes_back_is_what_was_there(name: str, store: str, tmp_path: Path, undisturbed: Path) -> None:
    """Every fault fires, every promise holds, and every bit is that of the undisturbed run."""
    report = trial(name, store, tmp_path, undisturbed)
    problems = {f.check: f.text for f in report.findings if f.verdict is not Verdict.PASS}
    assert problems == {}, report.replay
    assert report.verdict is Verdict.PASS
    compared = {f.check: f.compared for f in report.findings}
    assert compared["same_losses"] >= 15
    assert compared["same_digests"] > 100
    # An agent that dies may cost a later step its snapshot, never an earlier one.
    # While the store is away, steps are skipped that find both slots taken.
    assert compared["same_state_digests"] >= (2 if name in OF_STORES else 3)


@pytest.mark.long
def test_one_bit_flipped_in_a_live_tensor_after_a_restore_is_found_and_named(tmp_path: Path, undisturbed: Path) -> None:
    """Both judges, the harness's and the demo's, which knows nothing of ckptd, say no and name tensor and step."""
    name = "rank-killed-while-uploading"
    report = trial(name, "local", tmp_path, undisturbed, "--flip-after-restore")
    assert report.verdict is Verdict.FAIL
    found = {f.check: f.text for f in report.findings if f.verdict is Verdict.FAIL}
    restored = report.accounts[0].restored_step
    place = f"first at step {restored}, rank 1 right after a restore: model/0.weight differs"
    assert found["same_digests"] == f"{place}; other ranks' copies of model/0.weight are right"
    assert report.failures() == {FailureClass.WRONG_REPLICA: 1}
    assert report.diagnosis is not None
    assert report.diagnosis.names == ("model/0.weight",)
    # The page of this real trial: its headline, a lane for each process, and the same again from saved evidence.
    page = (tmp_path / "report.html").read_text()
    assert place in page
    lanes = re.findall(r'data-lane="([^"]*)"', page)
    assert lanes == [
        *("faults", "steps trained", "rank 0", "rank 1", "coordinator", "becoming durable"),
        *("agent 0", "agent 1"),
    ]
    assert len(re.findall(r'class="bar training"', page)) == 4  # two ranks, two launches
    assert len(re.findall(r'class="bar saving"', page)) >= 8
    (rebuilt,) = rebuild(tmp_path).reports
    assert rebuilt == report
    assert (tmp_path / "report.html").read_text() == page
    told = subprocess.run(
        [sys.executable, HERE.parent / "examples" / "judge.py", tmp_path / "undisturbed", tmp_path / "hurt"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1
    assert "bit_exact=False" in told.stdout
    assert f"step {restored}, rank 1 after a restore: model/0.weight differs" in told.stdout
