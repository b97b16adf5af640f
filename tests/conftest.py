"""What every test shares: fixtures by name, and the import path of child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fixtures.order import turn

ROOT = Path(__file__).resolve().parent.parent

# Child processes (agents, torchrun, examples) import the tree as it lies here, installed or not.
_FOLDERS = ("client", "daemon", "protos", "storage_backends", "chaos")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*(str(ROOT / folder) for folder in _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["fixtures.agents", "fixtures.seaweed", "fixtures.two_nodes", "fixtures.two_rank_root"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests out unless they are asked for, order files for parallel workers, skip what needs Linux elsewhere.

    Real agents use /dev/shm, /proc, network namespaces and signals of that system.
    """
    if not os.environ.get("CKPTD_TEST_LONG"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn(item.path))
    if sys.platform.startswith("linux"):
        return
    reason = pytest.mark.skip(reason=f"needs Linux (/dev/shm, /proc, fork), not {sys.platform}")
    for item in items:
        if {"integration", "chaos", "s3"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(reason)
