"""What an import reads: tensors by name, and which of them are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Source:
    """What stands in files of another format.

    Attributes:
        tensors: By name; plain, on the host, maybe mapped from the file.
        ties: Further names, each to one of `tensors`.
        others: Names of what is no tensor, and cannot be imported.
    """

    tensors: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    others: Sequence[str]
