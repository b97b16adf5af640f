"""A trial on disk: all that its verdict rests on, so that verdict and pages can be made anew, later and elsewhere.

Owns: the files of the folder `evidence/` of a trial. Does not own: judgement (`judging`). Files:
trial.json (what was done, and how the hurt run went), undisturbed.json, repeat.json and hurt.json (`Evidence`), and
history.jsonl (the hurt run's events in the order they were seen).
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from ckptd.chaos.conductor import Performance
from ckptd.chaos.evidence import Evidence, EvidenceError
from ckptd.chaos.history import History
from ckptd.chaos.plain import from_plain
from ckptd.chaos.scenario import Scenario

FOLDER = "evidence"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One trial: what was done, and what was seen.

    Attributes:
        scenario: What was done.
        nnodes: Number of nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        seed: What decided the open choices.
        command: Script and arguments as given.
        begun: When it began, seconds since the epoch.
        seconds: The whole trial took.
        versions: Of ckptd, Python, torch and the machine.
        network: How the network was to be hurt: auto, netns or proxy.
        problem: Why nothing could be judged; empty if it could.
        replay: The line that runs the same again; empty: `ckptd chaos run` with what is said above.
        unfit: The `fitness.Reason` why the script cannot be judged; empty if it can.
        preset: The preset that the trial is a part of; empty if none.
        cached_at: When the undisturbed runs were done, where they were kept from before (`Undisturbed`); else 0.
        undisturbed: Evidence of the run nobody hurt; None where it did not get through.
        repeat: Evidence of a second one; None where it was run once.
        hurt: Evidence of the other one; None where it was not led to an end.
        performance: How that one went; None as above.
    """

    scenario: Scenario
    nnodes: int
    nproc: int
    store: str
    seed: int
    command: tuple[str, ...]
    begun: float = 0.0
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    network: str = "auto"
    problem: str = ""
    replay: str = ""
    unfit: str = ""
    preset: str = ""
    cached_at: float = 0.0
    undisturbed: Evidence | None = None
    repeat: Evidence | None = None
    hurt: Evidence | None = None
    performance: Performance | None = None


def versions() -> dict[str, str]:
    """Return what ran: versions of ckptd, Python, torch and the system."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("ckptd", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def save_record(record: Record, out: Path) -> None:
    """Write a record into the folder `evidence` of `out`.

    Raises:
        OSError: As the file system says.
    """
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"format": _FORMAT}
    for part in dataclasses.fields(Record):
        if part.name not in ("undisturbed", "repeat", "hurt", "performance"):
            told[part.name] = _plain(getattr(record, part.name))
    if record.performance is not None:
        told["performance"] = {
            part.name: _plain(getattr(record.performance, part.name))
            for part in dataclasses.fields(Performance)
            if part.name != "history"
        }
        (folder / "history.jsonl").write_text(record.performance.history.to_lines(), encoding="utf-8")
    for name in ("undisturbed", "repeat", "hurt"):
        evidence: Evidence | None = getattr(record, name)
        if evidence is not None:
            (folder / f"{name}.json").write_text(evidence.to_json() + "\n", encoding="utf-8")
    (folder / "trial.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def is_trial(out: Path) -> bool:
    """Whether a folder holds the record of a trial."""
    return (out / FOLDER / "trial.json").is_file()


def load_record(out: Path) -> Record:
    """Return the record that `save_record` wrote.

    Raises:
        EvidenceError: Names the file that is missing, damaged or of another version.
    """
    folder = out / FOLDER
    path = folder / "trial.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        _require_format(told.pop("format"))
        performed = told.pop("performance", None)
        record = from_plain(Record, told)
        assert isinstance(record, Record)
        path = folder / "history.jsonl"
        performance = None
        if performed is not None:
            history = History.from_lines(path.read_text(encoding="utf-8"))
            performance = _performance(performed, history)
        evidence: dict[str, Any] = {}
        for name in ("undisturbed", "repeat", "hurt"):
            path = folder / f"{name}.json"
            if path.is_file():
                evidence[name] = Evidence.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EvidenceError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}") from None
    return dataclasses.replace(record, performance=performance, **evidence)


def _require_format(found: object) -> None:
    if found != _FORMAT:
        raise ValueError(f"its format is {found}, not {_FORMAT}: it was written by another version of ckptd")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value


def _performance(told: Mapping[str, Any], history: History) -> Performance:
    kinds = get_type_hints(Performance)
    if strange := sorted(told.keys() - kinds.keys()):
        raise TypeError(f"a performance has no {', '.join(strange)}")
    return Performance(history=history, **{name: from_plain(kinds[name], one) for name, one in told.items()})
