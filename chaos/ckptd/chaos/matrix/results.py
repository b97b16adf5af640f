"""What became of each cell, kept as lines of JSON: a matrix that was broken off goes on where it stopped.

Owns: the file of one version of the code, and what it says. Does not own: running cells. Invariant: a line is written
whole when its cell has ended; a cut last line is as good as none.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptd.chaos.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """One cell's end.

    Attributes:
        cell: As `str(Cell)`.
        verdict: pass, fail or unknown; "not applicable" where the surveys say so.
        play: In which play; empty where none passes the boundary.
        struck: The process, the pass and the action.
        fired: Whether the fault was really done.
        launches: How often the job was started.
        seconds: The run took.
        problems: Text of each check that is no pass, by its name.
        classes: Of what failed, the worst first.
        evidence: Folder, kept unless the cell passed.
    """

    cell: str
    verdict: str
    play: str = ""
    struck: str = ""
    fired: bool = False
    launches: int = 0
    seconds: float = 0.0
    problems: dict[str, str]
    classes: tuple[str, ...] = ()
    evidence: str = ""

    @property
    def failure(self) -> str:
        """The worst class of what failed; empty where nothing did."""
        return self.classes[0] if self.classes else ""

    @property
    def replay(self) -> str:
        """The command line that runs the cell again."""
        return f"ckptd chaos matrix --again --only '{self.cell}'"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"replay": self.replay}


NOT_APPLICABLE = "not applicable"


def result_of(told: Mapping[str, Any]) -> CellResult:
    """Return the result that `to_dict` told; what it does not know is left out."""
    fields = {name: told[name] for name in CellResult.__dataclass_fields__ if name in told}
    return CellResult(**fields | {"classes": tuple(fields.get("classes", ()))})


class Results:
    """The results of one version of the code. For one thread.

    Args:
        folder: Of all versions.
        code: Digest of the code.
    """

    def __init__(self, folder: Path, code: str) -> None:
        self.code = code
        self.folder = folder / code[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "cells.jsonl"
        self.known: dict[str, CellResult] = {}
        for told in _lines(self.path):
            if told.get("kind") == "cell":
                self.known[told["cell"]] = result_of(told)

    def begin(self, *, commit: str, code: str, begun: float) -> None:
        """Note that a matrix runs."""
        self._append({"kind": "matrix", "commit": commit, "code": code, "t": begun})

    def add(self, result: CellResult) -> None:
        """Keep one result; durable enough to outlive the harness."""
        self.known[result.cell] = result
        self._append({"kind": "cell", **result.to_dict()})

    def is_settled(self, cell: str) -> bool:
        """Whether a cell needs not be run again: unknown settles nothing."""
        return cell in self.known and self.known[cell].verdict != Verdict.UNKNOWN

    def _append(self, told: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that holds `folder`; empty where there is none."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
