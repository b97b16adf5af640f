"""Faults of processes, disks and clocks, done to a real job: what must hold holds, and each fault was really there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.light_trials import LightTrials, complaints, light_trials, problems

from ckptd.chaos.cluster import disks
from ckptd.chaos.scenario import Expectation, Scenario
from ckptd.chaos.scenario_reader import load, parse
from ckptd.chaos.verdict import Verdict

__all__ = ["light_trials"]
pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(300)]

needs_mounts = pytest.mark.skipif(bool(disks.missing()), reason=f"mounts of our own are not allowed: {disks.missing()}")
LONG = ("--steps", "24")
# They need a mount only where they are run; reading them needs none.
WITH_MOUNTS = ("shared-memory-full", "store-disk-full")


def of(*faults: str, committed: str | None = None) -> Scenario:
    """A scenario of these faults, in which nobody dies."""
    read = parse("".join(f"[[fault]]\n{fault}\n" for fault in faults), name="x", source="x.toml")
    return replace(read, expect=Expectation(relaunches=(0, 0), committed=committed))


def raw_times(out: Path, node: int) -> list[float]:
    lines = (out / "hurt" / "nodes" / str(node) / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["t"] for line in lines]


@pytest.mark.parametrize(
    "name",
    [
        "clock-off",
        "node-rebooted",
        "rank-hung",
        "rank-raises",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("agent-terminated", "rank-segfaults", "rank-slow")),
        *(pytest.param(name, marks=[needs_mounts, pytest.mark.root]) for name in WITH_MOUNTS),
    ],
)
def test_a_scenario_of_the_package_holds(name: str, light_trials: LightTrials, tmp_path: Path) -> None:
    """Every fault fires and is taken back, every promise holds, and what else each one means is seen."""
    report = light_trials.run(load(name), tmp_path, *LONG)
    assert problems(report) == {}
    if name in _LOOKS:
        _LOOKS[name](light_trials, tmp_path)


def _look_at_hung(trials: LightTrials, _out: Path) -> None:
    (given_up,) = trials.of("given_up")
    assert given_up.fields["launch"] == 1


def _look_at_reboot(trials: LightTrials, out: Path) -> None:
    (rebooted,) = trials.of("node_rebooted")
    before, after = (e.fields["node"] for e in trials.of("listening") if e.source == f"agent {rebooted.fields['node']}")
    assert before == after, "a node that is rebooted keeps its identity"
    assert [e for e in trials.of("slots_adopted") if e.source == f"agent {rebooted.fields['node']}"] == []


def _look_at_terminated(trials: LightTrials, _out: Path) -> None:
    """Whoever takes over what was listed already gives it back: no later save lacks a slot."""
    (died,) = trials.of("agent_died")
    assert died.fields["code"] == 0
    assert [e for e in trials.of("slots_adopted") if e.source == f"agent {died.fields['agent']}"]
    later = [e for e in trials.of("decided") if e.t > died.t]
    assert [e.fields["error"] for e in later if not e.fields["committed"]] == []


def _look_at_full_memory(trials: LightTrials, out: Path) -> None:
    said = re.findall(r"no space in (\S+): (\d+) bytes needed, (\d+) free \[NO_SPACE", complaints(out))
    assert said
    assert all("/dev/shm/ckptd-chaos-" in folder and int(needed) > int(free) for folder, needed, free in said)
    assert "CKPTD_SHM_DIR" in complaints(out)
    assert len(trials.of("lifted")) == 1


def _look_at_full_disk(trials: LightTrials, out: Path) -> None:
    text = complaints(out)
    assert re.search(r"No space left on device: \d+ bytes free, \d+ needed: .* in file:///.*\[NO_SPACE", text)
    assert re.search(r"Read-only file system: .* in file:///.*\[PERMISSION_DENIED", text)
    assert "free space under the root" in text
    # Each save that failed is told once by each rank, and once by its handle.
    per_rank = re.findall(r"^rank (\d): step (\d+) is not saved", text, re.MULTILINE)
    assert len(per_rank) == len(set(per_rank))
    # The file system was the run's own, and what it held is kept.
    assert list((out / "store" / "hurt").glob("log/*.json"))
    assert str(out) not in Path("/proc/self/mounts").read_text()


def _look_at_clocks(trials: LightTrials, out: Path) -> None:
    logged = raw_times(out, 0)
    assert max(logged) - min(logged) > 3500, "the agent's own log must show the wrong clock"
    times = [event.t for event in trials.seen]
    assert max(times) - min(times) < 600, "the history must show the right one"


_LOOKS: dict[str, Callable[[LightTrials, Path], None]] = {
    "agent-terminated": _look_at_terminated,
    "clock-off": _look_at_clocks,
    "node-rebooted": _look_at_reboot,
    "rank-hung": _look_at_hung,
    "shared-memory-full": _look_at_full_memory,
    "store-disk-full": _look_at_full_disk,
}


def test_s141_a_store_over_quota_or_full_at_fsync_or_close_fails_saves_and_nothing_else(
    light_trials: LightTrials, tmp_path: Path
) -> None:
    """EDQUOT at write and ENOSPC at fsync fail steps, with words; at close all is written already. The next saves commit."""
    refusals = [
        f'do = "disk"\ndisk = "store"\nfault = "{kind}"\nfor_s = 1\nat = {{ event = "sealed", nth = 3 }}'
        for kind in ("quota", "fsync", "close")
    ]
    report = light_trials.run(of(*refusals, committed="after"), tmp_path, "--steps", "40")
    assert problems(report) == {}
    # Which put a refusal meets is chance: an upload says so at once, a decision is put again until it is written.
    said = " ".join(str(event.fields["error"]) for event in light_trials.of("upload_failed"))
    assert re.search(r"(Disk quota exceeded|No space left on device): \d+ bytes free, \d+ needed", said)
    assert list((tmp_path / "store" / "hurt").glob(".*/*")) == [], "no temporary file stays"


def test_a_step_that_one_node_has_no_room_for_costs_the_others_no_slot(
    light_trials: LightTrials, tmp_path: Path
) -> None:
    """The abort overtakes the making of slots on the other node; they are given back all the same, and later saves commit."""
    quota = 'do = "disk"\ndisk = "shm"\nfault = "quota"\ntarget = "node 0"\nfor_s = 2\nat = { event = "started" }'
    report = light_trials.run(of(quota, committed="after"), tmp_path, *LONG)
    assert problems(report) == {}
    assert "Disk quota exceeded" in complaints(tmp_path)
    assert "every slot holds a step in flight" not in complaints(tmp_path)


@pytest.mark.parametrize("strikes", ["before", "during"])
def test_a_restore_without_room_in_shared_memory_ends_its_launch_and_no_run(
    light_trials: LightTrials, tmp_path: Path, strikes: str
) -> None:
    """It is refused with needed and free bytes, whether the quota comes before the start or after it; the job goes on later."""
    quota = 'do = "disk"\ndisk = "shm"\nfault = "quota"\ntarget = "node 0"\nfor_s = 3\n'
    lost = 'do = "lose"\ntarget = "node 1"\nat = { event = "acknowledged", nth = 3 }'
    faults = {
        "before": [quota + 'at = { event = "acknowledged", nth = 3 }', lost.replace("nth = 3", "nth = 1")],
        "during": [lost, quota + 'at = { event = "restore_chosen", restarting = true }'],
    }[strikes]
    scenario = replace(of(*faults), expect=Expectation(relaunches=(2, 40)))
    report = light_trials.run(scenario, tmp_path, *LONG, relaunches=40)
    assert problems(report) == {}
    (refused, *_) = light_trials.of("restore_failed_local")
    assert re.search(r"no space in \S+: \d+ bytes needed, \d+ free \(Disk quota exceeded\)", refused.fields["error"])


@pytest.mark.s3
def test_s064_a_store_that_refuses_a_wrong_clock_fails_steps_with_the_way_out(
    light_trials: LightTrials, tmp_path: Path
) -> None:
    """RequestTimeTooSkewed fails its steps at once and names the clock; training goes on, and later steps commit."""
    skewed = (
        'do = "store"\nfault = "skewed"\nmatch = "put chunks/"\nfor_s = 1\nat = { event = "acknowledged", nth = 2 }'
    )
    report = light_trials.run(of(skewed), tmp_path, *LONG, store="s3")
    assert problems(report) == {}
    assert "set this node's clock" in complaints(tmp_path)


def test_what_cannot_be_done_here_is_not_run_and_no_pass(
    light_trials: LightTrials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the right to mount nothing is run; the verdict is unknown and says why, and what would help."""
    monkeypatch.setattr("ckptd.chaos.cluster.means.missing", lambda: "unshare failed: Operation not permitted")
    report = light_trials.run(load("store-disk-full"), tmp_path)
    assert report.verdict is Verdict.UNKNOWN
    assert "not run: a disk that is full" in problems(report)["trial"]
    assert "Operation not permitted" in problems(report)["trial"]
    assert "SYS_ADMIN" in problems(report)["trial"]
    assert light_trials.seen == []
    assert not (tmp_path / "hurt").exists()
