"""Whole trials with doubles of agent, launcher and script: what an operator would do is done, and verdicts are right."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ckptd.chaos import cache
from ckptd.chaos.cluster.leash import descendants
from ckptd.chaos.conductor import Limits
from ckptd.chaos.ending import SignalledError
from ckptd.chaos.history import Event
from ckptd.chaos.report import Report
from ckptd.chaos.reports.rebuild import rebuild
from ckptd.chaos.scenario import Expectation, Fault, Moment, Scenario, Target
from ckptd.chaos.scenario_reader import load
from ckptd.chaos.schedule import ScheduleError
from ckptd.chaos.trial import Stage, run_trial
from ckptd.chaos.verdict import FailureClass, Verdict
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

STANDIN = Path(__file__).parent.parent / "fixtures" / "chaos_standin.py"
SCRIPT = (str(STANDIN), "train", "--root", "{root}", "--digests", "{digests}")


class PlainLauncher:
    """Starts ranks without torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> None:
        """Nothing is shared."""

    def command(self, *, node: int, nnodes: int, nproc: int, launch: int, script: Sequence[str]) -> list[str]:
        return [sys.executable, str(STANDIN), "launch", str(launch), str(nproc), *script]

    def close(self) -> None:
        """Nothing was begun."""


def stage(tmp_path: Path, *more: str, seen: list[Event] | None = None) -> Stage:
    def observe(_run: str, event: Event) -> None:
        if seen is not None:
            seen.append(event)

    return Stage(
        nnodes=1,
        nproc=2,
        command=(*SCRIPT, *more),
        out=tmp_path,
        limits=Limits(run=timedelta(seconds=60), progress=timedelta(seconds=30), woken=timedelta(seconds=15)),
        agent=(sys.executable, str(STANDIN), "agent"),
        launcher=PlainLauncher,
        read_root=None,
        observe=observe,
    )


def trial(scenario: Scenario, tmp_path: Path, *more: str, seen: list[Event] | None = None) -> Report:
    # The doubles keep no root that could be read.
    expect = replace(scenario.expect, committed=None)
    return run_trial(
        stage(tmp_path, *more, seen=seen), replace(scenario, expect=expect), store="local", seed=7, cache_folder=None
    )


def problems(report: Report) -> dict[str, str]:
    return {f.check: f.text for f in report.findings if f.verdict is not Verdict.PASS}


@pytest.mark.parametrize(
    ("name", "relaunches"),
    [
        ("rank-killed-between-saves", 1),
        ("rank-killed-while-uploading", 1),
        ("agent-killed-mid-upload", 0),
        ("coordinator-killed-before-decision", 0),
        ("coordinator-killed-after-decision", 0),
        ("node-lost", 1),
        ("everything-killed", 1),
        ("everything-lost", 1),
        ("zombie-coordinator", 1),
    ],
)
def test_a_scenario_runs_to_its_end_and_passes(name: str, relaunches: int, tmp_path: Path) -> None:
    """Each scenario's faults fire, the job is started again as often as needed, and sound doubles pass."""
    # A paused process must be caught in the midst of its run, also where the harness is slow to see it.
    slowly = ("--step-s", "0.15") if name == "zombie-coordinator" else ()
    report = trial(load(name), tmp_path, *slowly)
    assert problems(report) == {}
    assert report.verdict is Verdict.PASS
    assert report.launches == 1 + relaunches
    assert all(account.fired for account in report.accounts)


def test_a_restore_that_brings_back_other_bits_fails_and_is_named(tmp_path: Path) -> None:
    """The verdict names step, rank and tensor that diverged first."""
    report = trial(load("rank-killed-while-uploading"), tmp_path, "--bug", "restores-wrong")
    assert report.verdict is Verdict.FAIL
    assert "rank 1 right after a restore: model/w differs" in problems(report)["same_digests"]


def test_a_fault_whose_moment_never_comes_is_no_pass(tmp_path: Path) -> None:
    """A run that nothing hurt proves nothing, however equal its bits are."""
    late = Scenario(
        name="late", title="t", faults=(Fault(do="kill", target=Target(kind="rank", which=0), at=Moment(step=99)),)
    )
    report = trial(late, tmp_path)
    assert report.verdict is Verdict.FAIL
    assert "did not fire: kill rank 0 at step 99" in problems(report)["faults_fired"]


