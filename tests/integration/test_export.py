"""Export and import: what other libraries read is what `load` gives, and what they wrote comes back into a model."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tomllib
import warnings
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fixtures.two_nodes import TwoNodes
from fixtures.two_rank_root import DTYPES, STEP, Model, TwoRankRoot, raw, same, short
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptd.client import LoadedStep, StoredTensor, load, open_step
from ckptd.client.formats import safetensors_files, torch_file
from ckptd.client.formats.mapped_file import MappedFile
from ckptd.daemon import cli
from ckptd.daemon.cli.exit_codes import ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
FORMATS = ("safetensors", "dcp", "torch")
KNOWN = {"safetensors": frozenset(safetensors_files.CODES), "dcp": torch_file.DTYPES, "torch": torch_file.DTYPES}


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs of this tree, whatever is installed."""
    table = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["entry-points"][cli.GROUP]
    points = [EntryPoint(name, value, cli.GROUP) for name, value in table.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: points if group == cli.GROUP else [])


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """Run `ckptd` with --json and return exit code, what it printed, stderr."""
    code = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


@pytest.fixture(scope="module")
def loaded(two_rank_root: TwoRankRoot) -> LoadedStep:
    """The whole step, as `load` gives it."""
    return load(two_rank_root.url)


def held_by(format_name: str, names: list[str]) -> list[str]:
    """Return the names of "all" whose dtype the format can hold, and every other name."""
    known = {short(dtype) for dtype in KNOWN[format_name]}
    return [name for name in names if not name.startswith("all/") or name.removeprefix("all/") in known]


def only(names: list[str]) -> list[str]:
    """Return the options that choose these names."""
    return [word for name in names for word in ("--only", name)]


