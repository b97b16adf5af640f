"""Real text and a shuffled loader whose position is part of the state.

The text is the running Python's own library: it is on every machine, and nothing is downloaded. All ranks draw
the same order from the loader's own generator and take their part of each batch; augmentation draws from
`random` and numpy's global generator, so a restore that forgets either shows at once.
"""

import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

SWAP_CASE = np.arange(256, dtype=np.uint8)
SWAP_CASE[65:91] += 32
SWAP_CASE[97:123] -= 32


def read_corpus(limit: int) -> torch.Tensor:
    """The first `limit` bytes of the library's `*.py` files in sorted order, as a uint8 tensor."""
    folder = Path(os.__file__).parent
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise SystemExit(f"no *.py files in {folder}: this Python carries its library in another form")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Loader:
    """Hands out batches of `seq + 1` bytes in an order that is shuffled anew in each epoch.

    Args:
        corpus: uint8 text.
        seq: Bytes a sequence predicts.
        batch: Sequences of one step over all data-parallel ranks.
        part: Which part of each batch this rank takes, and of how many.
        seed: Of the order; the same on all ranks.
        augment: Share of sequences that are augmented.
    """

    def __init__(
        self, corpus: torch.Tensor, *, seq: int, batch: int, part: tuple[int, int], seed: int, augment: float
    ) -> None:
        self._corpus, self._seq, self._batch, self._part, self._augment = corpus, seq, batch, part, augment
        self._windows = (len(corpus) - 1) // seq
        if self._windows < batch:
            raise SystemExit(f"{len(corpus)} bytes of text hold {self._windows} sequences, a batch needs {batch}")
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch = -1
        self._served = 0  # CRC of what this rank was given: tells one rank's state from another's
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._before_epoch = self._generator.get_state()
        self._order = torch.randperm(self._windows, generator=self._generator)
        self._epoch += 1
        self._position = 0

    def next(self) -> torch.Tensor:
        """This rank's part of the next batch, int64 of shape (batch / parts, seq + 1)."""
        if self._position + self._batch > self._windows:
            self._begin_epoch()
        index, parts = self._part
        share = self._batch // parts
        first = self._position + index * share
        self._position += self._batch
        starts = (self._order[first : first + share] * self._seq).tolist()
        rows = [self._augmented(self._corpus[s : s + self._seq + 1].numpy()) for s in starts]
        block = np.stack(rows)
        self._served = zlib.crc32(block.data, self._served)
        return torch.from_numpy(block.astype(np.int64))

    def _augmented(self, row: Bytes) -> Bytes:
        if random.random() >= self._augment:
            return row
        noisy: Bytes = SWAP_CASE[row]
        # The global generator on purpose: it is what most training code uses, and what a checkpoint must keep.
        noisy[np.random.randint(0, len(noisy), size=max(1, len(noisy) // 16))] = 32  # noqa: NPY002
        return noisy

    def state_dict(self) -> dict[str, Any]:
        """Position, epoch, and the generator as it was before the epoch's order was drawn."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "generator": self._before_epoch.numpy().tobytes(),
            "served_crc32": self._served,
        }

    @staticmethod
    def on_another_mesh(pieces: Sequence[Any], _here: Any) -> dict[str, Any]:
        """One state out of those of all ranks of another mesh: all draw one order, and only what each was given differs."""
        states = [piece.value for piece in pieces]
        kept = {key: states[0][key] for key in ("epoch", "position", "generator")}
        if any(state[key] != kept[key] for state in states for key in kept):
            raise ValueError("the loaders of the ranks that saved do not stand at one place")
        served = b"".join(state["served_crc32"].to_bytes(4, "little") for state in states)
        return kept | {"served_crc32": zlib.crc32(served)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the order is drawn again from where it was drawn first."""
        self._generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))
        self._begin_epoch()
        self._epoch, self._position = state["epoch"], state["position"]
        self._served = state["served_crc32"]
