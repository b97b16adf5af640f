"""Few reads for many pieces, and the right bytes for each."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client.restored_files import _GAP, _RUN, read_all

SIZE = 200
BYTES = {name: torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for name in ("a", "b")}


class Files:
    """Keeps what was read."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        self.data = data
        self.reads: list[tuple[str, int, int]] = []

    def read(self, path: str, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes of a file."""
        self.reads.append((path, offset, nbytes))
        assert offset + nbytes <= self.data[path].numel()
        return self.data[path][offset : offset + nbytes]

    def close(self) -> None:
        """Nothing is held."""


places = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, SIZE), st.integers(0, SIZE)).map(
    lambda place: (place[0], place[1], min(place[2], SIZE - place[1]))
)


@given(st.lists(places, max_size=20))
def test_every_piece_gets_its_own_bytes(asked: list[tuple[str, int, int]]) -> None:
    """In any order, overlapping, empty, of several files."""
    files = Files(BYTES)
    found = read_all(files, asked)
    assert len(found) == len(asked)
    for data, (path, at, nbytes) in zip(found, asked, strict=True):
        assert torch.equal(data, BYTES[path][at : at + nbytes])
    assert len(files.reads) <= 2


def test_neighbours_are_read_at_once_and_what_lies_far_apart_is_not() -> None:
    """Gaps are read along where a call would cost more; a run ends before it is large, but for a piece that is."""
    data = {"a": torch.zeros(2 * _RUN + 10 * _GAP, dtype=torch.uint8)}
    files = Files(data)
    read_all(files, [("a", 64 * number, 60) for number in range(1000)])
    assert files.reads == [("a", 0, 64 * 999 + 60)]
    files.reads.clear()
    read_all(files, [("a", 0, 10), ("a", 10 + _GAP, 10), ("a", 21 + 2 * _GAP, 10)])
    assert files.reads == [("a", 0, 20 + _GAP), ("a", 21 + 2 * _GAP, 10)]
    files.reads.clear()
    read_all(files, [("a", 0, 100), ("a", 100, _RUN + 1), ("a", _RUN + 101, 5)])
    assert files.reads == [("a", 0, 100), ("a", 100, _RUN + 1), ("a", _RUN + 101, 5)]