def test_a_script_that_does_not_get_through_undisturbed_is_unknown(tmp_path: Path) -> None:
    """Without an undisturbed run there is nothing to compare with; the reason is the script's own."""
    report = trial(load("rank-killed-between-saves"), tmp_path, "--bug", "dies")
    assert report.verdict is Verdict.UNKNOWN
    assert "boom" in problems(report)["trial"]


def test_a_script_that_is_silent_for_too_long_is_told_the_way_out(tmp_path: Path) -> None:
    """The bound is said, and the option that raises it: nobody has to look for it in the code."""
    limits = replace(Limits.of_timeout(timedelta(seconds=60), relaunches=1), progress=timedelta(seconds=1))
    silent = replace(stage(tmp_path, "--step-s", "3600"), limits=limits)
    report = run_trial(silent, load("rank-killed-between-saves"), store="local", seed=7, cache_folder=None)
    assert (report.verdict, report.exit_code) == (Verdict.UNKNOWN, 4)
    told = problems(report)["trial"]
    assert "the next sign of progress did not come within 1 s; last seen: " in told
    assert "; where the script needs that long, a longer --timeout (timeout= of the fixture) gives it more" in told


def test_a_script_that_is_not_deterministic_is_unknown_and_never_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two undisturbed runs that differ say so, with step and tensor; also when both come from the cache."""
    monkeypatch.setattr(cache, "code_digest", lambda _script: "a")
    for number in range(2):
        out = tmp_path / str(number)
        out.mkdir()
        report = run_trial(
            stage(out, "--bug", "wavers"),
            load("rank-killed-between-saves"),
            store="local",
            seed=1,
            cache_folder=tmp_path / "cache",
            twice=True,
        )
        assert report.verdict is Verdict.UNKNOWN
        assert "two undisturbed runs differ first at step 3, loss 0x" in problems(report)["deterministic"]
        assert problems(report)["deterministic"].endswith("; at step 4, rank 0: model/w")
        assert {path.name for path in out.iterdir() if path.is_dir()} - {"store", "evidence"} == (
            set() if number else {"undisturbed", "repeat"}
        )


def test_a_socket_and_a_file_that_an_agent_leaves_are_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended in order should have cleaned up."""
    monkeypatch.setenv("STANDIN_BUGS", "leaves-socket leaves-temporary")
    report = trial(load("rank-killed-between-saves"), tmp_path)
    assert report.failures() == {FailureClass.LEAK: 1}
    assert re.fullmatch(
        r"left behind: \S+/agent\.sock of node 0; \S+/tmp/tmp\w+ of node 0", problems(report)["no_leaks"]
    )


def test_faults_strike_one_after_the_other(tmp_path: Path) -> None:
    """The second fault waits until the job runs again after the first one."""
    kill = Fault(do="kill", target=Target(kind="rank", which=1), at=Moment(step=6))
    lose = Fault(do="lose", target=Target(kind="node", which=0), at=Moment(event="acknowledged", nth=2, then="step"))
    seen: list[Event] = []
    two = Scenario(name="two", title="t", faults=(kill, lose), expect=Expectation(relaunches=(2, 2)))
    report = trial(two, tmp_path, "--step-s", "0.1", seen=seen)
    assert problems(report) == {}
    first, second = report.accounts
    assert first.restored_from == "memory"
    assert second.restored_from == "store"
    hurt = [event for event in seen if event.source == "harness"]
    kinds = [event.kind for event in hurt if event.kind in ("launched", "fault", "exited")]
    assert kinds == ["launched", "launched", "fault", "exited", "launched", "fault", "exited", "launched"]


def test_an_agent_that_is_stopped_is_woken_at_its_moment(tmp_path: Path) -> None:
    """A process that was stopped has not died: the next fault waits for its own moment, and for no agent's return."""
    stop = Fault(do="stop", target=Target(kind="agent", which=0), at=Moment(event="acknowledged"))
    wake = Fault(do="continue", target=Target(kind="agent", which=0), at=Moment(step=8))
    seen: list[Event] = []
    two = Scenario(name="two", title="t", faults=(stop, wake), expect=Expectation(relaunches=(0, 0)))
    report = trial(two, tmp_path, "--step-s", "0.3", "--steps", "12", seen=seen)
    assert problems(report) == {}
    stopped, woken = [event.t for event in seen if event.kind == "fault"]
    assert stopped < woken < max(event.t for event in seen if event.kind == "step")


