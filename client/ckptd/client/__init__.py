"""What a training script imports. Everything else in this package is private.

from ckptd.client import Checkpointer
"""

from .audit import Audit, Finding
from .checkpointer import Checkpointer
from .config import Config
from .errors import (
    Aborted,
    CkptdError,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    SnapshotCorrupt,
    SnapshotNotFound,
    Unavailable,
)
from .handles import SaveHandle
from .loaded_step import LoadedStep, StoredTensor, TensorPiece
from .loading import load, open_step
from .opened_step import OpenStep
from .reshard_hooks import StoredPiece
from .restored import BadStep, Restored
from .sharding import PerRank, Sharded
from .things import Trackable

__all__ = [
    "Aborted",
    "Audit",
    "BadStep",
    "Checkpointer",
    "CkptdError",
    "Config",
    "Fenced",
    "Finding",
    "InvalidRequest",
    "LoadedStep",
    "OpenStep",
    "OutcomeUnknown",
    "PerRank",
    "Restored",
    "SaveHandle",
    "Sharded",
    "SnapshotCorrupt",
    "SnapshotNotFound",
    "StoredPiece",
    "StoredTensor",
    "TensorPiece",
    "Trackable",
    "Unavailable",
    "load",
    "open_step",
]
