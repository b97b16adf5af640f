"""What an import reads of other formats is what stands in them, or is refused by name."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptd.client import InvalidRequest
from ckptd.client.formats import dcp_files, safetensors_files, torch_file


def test_views_that_only_look_like_their_base_are_no_ties(tmp_path: Path) -> None:
    """A conjugate and a negated view have its address and other values; what is the same tensor is tied still."""
    base = torch.complex(torch.arange(3.0), torch.ones(3))
    state = {"a": base, "b": base.conj(), "c": base, "d": torch._neg_view(base)}
    torch.save(state, tmp_path / "theirs.pt")
    found = torch_file.read(tmp_path / "theirs.pt")
    assert found.ties == {"c": "a"}
    assert all(torch.equal(found.tensors[name], state[name]) for name in "abd")


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"m": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, "m/a/b"),
        ({1: torch.ones(1), "1": torch.zeros(1)}, "1"),
        ({"list": [torch.ones(1)], "list/0": 5}, "list/0"),
    ],
)
def test_two_entries_of_one_name_are_refused(tmp_path: Path, state: dict[Any, Any], name: str) -> None:
    """Neither is lost without a word; a choice of other names goes on."""
    path = tmp_path / "theirs.pt"
    torch.save({**state, "other": torch.full((1,), 3.0)}, path)
    with pytest.raises(InvalidRequest, match=f"two entries would be called {name}") as caught:
        torch_file.read(path)
    assert caught.value.key == name
    assert "--only" in caught.value.hint
    assert "other" in torch_file.read(path, lambda each: each == "other").tensors


def written(folder: Path, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] | None) -> Path:
    """Write a checkpoint of two tensors; the metadata says that one of them, of 4 by 6, has these chunks."""
    state = {"whole": torch.ones(3), "w": torch.arange(24.0).reshape(4, 6)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(dict(state), checkpoint_id=folder)
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written just now
    if chunks is not None:
        held: Any = metadata.state_dict_metadata["w"]
        held.chunks = [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(n)) for at, n in chunks]
    path.write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    ("chunks", "wrong"),
    [
        ([((0, 0), (3, 6))], "6 elements that no chunk holds"),
        ([], "24 elements that no chunk holds"),
        ([((0, 0), (4, 3)), ((2, 3), (2, 3))], "6 elements that no chunk holds"),
        ([((0, 0), (4, 3)), ((1, 2), (3, 4))], "elements that two chunks hold"),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], "elements that two chunks hold"),
        ([((0, 0), (5, 6))], "a chunk outside of it"),
        ([((-1, 0), (4, 6))], "a chunk outside of it"),
        ([((0,), (24,))], "a chunk of other dimensions"),
    ],
)
def test_a_checkpoint_with_holes_is_refused_by_name(
    tmp_path: Path, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], wrong: str
) -> None:
    """The library fills what it finds and leaves the rest as memory happens to be; other tensors can be chosen."""
    folder = written(tmp_path / "theirs", chunks)
    with pytest.raises(InvalidRequest, match=rf": w of shape \(4, 6\) has {wrong}") as caught:
        dcp_files.read(folder, lambda _: True)
    assert caught.value.key == "w"
    found = dcp_files.read(folder, lambda name: name == "whole")
    assert torch.equal(found.tensors["whole"], torch.ones(3))


def test_chunks_that_hold_each_element_once_are_taken() -> None:
    """In any order, of any cut, with empty ones between; scalars and empty tensors too."""
    cut = [((2, 0), (2, 6)), ((0, 3), (2, 3)), ((0, 0), (2, 3)), ((1, 0), (0, 6)), ((4, 0), (0, 6))]

    def wrong(size: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
        chunks = [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(n)) for at, n in boxes]
        made = TensorStorageMetadata(properties=TensorProperties(), size=torch.Size(size), chunks=chunks)
        return dcp_files._not_whole(made)

    assert wrong((4, 6), *cut) == ""
    assert wrong((4, 6), *cut, cut[2]) != ""
    assert wrong((), ((), ())) == ""
    assert wrong((), ((), ()), ((), ())) == "elements that two chunks hold, from () on"
    assert wrong((0, 3), ((0, 0), (0, 3))) == ""
    assert wrong((0, 3)) == ""


def test_an_index_that_names_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    """A file of an older export, say; tied names that only a file's metadata has are there."""
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors", metadata={"format": "pt", "tie": "a"})
    index = tmp_path / safetensors_files.INDEX
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("a", "tie"), "one.safetensors")}))
    found = safetensors_files.read(tmp_path)
    assert (list(found.tensors), found.ties) == (["a"], {"tie": "a"})
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("a", "b", "c"), "one.safetensors")}))
    with pytest.raises(InvalidRequest, match="names 2 tensors that no file holds, the first is b"):
        safetensors_files.read(tmp_path)
    for text in ("5", '{"weight_map": [5]}', '{"weight_map": {"a": 5}}'):
        index.write_text(text)
        with pytest.raises(InvalidRequest, match="is no index of safetensors files"):
            safetensors_files.read(tmp_path)