def test_an_undisturbed_run_is_kept_per_command_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trial of a command runs the script once only; another command, or other code, is run anew."""
    # The tree may be edited while the test runs.
    version = ["a"]
    monkeypatch.setattr(cache, "code_digest", lambda _script: version[0])
    folder = tmp_path / "cache"
    scenario = load("rank-killed-between-saves")
    seen: list[Event] = []
    for number, (code, more) in enumerate((("a", ()), ("a", ()), ("a", ("--steps", "16")), ("b", ()))):
        version[0] = code
        out = tmp_path / str(number)
        out.mkdir()
        seen.clear()
        report = run_trial(stage(out, *more, seen=seen), scenario, store="local", seed=1, cache_folder=folder)
        assert report.verdict is Verdict.PASS, problems(report)
        notes = [report.cached()] if number == 1 else []
        assert [event.fields["note"] for event in seen if event.kind == "cached"] == notes
        assert ("taken from the cache; --no-cache runs it anew" in report.cached()) is (number == 1)
    assert [(tmp_path / str(number) / "undisturbed").exists() for number in range(4)] == [True, False, True, True]


def test_a_trial_that_is_broken_off_ends_what_it_started_and_says_so(tmp_path: Path) -> None:
    """A signal in the midst of the hurt run: no process stays, and the report is unknown, with the reason."""
    alive: list[int] = []
    others = set(descendants(os.getpid()))

    def signalled(run: str, event: Event) -> None:
        if run == "hurt" and event.kind == "step":
            alive.extend(pid for pid in descendants(os.getpid()) if pid not in others)
            raise SignalledError(signal.SIGTERM)

    mine = replace(stage(tmp_path), observe=signalled)
    with pytest.raises(SignalledError):
        run_trial(mine, load("rank-killed-between-saves"), store="local", seed=7, cache_folder=None)
    assert len(alive) >= 3
    assert [pid for pid in alive if Path(f"/proc/{pid}").exists()] == []
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["verdict"], told["headline"]) == ("unknown", "nothing proved: broken off by SIGTERM before its end")
    assert {"report.html", "junit.xml"} <= {path.name for path in tmp_path.iterdir()}


def test_nothing_outlives_a_harness_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL to the harness in mid-run ends agents and ranks, and removes shared memory and run folders."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_chaos_conductor import *\n"
        "trial(load('rank-killed-between-saves'), Path(sys.argv[2]), '--steps', '100000')\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(out)]) as harness:
        output = out / "undisturbed" / "launches" / "1" / "0.out"
        assert wait_until(lambda: output.exists() and "step 3" in output.read_text(), within=timedelta(seconds=30))
        tag = next(
            entry.removeprefix(b"CKPTD_CHAOS_TAG=").decode()
            for pid in _pids()
            for entry in _environ(pid)
            if entry.startswith(b"CKPTD_CHAOS_TAG=") and str(out).encode() in b"".join(_cmdline(pid))
        )
        marked = f"CKPTD_CHAOS_TAG={tag}".encode()
        assert sum(marked in _environ(pid) for pid in _pids()) >= 4
        harness.send_signal(signal.SIGKILL)
    gone = lambda: not any(marked in _environ(pid) for pid in _pids())  # noqa: E731 - asked again and again
    assert wait_until(gone, within=timedelta(seconds=20))
    assert not Path(f"/dev/shm/ckptd-chaos-{tag}").exists()


def _pids() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environ(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _cmdline(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_the_report_can_be_read_by_programs(tmp_path: Path) -> None:
    """A report is plain JSON with seed, replay line, findings and accounts."""
    report = trial(load("rank-killed-between-saves"), tmp_path)
    assert {"evidence", "report.html", "report.json", "junit.xml"} <= {path.name for path in tmp_path.iterdir()}
    assert rebuild(tmp_path).reports == (report,)
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["verdict"] == "pass"
    assert told["replay"].startswith(
        "ckptd chaos run rank-killed-between-saves --nnodes 1 --nproc 2 --store local --seed 7 -- "
    )
    assert told["accounts"][0]["target"].startswith("rank ")


def test_a_fault_of_the_store_needs_a_store_that_can_be_made_to_fail(tmp_path: Path) -> None:
    """On local files such a scenario is refused before anything runs, with the way out."""
    with pytest.raises(ScheduleError, match="say --store s3"):
        trial(load("store-outage"), tmp_path)
    assert list(tmp_path.iterdir()) == []
