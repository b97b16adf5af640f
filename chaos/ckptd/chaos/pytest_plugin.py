"""pytest plugin: a user's test proves in three lines that a training script resumes bit for bit.

    def test_resumes(ckptd_chaos):
        ckptd_chaos("train.py", "--steps", "20", nproc=2)

Owns: the fixture, its option, and how a verdict becomes the outcome of a test. Does not own: the harness. It is loaded in
every pytest run of an environment that has ckptd (entry point `pytest11`): so nothing but pytest is imported before the
fixture is used, and a test that does not use it pays for one small module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ckptd.chaos.preset_run import Series

_OPTION = "--ckptd-chaos-out"
_WITHOUT_NAMES = {True: "the loss", False: "what was there was trained again"}
"""What is first wrong where no tensor is, by whether the printed loss differs."""


class Prove:
    """What the fixture `ckptd_chaos` is.

    Args:
        out: Gets a folder of evidence for each call.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._count = 0

    def __call__(
        self,
        script: str | Path,
        *arguments: str,
        nproc: int | None = None,
        nnodes: int | None = None,
        preset: str = "ci",
        only: tuple[str, ...] = (),
        store: str | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        once: bool = False,
    ) -> Series:
        """Run a preset on a script, and fail the test unless every trial passes.

        Args:
            script: The script, or "-m" or "torchrun" with what follows in `arguments`; relative to the working folder.
            arguments: Its arguments; {root} and others are filled in, see docs/chaos.md.
            nproc: Ranks on each node; None: as the preset says.
            nnodes: Nodes, likewise.
            preset: Its name, or a .toml file.
            only: Scenarios of it; empty: all of them.
            store: "local" or "s3"; None: as the preset says.
            seed: Decides what the scenarios leave open; None: chosen by chance, and reported.
            timeout: Bound of each run, seconds; None: as the preset says.
            once: Do the undisturbed run once only.

        Returns:
            The reports of a pass, for a test that wants to look closer.
        """
        import secrets  # noqa: PLC0415 - see above: nothing is imported for those who do not use it

        from ckptd.chaos.preset_run import run_series  # noqa: PLC0415 - same
        from ckptd.chaos.request import read_request  # noqa: PLC0415 - same

        self._count += 1
        out = self._out / f"chaos-{self._count}"
        with _usage_errors(out):
            asked = read_request(
                str(script),
                list(arguments),
                preset=preset,
                only=only,
                nnodes=nnodes,
                nproc=nproc,
                store=store,
                timeout=timeout,
            )
            out.mkdir(parents=True)
            series = run_series(
                asked.stage(out, lambda _run, _event: None),
                asked.scenarios,
                store=asked.store,
                seed=secrets.randbelow(1 << 31) if seed is None else seed,
                cache_folder=None,
                twice=not once,
            )
        if series.exit_code:
            pytest.fail(_told(series), pytrace=False)
        return series


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of evidence."""
    parser.getgroup("ckptd").addoption(
        _OPTION,
        metavar="DIR",
        default=None,
        help="keep the evidence of ckptd_chaos in a folder per test in DIR; by default in the test's tmp_path",
    )


@pytest.fixture
def ckptd_chaos(request: pytest.FixtureRequest, tmp_path: Path) -> Prove:
    """Hurt a training script as a preset says, and fail unless it comes back bit for bit."""
    kept = request.config.getoption(_OPTION)
    folder = tmp_path if kept is None else Path(str(kept)).resolve() / _folder_of(request.node.nodeid)
    return Prove(folder)


def _folder_of(nodeid: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in nodeid)


@contextmanager
def _usage_errors(out: Path) -> Iterator[None]:
    """Say what is wrong with a call as pytest says it of its own options."""
    from ckptd.chaos.command import CommandError  # noqa: PLC0415 - see above
    from ckptd.chaos.scenario_reader import ScenarioError  # noqa: PLC0415 - same
    from ckptd.chaos.schedule import ScheduleError  # noqa: PLC0415 - same

    try:
        yield
    except (CommandError, ScenarioError, ScheduleError) as error:
        raise pytest.UsageError(f"ckptd_chaos: {error}") from None
    except FileExistsError:
        raise pytest.UsageError(
            f"ckptd_chaos: {out} is there already; {_OPTION} names a new folder each time"
        ) from None


def _told(series: Series) -> str:
    """Return what is red: headline, first divergence, what is likely missing, how to run it again, and the page."""
    lines = []
    for report in series.reports:
        if not report.exit_code:
            continue
        lines += [f"{report.scenario}: {report.verdict}: {report.headline()}"]
        if (found := report.diagnosis) is not None:
            where = f"launch {found.launch}, step {found.step}" + ("" if found.rank is None else f", rank {found.rank}")
            lines += [
                f"  first divergence: {where}: {', '.join(found.names[:5]) or _WITHOUT_NAMES[found.loss_differs]}"
            ]
            lines += [f"  likely: {found.cause}: {found.advice}"]
        lines += [f"  again: {report.replay}"]
    return "\n".join([*lines, f"page: {series.page}"])