def through_the_library(format_name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Read a whole export with the real library, ties as it shows them."""
    if format_name == "torch":
        with zipfile.ZipFile(folder / "model.pt") as archive:
            assert archive.testzip() is None
        found: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
        return found
    if format_name == "safetensors":
        return read_safetensors(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        for name, about in metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            state[name] = torch.zeros(about.size, dtype=about.properties.dtype)
        dcp_load(state, checkpoint_id=folder)
    return state


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read as transformers does: by the index where there is one, file by file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    said = json.loads(index.read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(said["weight_map"].values())):
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert set(held) == {key for key, where in said["weight_map"].items() if where == name}
        found |= held
    assert set(found) == set(said["weight_map"])
    assert said["metadata"]["total_size"] == sum(len(raw(tensor)) for tensor in found.values())
    return found


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_export_read_by_the_library_is_what_load_gives(
    format_name: str,
    two_rank_root: TwoRankRoot,
    loaded: LoadedStep,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every dtype the format can hold, tensors larger than the window, 0-dim, empty, ties as the format has them."""
    names = held_by(format_name, list(loaded))
    out = tmp_path / "out"
    code, report, err = run(
        capsys, "export", two_rank_root.url, "--format", format_name, "--out", out, "--window-mib", 1, *only(names)
    )
    assert (code, err) == (0, "")
    assert (report["step"], report["timeline"]) == (STEP, loaded.timeline)
    assert report["ties"] == {"model/head.weight": "model/embed.weight"}
    assert report["tensors"] == len(names) - 1
    assert report["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = through_the_library(format_name, out)
    expected = set(names) - ({"model/head.weight"} if format_name == "safetensors" else set())
    assert set(found) == expected
    assert [name for name in expected if not same(found[name], loaded[name])] == []
    if format_name == "torch":
        assert found["model/head.weight"].data_ptr() == found["model/embed.weight"].data_ptr()


def test_safetensors_are_cut_into_files_as_transformers_reads_them(
    two_rank_root: TwoRankRoot, loaded: LoadedStep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, index, sizes; a tensor larger than a file has one of its own; ties are noted in the file of their owner."""
    out = tmp_path / "out"
    arguments = ["--format", "safetensors", "--out", out, "--only", "model", "--only", "wide", "--rename", "model/=m."]
    code, report, _ = run(capsys, "export", two_rank_root.url, *arguments, "--max-shard-size", "1.5MB")
    assert code == 0
    cut = sorted(set(report["files"]) - {"model.safetensors.index.json"})
    assert len(cut) >= 3
    assert cut == [f"model-{number:05d}-of-{len(cut):05d}.safetensors" for number in range(1, len(cut) + 1)]
    for name in cut:
        with safe_open(out / name, framework="pt") as file:
            sizes = [len(raw(file.get_tensor(key))) for key in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= 1_500_000 or len(sizes) == 1
    found = read_safetensors(out)
    expected = {
        name.replace("model/", "m."): tensor for name, tensor in loaded.items() if name.startswith(("model/", "wide/"))
    }
    del expected["m.head.weight"]
    assert set(found) == set(expected)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(out / index["m.embed.weight"], framework="pt") as file:
        assert file.metadata() == {"format": "pt", "m.head.weight": "m.embed.weight"}
    # The library itself writes the same bytes for these tensors, but for the order of names within a width.
    one = tmp_path / "one"
    assert (
        run(capsys, "export", two_rank_root.url, "--format", "safetensors", "--out", one, "--only", "model/low")[0] == 0
    )
    save_file({"model/low": loaded["model/low"]}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (one / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_s080_integer_and_bool_buffers_sharded_over_two_ranks_are_exported_as_one(
    two_rank_root: TwoRankRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """int64, bool and uint8 in one file equal the gathered state."""
    out = tmp_path / "out"
    arguments = ["--format", "safetensors", "--out", out, "--only", "buffers", "--strip", "buffers/"]
    assert run(capsys, "export", two_rank_root.url, *arguments)[0] == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    found = read_safetensors(out)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "int64": torch.int64,
        "bool": torch.bool,
        "uint8": torch.uint8,
    }
    for name, tensor in found.items():
        assert same(tensor, two_rank_root.whole[f"buffers/{name}"])


@pytest.mark.parametrize("format_name", FORMATS)
def test_dtypes_that_a_format_cannot_hold_are_refused_by_name(
    format_name: str, two_rank_root: TwoRankRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written, with the count of all."""
    odd = [short(dtype) for dtype in DTYPES if dtype not in KNOWN[format_name]]
    assert odd
    code, _, err = run(capsys, "export", two_rank_root.url, "--format", format_name, "--out", tmp_path / "x")
    assert code == ExitCode.USAGE
    assert f"{format_name} cannot hold {len(odd)} of " in err
    assert f"all/{odd[0]} ({odd[0]})" in err
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_leaves_everything_as_it_was(
    two_rank_root: TwoRankRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full folder, a missing step, a choice of nothing, names that collide, a bad option; bytes that changed on the way."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()

    def refused(*arguments: object, out: Path = tmp_path / "out") -> tuple[int, str]:
        code, printed, err = run(capsys, "export", two_rank_root.url, "--out", out, "--format", *arguments)
        assert printed is None
        return code, err

    assert refused("torch", out=full) == (
        2,
        f"ckptd export: {full} is there and not an empty folder (name a new folder)\n",
    )
    assert refused("torch", out=tmp_path / "a" / "b")[0] == 2
    assert "no step 9" in refused("torch", "--step", 9)[1]
    assert refused("torch", "--step", 9)[0] == ExitCode.NOT_FOUND
    assert "'modell' chooses nothing" in refused("torch", "--only", "modell")[1]
    assert "no chosen name begins with 'm/'" in refused("torch", "--only", "model", "--strip", "m/")[1]
    collision = refused("torch", "--only", "wide/*", "--rename", "wide/rows=wide/columns")
    assert "would both be called 'wide/columns'" in collision[1]
    assert (
        refused("zip")[0] == refused("torch", "--max-shard-size", "big")[0] == refused("torch", "--rename", "x")[0] == 2
    )

    write = MappedFile.write

    def spoiled(self: MappedFile, one: StoredTensor, at: int, offset: tuple[int, ...], data: torch.Tensor) -> None:
        changed = data.clone()
        changed.view(torch.int32)[-1, -1] ^= 1
        write(self, one, at, offset, changed)

    monkeypatch.setattr(MappedFile, "write", spoiled)
    code, err = refused("safetensors", "--only", "wide/rows")
    assert code == ExitCode.UNAVAILABLE
    assert "wide/rows read back from" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    assert [path.name for path in full.iterdir()] == ["mine"]
    assert (
        run(
            capsys,
            "export",
            two_rank_root.url,
            "--format",
            "safetensors",
            "--out",
            tmp_path / "bad",
            "--only",
            "wide/rows",
            "--no-verify",
        )[0]
        == 0
    )


def test_bytes_of_the_step_that_changed_end_an_export_without_a_trace(
    two_rank_root: TwoRankRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 4, with the object's name."""
    folder = tmp_path / "root"
    shutil.copytree(two_rank_root.folder, folder)
    chunk = max(
        (path for path in (folder / "chunks").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    chunk.chmod(0o644)
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\xff")
    code, _, err = run(
        capsys, "export", f"file://{folder}", "--format", "torch", "--only", "wide", "--out", tmp_path / "x"
    )
    assert code == ExitCode.CORRUPT
    assert chunk.name in err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


# ---------------------------------------------------------------- import


def written_by_the_library(format_name: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write a state as a user of the library would, and return what to import."""
    folder.mkdir()
    if format_name == "torch":
        torch.save(state, folder / "theirs.pt")
        return folder / "theirs.pt"
    if format_name == "safetensors":
        apart = {name: tensor.clone() for name, tensor in state.items() if name != "head.weight"}
        save_file(apart, folder / "theirs.safetensors", metadata={"format": "pt", "head.weight": "embed.weight"})
        return folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(dict(state), checkpoint_id=folder)
    return folder


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_import_is_restored_into_a_model_and_exported_again(
    format_name: str, two_nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the library wrote comes back bit for bit, tied where the format knows ties; the next run goes on from it."""
    source, root = Model(7), f"file://{tmp_path}/root"
    state = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    theirs = written_by_the_library(format_name, tmp_path / "theirs", state)
    arguments = ["--job", "job", "--step", 40, "--format", format_name, "--prefix", "model/"]
    code, report, err = run(capsys, "import", theirs, root, *arguments)
    assert (code, err) == (0, "")
    ties = {} if format_name == "dcp" else {"model/head.weight": "model/embed.weight"}
    assert report["ties"] == ties
    assert report["tensors"] == len(state) - len(ties)

    live = Model(8)
    if format_name == "dcp":
        live.head.weight = nn.Parameter(live.head.weight.detach().clone())
    with two_nodes.on(two_nodes.other, tmp_path / "root") as checkpointer:
        checkpointer.track(model=live)
        restored = checkpointer.restore(required=True)
        assert restored is not None
        assert (restored.step, restored.tags) == (40, {"imported": format_name})
        assert all(same(tensor, state[name]) for name, tensor in live.state_dict().items())
        checkpointer.save(41).wait()
    out = tmp_path / "again"
    again = ["export", root, "--step", 40, "--format", format_name, "--out", out, "--strip", "model/"]
    assert run(capsys, *again)[0] == 0
    found = through_the_library(format_name, out)
    assert set(found) == set(state) - ({"head.weight"} if format_name == "safetensors" else set())
    assert all(same(tensor, state[name]) for name, tensor in found.items())


def test_an_import_refuses_a_living_job(
    two_nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is claimed while a run of the job answers; another job's root is refused as well."""
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    root = f"file://{tmp_path}/root"
    arguments = ["--step", 2, "--format", "torch", "--prefix", "model/"]
    with two_nodes.on(two_nodes.first, tmp_path / "root") as checkpointer:
        checkpointer.save(1, {"x": 1}).wait()
        before = sorted(path.name for path in (tmp_path / "root" / "log").rglob("*"))
        code, _, err = run(capsys, "import", tmp_path / "w.pt", root, "--job", "job", *arguments)
        assert (code, "another run of job 'job' is alive" in err) == (ExitCode.UNAVAILABLE, True)
        assert sorted(path.name for path in (tmp_path / "root" / "log").rglob("*")) == before
    code, _, err = run(capsys, "import", tmp_path / "w.pt", root, "--job", "other", *arguments)
    assert (code, "belongs to job 'job'" in err) == (ExitCode.USAGE, True)


class Bomb:
    """Runs code when it is unpickled."""

    fuse: ClassVar[Path]

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.fuse),))


def test_no_code_runs_from_what_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A .pt file and the metadata of a checkpoint that would run code are refused, with nothing run and nothing made."""
    Bomb.fuse = tmp_path / "ran"
    root = f"file://{tmp_path}/root"
    torch.save({"w": torch.ones(3), "x": Bomb()}, tmp_path / "bomb.pt")
    folder = tmp_path / "bomb"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    named = tmp_path / "named"
    named.mkdir()
    metadata = Metadata(state_dict_metadata={}, storage_data={"x": _StorageInfo("../secret", 0, 1)})
    (named / ".metadata").write_bytes(pickle.dumps(metadata))
    pickle.loads(pickle.dumps(Bomb()))  # noqa: S301 - that it would go off
    assert Bomb.fuse.is_dir()
    Bomb.fuse.rmdir()
    for format_name, source, why in (
        ("torch", tmp_path / "bomb.pt", "cannot be read by torch.load(weights_only=True)"),
        ("dcp", folder, "mkdir is none of the records"),
        ("dcp", named, "names ../secret, which is not in the folder"),
        ("safetensors", tmp_path / "bomb.pt", "cannot be read as safetensors"),
        ("safetensors", tmp_path / "nothing", "is not there"),
    ):
        code, _, err = run(
            capsys, "import", source, root, "--job", "j", "--step", 1, "--format", format_name, "--prefix", "model/"
        )
        assert code == ExitCode.USAGE
        assert why in err
    assert not Bomb.fuse.exists()
    assert not (tmp_path / "root").exists()


def test_what_is_no_tensor_is_refused_unless_tensors_are_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nested dicts give names joined by "/"; entries of other kinds are counted and named; a name alone needs a prefix."""
    state = {"model": {"a.w": torch.ones(2), "b": torch.zeros(0)}, "epoch": 3, "args": {"lr": 0.1}}
    torch.save(state, tmp_path / "mixed.pt")
    root = f"file://{tmp_path}/root"
    arguments = ["import", tmp_path / "mixed.pt", root, "--job", "j", "--step", 1, "--format", "torch"]
    code, _, err = run(capsys, *arguments)
    assert (code, "2 entries" in err, "epoch, args/lr" in err) == (ExitCode.USAGE, True, True)
    code, _, err = run(capsys, *arguments, "--only", "modell")
    assert (code, "--only 'modell' chooses nothing" in err) == (ExitCode.USAGE, True)
    code, report, err = run(capsys, *arguments, "--only", "model")
    assert (code, report["tensors"]) == (0, 2)
    # A further step of a job that does not run.
    again = ["import", tmp_path / "mixed.pt", root, "--job", "j", "--step", 9, "--format", "torch", "--only", "model/b"]
    assert run(capsys, *again)[0] == 0
    with open_step(root, 1) as step:
        found = step.read()
        assert same(found["model/a.w"], torch.ones(2))
        assert same(found["model/b"], torch.zeros(0))
        assert list(step.objects) == ["rng"]
    with open_step(root) as step:
        assert (step.step, list(step.tensors)) == (9, ["model/b"])
    torch.save({"w": torch.ones(2)}, tmp_path / "flat.pt")
    code, _, err = run(capsys, "import", tmp_path / "flat.pt", f"{root}-2", *arguments[3:])
    assert (code, "--prefix model/" in err) == (ExitCode.USAGE, True)
