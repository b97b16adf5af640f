"""A step's tensors by name: what `ckptd show --tensors` lists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from fixtures.at_rest import Shard, build_section, per_rank, timeline

from ckptd.daemon.cli.show import show
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.keys import StepId
from ckptd.daemon.stored_step import read_stored_step
from ckptd.daemon.tensors import TensorKey, stored_tensors
from ckptd.storage_backends.local import LocalStore

GOLDEN = Path(__file__).parent.parent / "golden" / "format-1"


def test_a_tensor_stands_once_whatever_the_ranks() -> None:
    """Replicas are one shard with the ranks that hold it; boxes are several; what is a rank's own stands at its coordinate."""
    own = StepId(timeline(1), 5)
    whole, rng = np.arange(6, dtype=np.float32), np.arange(2, dtype=np.int64)
    sections = {}
    for rank in (0, 1):
        shards = [
            Shard(name="replica", values=whole, writer=0),
            Shard(name="cut", values=whole[3 * rank : 3 * rank + 3], global_shape=(6,), offset=(3 * rank,)),
            per_rank("rng", rng + rank),
        ]
        sections[rank] = build_section(rank, [rank], shards, {}, own)[0]
    sections[1].aliases.alias.append("tied")
    sections[1].aliases.target.append("cut")
    found = stored_tensors(sections, ("dp",))
    shown = {str(key): (len(t.boxes), t.nbytes, t.ranks, t.alias_of) for key, t in found.items()}
    assert shown == {
        "cut": (2, 24, [0, 1], ""),
        "replica": (1, 24, [0, 1], ""),
        "rng at dp 0": (1, 16, [0], ""),
        "rng at dp 1": (1, 16, [1], ""),
        "tied": (2, 24, [0, 1], "cut"),
    }
    assert found[TensorKey("cut")].shape == (6,)


def test_the_fingerprint_of_a_box_is_its_writers() -> None:
    """A replica may have been left uncompared: its zeros stand for nothing, whichever rank comes first."""
    own = StepId(timeline(1), 5)
    values = np.arange(6, dtype=np.float32)
    sections = {
        rank: build_section(rank, [rank], [Shard(name="w", values=values, writer=1)], {}, own, uncompared=True)[0]
        for rank in (0, 1, 2)
    }
    assert [section.uncompared for section in sections.values()] == [True, False, True]
    found = stored_tensors(sections, ("dp",))
    assert list(found[TensorKey("w")].boxes.values()) == [xxhash.xxh3_128_digest(values.tobytes())]


def test_show_tensors_prints_name_dtype_shape_shards_bytes_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a root that is checked in: a row a tensor, and the same as JSON."""
    show(str(GOLDEN), tensors=True)
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["TENSOR", "DTYPE", "SHAPE", "SHARDS", "BYTES", "RANKS", "NOTE"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["weight"] == ["float32", "[6, 8]", "2", "192", "0-3", ""]
    assert by_name["tied"][-1] == "tied to weight"
    assert by_name["rng"] == ["uint32", "[4]", "1", "16", "3", "own of dp 1, tp 1"]
    show(str(GOLDEN), 10, tensors=True, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 10
    assert {"name": "rows", "dtype": "float64", "shape": [4, 3], "shards": 4, "bytes": 96, "ranks": [0, 1, 2, 3]} in (
        found["tensors"]
    )


@pytest.mark.parametrize("number", [20, 60, 999])
def test_only_a_committed_step_has_tensors_to_show(number: int) -> None:
    """A step that is quarantined, incomplete or not there is refused with its number."""
    with pytest.raises(DaemonError, match=str(number)):
        read_stored_step(LocalStore(GOLDEN), number)
