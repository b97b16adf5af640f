"""One worker of a matrix: takes cells from its parent, runs them, and tells what became of each.

Run as `python -m ckptd.chaos.matrix.worker PARENT_PID NUMBER OUT RESULTS CODE`. First line on stdin: the variables of shared
stores, JSON by kind; then a line with a cell's name for each cell. A line of JSON on stdout for each result. Owns: its fork
servers, its local roots, its evidence folder. Does not own: which cells are run, nor the file of results (`pool`). Invariants:
it is killed with its parent, and whatever it started ends with it, as with any harness; what it prints by itself goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ckptd.chaos.cluster.store import S3Store, Store
from ckptd.chaos.matrix.cells import cell_named
from ckptd.chaos.matrix.results import Results
from ckptd.chaos.matrix.running import Matrix

_PR_SET_PDEATHSIG = 1


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # A cell that runs is broken off; what it started is ended on the way out.
    raise SystemExit(128 + signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Serve until stdin ends."""
    parent, number, out, results, code = int(argv[0]), argv[1], Path(argv[2]), Path(argv[3]), argv[4]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGTERM, _end)
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    shared = json.loads(sys.stdin.readline() or "{}")
    stores: dict[str, Store] = {
        kind: S3Store(bucket=about["bucket"], variables=about["variables"]) for kind, about in shared.items()
    }
    with Matrix(out, Results(results, code), stores=stores, label=f"{number}-") as matrix:
        for line in sys.stdin:
            result = matrix.run_cell(cell_named(line.strip()))
            told.write(json.dumps(result.to_dict()) + "\n")
            told.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
