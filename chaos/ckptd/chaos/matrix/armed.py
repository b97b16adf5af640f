"""Runs a script as one rank of torchrun, with the failpoints that are meant for this rank: `armed.py SCRIPT ARGS...`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from ckptd.chaos.matrix.launcher import rank_failpoints

if __name__ == "__main__":
    os.environ.update(rank_failpoints(int(os.environ["RANK"]), os.environ))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
