"""What an agent keeps in plain files of its node: the node's identity, where it listens, its coordinators' ports.

Owns: their names and content. Does not own: the folders (`config`), slots and snapshots in shared memory (`slots`, `held`).
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2


def node_id(data_dir: Path) -> str:
    """Return the uuid of the data folder, made at the first start and kept for ever.

    Raises:
        DaemonError: INVALID_ARGUMENT, the file holds something else.
    """
    path = data_dir / "node-id"
    try:
        return str(uuid.UUID(path.read_text().strip()))
    except FileNotFoundError:
        pass
    except ValueError:
        raise DaemonError.of(
            f"{path} does not hold a uuid",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint="remove the file: the node then gets a new identity",
            object=str(path),
        ) from None
    fresh = path.with_name(f"node-id.{os.getpid()}")
    made = str(uuid.uuid4())
    fresh.write_text(made + "\n")
    try:
        os.link(fresh, path)
    except FileExistsError:
        made = str(uuid.UUID(path.read_text().strip()))
    finally:
        fresh.unlink()
    return made


def write_ready_file(run_dir: Path, *, socket: Path, node: str) -> None:
    """Say where the agent listens, for whoever started it: run_dir/agent.json, whole or not at all."""
    path = run_dir / "agent.json"
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"pid": os.getpid(), "socket": str(socket), "node": node}) + "\n")
    fresh.replace(path)


def port_file(run_dir: Path, run_id: str) -> Path:
    """Return the file that keeps the port of a run's coordinator over a restart of its agent."""
    name = "".join(one for one in run_id if one.isalnum())[:64]
    return run_dir / f"run-{name}.port"


def read_port(path: Path) -> int | None:
    """Return the port that a file keeps; None where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
