"""The console script: exit codes, one line per error, data on stdout alone."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import unquote

import pytest
from fixtures.at_rest import make_claim, put_claim, timeline
from fixtures.roots import RootBuilder

from ckptd.daemon import cli
from ckptd.daemon.keys import decision_key
from ckptd.storage_backends import errors as storage
from ckptd.storage_backends.base import PutMode
from ckptd.storage_backends.local import LocalStore

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs of this tree, whatever is installed."""
    table = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["entry-points"][cli.GROUP]
    points = [EntryPoint(name, value, cli.GROUP) for name, value in table.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: points if group == cli.GROUP else [])


@pytest.fixture
def root(tmp_path: Path) -> RootBuilder:
    """A root on disk with steps 10 and 20."""
    made = RootBuilder(LocalStore(tmp_path / "root [1]?"))
    made.start()
    made.commit(10)
    made.commit(20)
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `ckptd` and return exit code, stdout, stderr."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def url(root: RootBuilder) -> str:
    """Return the root as a plain path."""
    return unquote(root.store.url.removeprefix("file://"))


def test_ls_lists_steps_and_exits_with_0(root: RootBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with tabs where stdout is no terminal; JSON on demand; nothing on stderr."""
    root.upload(30, ["node-a"])
    code, out, err = run(capsys, "ls", url(root))
    assert (code, err) == (0, "")
    assert [line.split("\t")[::2] for line in out.splitlines()] == [
        ["STEP", "STATE"],
        ["10", "committed"],
        ["20", "committed"],
        ["30", "incomplete"],
    ]
    assert "rank 1" in out
    code, out, _ = run(capsys, "ls", url(root), "--json", "--long")
    found = json.loads(out)
    assert (found["job"], found["latest"]["step"], found["provisional"]) == ("play", 20, False)
    assert found["steps"][0]["bytes"] > 0
    assert found["steps"][2]["ranks"] == [1]


def test_a_provisional_answer_says_so_on_stderr(root: RootBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: the data is printed, the doubt is said beside it."""
    put_claim(root.store, make_claim(timeline(2)))
    code, out, err = run(capsys, "ls", url(root))
    assert code == 0
    assert "20\t" in out
    assert "provisional" in err


def test_show_exits_by_state(root: RootBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    """0 committed (the latest without a step), 3 incomplete, 4 quarantined, 5 not there."""
    root.quarantine(20)
    root.start(2)
    root.commit(30)
    root.upload(40, ["node-b"])
    code, out, _ = run(capsys, "show", url(root))
    assert code == 0
    assert "30 (latest)" in out
    assert "state digest" in out
    assert run(capsys, "show", url(root), 10)[0] == 0
    code, out, _ = run(capsys, "show", url(root), 40)
    assert (code, "rank 0" in out) == (3, True)
    code, out, _ = run(capsys, "show", url(root), 20, "--json")
    assert code == 4
    assert json.loads(out)["committed"]["state_digest"]
    code, out, err = run(capsys, "show", url(root), 50)
    assert (code, out) == (5, "")
    assert "no step 50 (committed steps: 10, 30)" in err


def test_s003_verify_tells_good_incomplete_corrupt_and_not_found_apart(
    root: RootBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    """0, 3, 4 and 5; the object that is bad or missing is named."""
    root.upload(30, ["node-a"])
    root.upload(35)
    code, out, _ = run(capsys, "verify", url(root), 10)
    assert (code, "good" in out) == (0, True)
    code, out, _ = run(capsys, "verify", url(root), 30)
    assert (code, "incomplete" in out, "rank 1" in out) == (3, True, True)
    code, out, _ = run(capsys, "verify", url(root), 35)
    assert (code, "uncommitted" in out, "no record lists it" in out) == (3, True, True)
    assert run(capsys, "verify", url(root), 99)[0] == 5
    chunk = root.chunks(20)[1]
    root.store.delete(chunk)
    code, out, _ = run(capsys, "verify", url(root))
    assert (code, f"{chunk}: missing" in out) == (4, True)
    code, out, _ = run(capsys, "verify", url(root), "--all", "--json")
    assert code == 4
    verdicts = {
        step["step"]: (step["verdict"], [bad["key"] for bad in step["bad"]]) for step in json.loads(out)["steps"]
    }
    assert verdicts == {10: ("good", []), 20: ("corrupt", [chunk])}


def test_sweep_deletes_and_says_what(root: RootBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints the keys; the run deletes them; a restart under way stops it with 6; a lost index with 4."""
    made = root.commit(30, keep_last=1)
    code, out, _ = run(capsys, "sweep", url(root), "--dry-run")
    planned = out.splitlines()
    assert code == 0
    assert decision_key(timeline(1), 20) in planned
    code, out, _ = run(capsys, "sweep", url(root), "--json")
    assert (code, sorted(json.loads(out)["deleted"])) == (0, sorted(planned))
    assert run(capsys, "verify", url(root), "--all")[0] == 0
    put_claim(root.store, make_claim(timeline(2)))
    code, _, err = run(capsys, "sweep", url(root))
    assert (code, "was claimed after the newest record" in err) == (6, True)
    root.start(3)
    root.store.delete(made.indexes[0].key)
    code, _, err = run(capsys, "sweep", url(root))
    assert (code, "nothing was deleted" in err) == (4, True)


def test_copy_diff_and_drop_end_as_documented(
    root: RootBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy 0, and 2 on a target that holds something else; diff 0, 9 and 5; drop 0, 2 and 5; retain asks for its rule."""
    target = tmp_path / "copy"
    assert run(capsys, "copy", url(root), 20, target)[0] == 0
    assert run(capsys, "verify", target)[0] == 0
    code, _, err = run(capsys, "copy", url(root), 10, target)
    assert (code, "copy into an empty root" in err) == (2, True)
    assert run(capsys, "copy", url(root), 99, tmp_path / "none")[0] == 5
    assert not (tmp_path / "none").exists()
    assert run(capsys, "diff", f"{url(root)}@20", target, "--json")[0] == 0
    code, out, _ = run(capsys, "diff", url(root), 10, url(root), 20, "--bitwise")
    assert (code, out.splitlines()[0]) == (9, "different: 1 of 2 tensors and 0 of 1 objects are equal")
    assert run(capsys, "diff", url(root), f"{target}@10")[0] == 5
    assert run(capsys, "diff", url(root))[0] == 2
    assert run(capsys, "drop", url(root), 20)[0] == 2
    assert run(capsys, "drop", url(root), 99)[0] == 5
    assert run(capsys, "drop", url(root), 10)[0] == 0
    assert run(capsys, "retain", url(root))[0] == 2
    assert run(capsys, "retain", url(root), "--keep-last", 1)[0] == 0
    assert run(capsys, "sweep", url(root), "--claim", "--dry-run")[0] == 2
    assert run(capsys, "show", url(root), "--tensors")[1].startswith("TENSOR\tDTYPE")


def test_a_damaged_newest_record_is_corrupt(root: RootBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 4 with the key; older records are not used instead."""
    key = decision_key(timeline(1), 20)
    root.store.put(key, b"", mode=PutMode.OVERWRITE)
    for verb in ("ls", "show", "verify", "sweep"):
        code, out, err = run(capsys, verb, url(root))
        assert (code, out, key in err) == (4, "", True)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "Usage: ckptd VERB"),
        (["lss"], 2, "did you mean `ckptd ls`?"),
        (["nothing-like-it"], 2, "see `ckptd --help`"),
        (["ls"], 2, "ROOT"),
        (["ls", "relative"], 2, "is a relative path"),
        (["ls", "s4://bucket/x"], 2, "did you mean s3://?"),
        (["ls", "/", "--driver", "tape"], 2, "auto, obstore or fsspec"),
        (["ls", "/x", "--unknown"], 2, "--unknown"),
        (["show", "/x", "ten"], 2, "STEP"),
        (["show", "/x", "-1"], 2, "-1"),
        (["verify", "/x", "1", "--all"], 2, "not both"),
        (["verify", "/x", "--readers", "0"], 2, "readers"),
        (["ls", "/no/such/root"], 5, "holds no job"),
        (["verify", "/no/such/root"], 5, "holds no job"),
        (["sweep", "/no/such/root"], 5, "holds no job"),
    ],
)
def test_errors_are_one_line_and_a_code(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What, where and the way out, on stderr; nothing on stdout."""
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert text in err
    assert not arguments or len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (storage.PermissionDenied("refused", key="log/x", url="s3://b"), 6),
        (storage.Unavailable("timed out"), 6),
        (storage.ClockSkew("clock"), 6),
        (storage.BucketMissing("no such bucket"), 5),
        (storage.InvalidUrl("bad"), 2),
        (storage.OutcomeUnknown("lost"), 8),
        (RuntimeError("a bug"), 1),
    ],
)
def test_the_stores_conditions_have_codes(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials and outages end in 6 with the hint, a missing bucket in 5, a bug in 1 with its traceback."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ckptd.daemon.cli.root.open_store", refuse)
    found, out, err = run(capsys, "ls", "/x")
    assert (found, out) == (code, "")
    assert err.splitlines()[-1].startswith("ckptd ls: ")
    assert (len(err.splitlines()) == 1) is (code != 1)


def test_help_names_every_verb_without_loading_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckptd --help` shows a line for each verb and imports none of them."""
    for name in [name for name in sys.modules if name.startswith("ckptd.daemon.cli.list_steps")]:
        monkeypatch.delitem(sys.modules, name)
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("ls", "show", "verify", "sweep"):
        assert f"\n  {verb} " in out
    assert "list the steps of a root" in out
    assert "ckptd.daemon.cli.list_steps" not in sys.modules


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`ckptd --version` prints it."""
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("ckptd ")
