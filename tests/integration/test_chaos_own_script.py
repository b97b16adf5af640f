"""A script of one's own in CI: the preset on the smallest example, and on scripts that forget something or cannot be judged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from ckptd.chaos.cluster.leash import descendants
from ckptd.chaos.watch import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.mesh, pytest.mark.timeout(1500)]
pytest_plugins = ["pytester"]

HERE = Path(__file__).parent.parent
TRAIN_MIN = HERE.parent / "examples" / "train_min.py"
CI_PAGE = HERE.parent / "docs" / "chaos-ci.md"
FORGETFUL = HERE / "fixtures" / "forgetful.py"


def chaos(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "ckptd.daemon.cli",
        "chaos",
        "run",
        "--preset",
        "ci",
        "--no-cache",
        "--out",
        str(out),
    ]
    return subprocess.run([*command, *words], check=False, capture_output=True, text=True)


def artifacts() -> list[str]:
    """Return what docs/chaos-ci.md uploads from the folder of a series."""
    (text,) = re.findall(r"```yaml\n(.*?)```", CI_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    paths = yaml.safe_load(text)["jobs"]["resumes"]["steps"][-1]["with"]["path"]
    return [path.removeprefix("chaos-report/") for path in paths.split()]


def test_the_smallest_example_passes_the_preset_for_ci(tmp_path: Path) -> None:
    """Every fault of it fires, every bit is that of the undisturbed runs, and one summary says so."""
    out = tmp_path / "out"
    ended = chaos(out, "--seed", "1", "--", "torchrun", "--nproc-per-node=2", str(TRAIN_MIN), "{root}", "16")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((out / "report.json").read_text())
    assert (told["verdict"], told["trials"], told["verdicts"]["pass"]) == ("pass", 5, 5)
    for report in told["reports"]:
        assert [account["fired"] for account in report["accounts"]] == [True], report["scenario"]
        compared = {finding["check"]: finding["compared"] for finding in report["findings"]}
        assert compared["same_losses"] >= 16
        # Saves wait for a slot; one that is in flight when an agent dies may be lost.
        assert compared["same_state_digests"] >= 12
        page = out / report["scenario"] / "report.html"
        assert f'href="{report["scenario"]}/report.html"' in (out / "index.html").read_text()
        assert page.is_file()
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        *(report["scenario"] for report in told["reports"]),
        *("undisturbed", "repeat", "store"),
    }
    # What the page on CI uploads is there under these names, and what the ranks printed is in it.
    uploaded = [path for pattern in artifacts() for path in out.glob(pattern.rstrip("/"))]
    assert [pattern for pattern in artifacts() if not list(out.glob(pattern.rstrip("/")))] == []
    whole = {path for top in uploaded for path in ([top] if top.is_file() else top.rglob("*"))}
    for report in told["reports"]:
        of_it = {str(path.relative_to(out / report["scenario"])) for path in whole if report["scenario"] in path.parts}
        assert {"report.html", "hurt/launches/1/0.err", "hurt/nodes/0/agent.log", "evidence/history.jsonl"} <= of_it
    assert out / "undisturbed" / "launches" / "1" / "0.err" in whole


def test_a_script_that_forgets_its_loader_fails_a_test_that_names_the_loader(pytester: pytest.Pytester) -> None:
    """The fixture, on a script that prints nothing: first divergence, variable and function, and the page."""
    pytester.makepyfile(
        f"""
        def test_resumes(ckptd_chaos):
            ckptd_chaos({str(FORGETFUL)!r}, "--forget", "loader", only=("everything-lost",), seed=1, once=True)
        """
    )
    plugins = ("-p", "ckptd.chaos.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
    ended = pytester.runpytest_subprocess(*plugins, "--ckptd-chaos-out", "kept")
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(
        [
            "everything-lost: fail: silent divergence: first at step *adam/state/*",
            "  first divergence: launch 2, step *",
            "  likely: loader: the very next step *. Not tracked: train_data in main() of forgetful.py (Batches)*",
            "page: *kept/*/index.html",
        ]
    )


@pytest.mark.long
def test_a_script_that_begins_anew_each_time_is_told_to_restore(tmp_path: Path) -> None:
    """It trains the very bits of the undisturbed run again, so that nothing diverges; the report names restore() all the same."""
    out = tmp_path / "out"
    only = ("--only", "rank-killed-while-uploading", "--once", "--seed", "1", "--nproc", "1")
    ended = chaos(out, *only, "--", str(FORGETFUL), "--forget", "restore")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (report,) = json.loads((out / "report.json").read_text())["reports"]
    assert [account["fired"] for account in report["accounts"]] == [True]
    red = {finding["check"]: finding["text"] for finding in report["findings"] if finding["verdict"] == "fail"}
    assert red["restored_newest"].startswith("launch 2 went on from step 0, but step")
    assert "same_state_digests" not in red
    assert "  likely: restore: launch 2 restored nothing, though step " in ended.stdout


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Give a folder with a path short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="ckptd-t-") as folder:
        yield Path(folder)


def test_an_interrupt_ends_everything_and_names_the_folder(temporary: Path) -> None:
    """As a terminal sends it, to all processes of the group: nothing stays, and what there is so far is where it says."""
    command = [sys.executable, "-m", "ckptd.daemon.cli", "chaos", "run", "--preset", "ci", "--nproc", "1"]
    running = subprocess.Popen(
        [*command, "--", str(FORGETFUL), "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        begun = "ckptd-chaos-*/undisturbed/nodes/0/events.jsonl"
        wait_until(
            lambda: (
                any(b'"staged"' in path.read_bytes() for path in temporary.glob(begun)) or running.poll() is not None
            ),
            within=timedelta(minutes=4),
        )
        assert running.poll() is None, running.communicate()
        (out,) = (path.parents[3] for path in temporary.glob(begun))
        children = descendants(running.pid)
        assert len(children) >= 4
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=240)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 128 + signal.SIGINT, said
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert f"broken off by SIGINT before its end; nothing is left running. What was seen so far: {out}\n" in said
    assert list(temporary.glob("ckptd*")) == [out]
    assert len(json.loads((out / "report.json").read_text())["open"]) == 5
    assert (out / "undisturbed" / "report.html").is_file()


def test_a_script_that_does_not_use_the_client_is_said_so(tmp_path: Path) -> None:
    """Unknown, with an exit code of its own and what the script printed last; nobody is hurt."""
    out = tmp_path / "out"
    ended = chaos(out, "--nproc", "1", "--", str(FORGETFUL), "--never", "import")
    assert ended.returncode == 4, ended.stdout + ended.stderr
    (report,) = json.loads((out / "report.json").read_text())["reports"]
    assert (report["verdict"], report["unfit"]) == ("unknown", "does not use the client")
    text = report["findings"][0]["text"]
    assert text.startswith("the script ended well and made no Checkpointer")
    assert text.endswith("[0.out] trained without any checkpoint")
    assert not (out / "everything-lost").exists()
