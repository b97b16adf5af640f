"""What every test shares: fixtures by name, and the import path of child processes."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Child processes (agents, torchrun, examples) import the tree as it lies here, installed or not.
_FOLDERS = ("client", "daemon", "protos", "storage_backends", "chaos")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(ROOT / folder) for folder in _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["fixtures.agents", "fixtures.seaweed", "fixtures.two_nodes", "fixtures.two_rank_root"]
