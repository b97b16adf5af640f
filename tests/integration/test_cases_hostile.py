"""Faults from the field: pickles in the place of stored bytes, and roots of newer versions, on real agents."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.two_nodes import TwoNodes

from ckptd.client import Checkpointer, CkptdError

pytestmark = pytest.mark.integration


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


def hostile(marker: Path, size: int) -> bytes:
    """Return a pickle that makes the marker when it is read, of at least some size."""
    data = pickle.dumps([Touch(marker), b"x" * size])
    pickle.loads(data)  # noqa: S301 - shows that it is a working one
    assert marker.exists()
    marker.unlink()
    return data


def state() -> dict[str, Any]:
    """Return live targets of other values than what is stored."""
    return {"weight": torch.full((5000,), -1.0), "notes": {"n": -1}}


def only(folder: Path, pattern: str) -> Path:
    """Return the one file that fits."""
    (found,) = folder.rglob(pattern)
    return found


NOT_JSON = "{key}: its {size} bytes are not JSON"
WHY: dict[str, tuple[str, str]] = {
    "chunk of tensors": (
        "{key} .*: {was} bytes with BLAKE3 .* expected, the object has {size} bytes",
        "{key} .* found",
    ),
    "chunk of objects": (
        "{key} .*: {was} bytes with BLAKE3 .* expected, the object has {size} bytes",
        "{key} .* found",
    ),
    "index": (
        "index {key} has {size} bytes, it was listed with {was}",
        "index {key} does not have the digest in its name",
    ),
    "decision": (NOT_JSON, NOT_JSON),
    "start record": (NOT_JSON, NOT_JSON),
    "claim": (NOT_JSON, NOT_JSON),
    "job": (NOT_JSON, NOT_JSON),
}
"""What the error says of a pickle of its own size, and of one that was cut to the object's."""

PLACES: dict[str, Callable[[Path], Path]] = {
    "chunk of tensors": lambda root: max((root / "chunks").rglob("*.*"), key=lambda path: path.stat().st_size),
    "chunk of objects": lambda root: min(
        (path for path in (root / "chunks").rglob("*.*") if path.is_file()), key=lambda path: path.stat().st_size
    ),
    "index": lambda root: only(root / "index", "*.pb"),
    "decision": lambda root: only(root / "log", "*.000000000001.json"),
    "start record": lambda root: max((root / "log").glob("*.start.json")),
    "claim": lambda root: only(root / "log", "*.claim.json"),
    "job": lambda root: root / "job.json",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("exact", [False, True], ids=["its own size", "size of the object"])
def test_s136_a_pickle_in_place_of_anything_runs_nothing(
    two_nodes: TwoNodes, tmp_path: Path, place: str, exact: bool
) -> None:
    """The marker never appears, the error names the object, and no target is touched."""
    root, marker = tmp_path / "root", tmp_path / "marker"
    two_nodes.saved(root, {"weight": torch.arange(5000.0), "notes": {"n": 1}})
    if place == "start record":
        restored(two_nodes, root)  # a decision that is newer than the start record stands for it
    path = PLACES[place](root)
    size = path.stat().st_size
    data = hostile(marker, size if exact else 10)
    path.chmod(0o600)
    put = data[:size] if exact else data
    path.write_bytes(put)
    live, blank = state(), state()
    with pytest.raises(CkptdError) as caught, two_nodes.on(two_nodes.other, root) as ckpt:
        ckpt.restore_into(live, step=1)
    assert not marker.exists()
    assert caught.value.reason_name == "CORRUPT"
    text = WHY[place][exact].format(key=re.escape(str(path.relative_to(root))), was=size, size=len(put))
    assert re.search(text, caught.value.message), caught.value.message
    assert torch.equal(live["weight"], blank["weight"])
    assert live["notes"] == blank["notes"]


@pytest.mark.parametrize("place", ["chunk of tensors", "chunk of objects", "index"])
def test_s070_one_bit_flipped_at_rest_is_refused_by_name_and_touches_no_target(
    two_nodes: TwoNodes, tmp_path: Path, place: str
) -> None:
    """on_corrupt="raise" refuses the step and names the object; by default the step before is restored, loudly."""
    root = tmp_path / "root"
    two_nodes.saved(root, {"weight": torch.arange(5000.0), "notes": {"n": 1}})
    two_nodes.saved(root, {"weight": torch.arange(5000.0) + 2, "notes": {"n": 2}}, step=2)
    path = max(
        (path for path in root.rglob("*000000000002*") if path.is_file() and "log" not in path.parts),
        key=lambda path: path.stat().st_size,
    )
    if place == "chunk of objects":
        path = min((root / "chunks").rglob("*.000000000002.*"), key=lambda path: path.stat().st_size)
    elif place == "index":
        path = only(root / "index", "000000000002.*/*.pb")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)
    live, blank = state(), state()
    with pytest.raises(CkptdError) as caught, two_nodes.on(two_nodes.other, root) as ckpt:
        ckpt.restore_into(live, on_corrupt="raise")
    assert (caught.value.reason_name, caught.value.step) == ("CORRUPT", 2)
    assert path.name in str(caught.value)
    assert torch.equal(live["weight"], blank["weight"])
    assert live["notes"] == blank["notes"]
    with two_nodes.on(two_nodes.other, root) as ckpt:
        found = ckpt.restore_into(live)
    assert found is not None
    assert found.step == 1
    assert [bad.step for bad in found.fell_back_from] == [2]
    assert torch.equal(live["weight"], torch.arange(5000.0))
    assert live["notes"] == {"n": 1}


