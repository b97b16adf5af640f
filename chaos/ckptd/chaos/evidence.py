"""What a run leaves for comparison: losses, the script's own SHA-256 lists, and the facts of its root.

Owns: reading the script's digest files, and the form in which evidence is cached. Does not own: judgement. The lists
are the script's own work on its live tensors and objects; nothing of ckptd goes into them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptd.chaos.history import History
from ckptd.chaos.plain import from_plain
from ckptd.chaos.root import RootFacts

# The client's warning at the first save, wherever the script's logging puts it.
_AUDIT = re.compile(r"this may be missing from snapshots: (.+)")


class EvidenceError(Exception):
    """Evidence cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestList:
    """SHA-256 of what one rank holds at one moment.

    Attributes:
        step: The step it stands after.
        rank: Whose.
        when: "step" after training it, "restore" after bringing it back.
        loss: Printed loss as hex float, None if the script says none.
        sha256: Digest by name of tensor or object.
    """

    step: int
    rank: int
    when: str
    loss: str | None
    sha256: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Untracked:
    """A thing with state that the script held at its first save and did not track.

    Attributes:
        kind: As `ckptd.client.surroundings` says it: generator, loader, scheduler, scaler, optimizer, model, object.
        name: Variable and the function that holds it.
        type: Name of its class.
    """

    kind: str
    name: str
    type: str

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name} ({self.type})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All of one run.

    Attributes:
        losses: (step, hex float) in the order they were printed, over all launches.
        digests: In the order of the files, rank by rank.
        root: What its root says; None where nobody looked.
        rates: (step, hex float) of learning rates, where the script prints them, in the order of the losses.
        audit: What clients said may be missing from snapshots, each once.
        saves: Steps that rank 0 asked to save, in order, over all launches: they were trained, printed or not.
        tracked: What kind of state each tracked thing is, by name, as rank 0's client says.
        untracked: What the script held besides, as rank 0's client says.
    """

    losses: tuple[tuple[int, str], ...] = ()
    digests: tuple[DigestList, ...] = ()
    root: RootFacts | None = field(default=None)
    rates: tuple[tuple[int, str], ...] = ()
    audit: tuple[str, ...] = ()
    saves: tuple[int, ...] = ()
    tracked: Mapping[str, str] = field(default_factory=dict)
    untracked: tuple[Untracked, ...] = ()

    def last_step(self) -> int | None:
        """Return the highest step printed, or saved."""
        return max((*(step for step, _ in self.losses), *self.saves), default=None)

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """Return the evidence that `to_json` wrote.

        Raises:
            EvidenceError: It was written by another version, or is damaged.
        """
        try:
            told = json.loads(text)
            # An entry without one of these was written by something else.
            evidence = from_plain(cls, {key: told[key] for key in ("losses", "digests", "root")} | told)
            assert isinstance(evidence, cls)
            return evidence
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvidenceError(f"the evidence cannot be read: {error!r}") from None


def losses_of(history: History) -> tuple[tuple[int, str], ...]:
    """Return the losses that the script printed."""
    return tuple(
        (event.step, str(event.fields["loss"]))
        for event in history.of("step", source="script")
        if event.step is not None and "loss" in event.fields
    )


def rates_of(history: History) -> tuple[tuple[int, str], ...]:
    """Return the learning rates that the script printed."""
    return tuple(
        (event.step, str(event.fields["lr"]))
        for event in history.of("step", source="script")
        if event.step is not None and "lr" in event.fields
    )


def saves_of(history: History) -> tuple[int, ...]:
    """Return the steps that rank 0 asked to save."""
    return tuple(
        event.step
        for event in history.of("save_returned", source="client")
        if event.rank == 0 and event.step is not None
    )


def surroundings_of(history: History) -> tuple[dict[str, str], tuple[Untracked, ...]]:
    """Return what rank 0's client said at its first save of what is tracked and what is not."""
    told = next((event for event in history.of("audited", source="client") if event.rank == 0), None)
    if told is None:
        return {}, ()
    tracked = {str(name): str(kind) for name, kind in dict(told.fields.get("tracked", {})).items()}
    untracked = tuple(
        Untracked(kind=str(one.get("kind")), name=str(one.get("name")), type=str(one.get("type")))
        for one in told.fields.get("untracked", [])
    )
    return tracked, untracked


def read_audits(run: Path) -> tuple[str, ...]:
    """Return what the clients of a run complained of in their output: things that may be missing from snapshots."""
    found: dict[str, None] = {}
    for path in sorted(run.glob("launches/*/*.err")):
        for match in _AUDIT.finditer(path.read_text(encoding="utf-8", errors="replace")):
            found[match[1].strip()] = None
    return tuple(found)


def read_digests(prefix: Path) -> tuple[DigestList, ...]:
    """Read the files `prefix`.RANK; none is no error.

    A last line without an end belongs to a rank that died while it wrote, and is left out.

    Raises:
        EvidenceError: Names file and line that cannot be read.
    """
    found: list[DigestList] = []
    for path in sorted(prefix.parent.glob(f"{prefix.name}.*"), key=_rank_of_file):
        found += _parse_lists(path.read_text(encoding="utf-8").split("\n")[:-1], path)
    return tuple(found)


def _rank_of_file(path: Path) -> tuple[int, str]:
    suffix = path.suffix.removeprefix(".")
    return (int(suffix) if suffix.isdigit() else -1, path.name)


def _parse_lists(lines: Iterable[str], path: Path) -> Iterable[DigestList]:
    for number, line in enumerate(lines, start=1):
        try:
            told = json.loads(line)
            yield DigestList(
                step=int(told["step"]),
                rank=int(told["rank"]),
                when=str(told.get("when", "step")),
                loss=told.get("loss"),
                sha256={str(name): str(digest) for name, digest in told["sha256"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvidenceError(f"{path}:{number}: no list of digests: {error!r}") from None