def job_json(root: Path, **changes: object) -> None:
    """Change fields of a root's job.json."""
    path = root / "job.json"
    found = json.loads(path.read_text())
    path.chmod(0o600)
    path.write_text(json.dumps({**found, **changes}))


def test_s138_a_newer_format_is_refused_with_both_numbers(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """At the start of a run, before anything is written."""
    two_nodes.saved(tmp_path, state())
    version = json.loads((tmp_path / "job.json").read_text())["format_version"]
    job_json(tmp_path, format_version=version + 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CkptdError) as caught:
        restored(two_nodes, tmp_path)
    assert caught.value.reason_name == "FORMAT_UNSUPPORTED"
    assert caught.value.message == (
        f"job.json: format version {version + 1}; this program reads versions up to {version}"
    )
    assert caught.value.hint == "use a newer ckptd to read this root"
    assert sorted(tmp_path.rglob("*")) == before


def test_s138_an_unknown_required_feature_is_refused_by_name(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """A reader that does not know it would misread the bytes."""
    two_nodes.saved(tmp_path, state())
    job_json(tmp_path, required_features=["time-travel"])
    with pytest.raises(CkptdError) as caught:
        restored(two_nodes, tmp_path)
    assert caught.value.reason_name == "FORMAT_UNSUPPORTED"
    assert caught.value.message == "job.json: it needs the features time-travel, which this program does not know"
    assert caught.value.hint == "use a newer ckptd to read this root"


def test_s138_unknown_fields_are_passed_over(two_nodes: TwoNodes, tmp_path: Path) -> None:
    """In job.json and in the claim, by a program that is newer but compatible."""
    two_nodes.saved(tmp_path, {"weight": torch.arange(5000.0), "notes": {"n": 1}})
    job_json(tmp_path, mood="fine", colours=[{"red": 1}])
    claim = only(tmp_path / "log", "*.claim.json")
    claim.chmod(0o600)
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "weather": {"sun": True}}))
    live = restored(two_nodes, tmp_path)
    assert torch.equal(live["weight"], torch.arange(5000.0))
    assert live["notes"] == {"n": 1}


def restored(two_nodes: TwoNodes, root: Path) -> dict[str, Any]:
    """Restore on the other node."""
    live = state()

    def call(ckpt: Checkpointer) -> None:
        ckpt.restore_into(live, required=True)

    with two_nodes.on(two_nodes.other, root) as ckpt:
        call(ckpt)
    return live
