"""Names of everything under a job's root: built and parsed here and nowhere else.

Owns: the keys, timeline ids and the order of history. Does not own: what the objects hold. Invariants:
`parse_key(str(k)) == k` for every key this module makes, and a key that is not exactly of one of these shapes is
foreign (`None`), so that nothing foreign is ever read as ours or deleted.

Order of history is (timeline, step), a timeline being (number, nonce). Never the step number alone.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TypeAlias

from ckptd.protos.snapshot_pb2 import StepRef

MAX_STEP = 10**12 - 1
"""Largest step: keys give it 12 digits."""
MAX_NUMBER = 10**8 - 1
"""Largest number of a timeline: ids give it 8 digits."""
NONCE_BYTES = 6

JOB = "job.json"
LOG_PREFIX = "log/"
INDEX_PREFIX = "index/"
CHUNKS_PREFIX = "chunks/"
PINS_PREFIX = "pins/"

_TIMELINE = r"(?P<number>[0-9]{8})-(?P<nonce>[0-9a-f]{12})"
_STEP = r"(?P<step>[0-9]{12})"
_DIGEST = r"(?P<digest>[0-9a-f]{64})"
_TIMELINE_ID = re.compile(_TIMELINE)
_STEP_ID = re.compile(rf"{_STEP}\.{_TIMELINE}")
_NODE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLAIM = re.compile(rf"log/{_TIMELINE}\.claim\.json")
_START = re.compile(rf"log/{_TIMELINE}\.start\.json")
_DECISION = re.compile(rf"log/{_TIMELINE}\.{_STEP}\.json")
_INDEX = re.compile(rf"index/{_STEP}\.{_TIMELINE}/(?P<node>[A-Za-z0-9_-]{{1,64}})\.{_DIGEST}\.pb")
_CHUNK = re.compile(rf"chunks/(?P<folder>[0-9a-f]{{2}})/{_DIGEST}\.{_STEP}\.{_TIMELINE}")
_PIN = re.compile(rf"pins/{_STEP}\.{_TIMELINE}(?:\.(?P<name>[A-Za-z0-9_-]{{1,64}}))?")


@dataclass(frozen=True, order=True, slots=True)
class Timeline:
    """A timeline's id: the number it claimed and the nonce of the process that claimed it. Ordered by both."""

    number: int
    nonce: str

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MAX_NUMBER or not re.fullmatch(r"[0-9a-f]{12}", self.nonce):
            raise ValueError(
                f"timeline ({self.number}, {self.nonce!r}): a number of 1 to {MAX_NUMBER} and 12 lowercase hex digits"
            )

    def __str__(self) -> str:
        return f"{self.number:08d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Timeline:
        """Return the timeline of an id.

        Raises:
            ValueError: not "<8 digits>-<12 hex digits>", or number 0.
        """
        match = _TIMELINE_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a timeline id (<8 digits>-<12 lowercase hex digits>)")
        return cls(int(match["number"]), match["nonce"])


@dataclass(frozen=True, order=True, slots=True)
class StepId:
    """A step of one timeline, ordered as history is: by timeline first."""

    timeline: Timeline
    step: int

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"step {self.step} is not in 0..{MAX_STEP}")

    def __str__(self) -> str:
        """Return "<12-digit step>.<timeline>", the form that stands in keys and in an index's sources."""
        return f"{self.step:012d}.{self.timeline}"

    @classmethod
    def parse(cls, text: str) -> StepId:
        """Return the step of "<12-digit step>.<timeline>".

        Raises:
            ValueError: another form.
        """
        match = _STEP_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not <12-digit step>.<timeline id>")
        return _step_id(match)

    @classmethod
    def of(cls, ref: StepRef) -> StepId:
        """Return the step a record's entry names.

        Raises:
            ValueError: its timeline is no id, or its step out of range.
        """
        return cls(Timeline.parse(ref.timeline), ref.step)


@dataclass(frozen=True, slots=True)
class JobKey:
    """job.json."""

    def __str__(self) -> str:
        return JOB


@dataclass(frozen=True, slots=True)
class ClaimKey:
    """The claim of a timeline."""

    timeline: Timeline

    def __str__(self) -> str:
        return f"log/{self.timeline}.claim.json"


@dataclass(frozen=True, slots=True)
class StartKey:
    """The start record of a timeline."""

    timeline: Timeline

    def __str__(self) -> str:
        return f"log/{self.timeline}.start.json"

    @property
    def position(self) -> tuple[Timeline, int]:
        """Place in history: before every step of its timeline."""
        return (self.timeline, -1)


@dataclass(frozen=True, slots=True)
class DecisionKey:
    """The decision of a step: a commit, or an abort marker. Only the content tells which."""

    id: StepId

    def __str__(self) -> str:
        return f"log/{self.id.timeline}.{self.id.step:012d}.json"

    @property
    def timeline(self) -> Timeline:
        """Timeline that decided, which is the step's own."""
        return self.id.timeline

    @property
    def position(self) -> tuple[Timeline, int]:
        """Place in history."""
        return (self.id.timeline, self.id.step)


@dataclass(frozen=True, slots=True)
class IndexKey:
    """A node's index of a step; `digest` is the BLAKE3 (hex) of the stored bytes."""

    id: StepId
    node: str
    digest: str

    def __str__(self) -> str:
        return f"index/{self.id}/{self.node}.{self.digest}.pb"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A chunk that was first written for step `id`; `digest` is the BLAKE3 (hex) of the stored bytes."""

    digest: str
    id: StepId

    def __str__(self) -> str:
        return f"chunks/{self.digest[:2]}/{self.digest}.{self.id}"


@dataclass(frozen=True, slots=True)
class PinKey:
    """A pin somebody asked for: the step stays from the next record on. `name` may be empty."""

    id: StepId
    name: str = ""

    def __str__(self) -> str:
        return f"pins/{self.id}{'.' if self.name else ''}{self.name}"


RecordKey: TypeAlias = StartKey | DecisionKey
Key: TypeAlias = JobKey | ClaimKey | StartKey | DecisionKey | IndexKey | ChunkKey | PinKey


def claim_key(timeline: Timeline) -> str:
    """Return the key of a timeline's claim."""
    return str(ClaimKey(timeline))


def start_key(timeline: Timeline) -> str:
    """Return the key of a timeline's start record."""
    return str(StartKey(timeline))


def decision_key(timeline: Timeline, step: int) -> str:
    """Return the key of a step's decision."""
    return str(DecisionKey(StepId(timeline, step)))


def index_prefix(step: int, timeline: Timeline) -> str:
    """Return the prefix all indexes of a step share."""
    return f"index/{StepId(timeline, step)}/"


def index_key(step: int, timeline: Timeline, node: str, digest_hex: str) -> str:
    """Return the key of a node's index.

    Raises:
        ValueError: the node's name or the digest cannot stand in a key.
    """
    if not is_node(node):
        raise ValueError(f"node {node!r}: 1 to 64 letters, digits, '_' or '-'")
    return str(IndexKey(StepId(timeline, step), node, _checked_digest(digest_hex)))


def chunk_key(digest_hex: str, step: int, timeline: Timeline) -> str:
    """Return the key of a chunk that is written for a step.

    Raises:
        ValueError: the digest is not 64 lowercase hex digits.
    """
    return str(ChunkKey(_checked_digest(digest_hex), StepId(timeline, step)))


def is_node(text: str) -> bool:
    """Whether a node's name can stand in a key."""
    return _NODE.fullmatch(text) is not None


def new_nonce() -> str:
    """Return a fresh nonce. One per coordinator process and claim, kept in memory only (R1)."""
    return secrets.token_hex(NONCE_BYTES)


def parse_key(key: str) -> Key | None:
    """Return what a key names, or None where it is none of ours."""
    if key == JOB:
        return JobKey()
    try:
        if key.startswith(CHUNKS_PREFIX):
            match = _CHUNK.fullmatch(key)
            return (
                ChunkKey(match["digest"], _step_id(match)) if match and match["digest"][:2] == match["folder"] else None
            )
        if key.startswith(INDEX_PREFIX):
            match = _INDEX.fullmatch(key)
            return IndexKey(_step_id(match), match["node"], match["digest"]) if match else None
        if key.startswith(LOG_PREFIX):
            return _parse_log_key(key)
        match = _PIN.fullmatch(key)
        return PinKey(_step_id(match), match["name"] or "") if match else None
    except ValueError:
        return None


def parse_record_key(key: str) -> RecordKey | None:
    """Return the record's key, or None where `key` names no start record or decision."""
    parsed = parse_key(key)
    return parsed if isinstance(parsed, StartKey | DecisionKey) else None


def _parse_log_key(key: str) -> Key | None:
    if match := _DECISION.fullmatch(key):
        return DecisionKey(_step_id(match))
    if match := _CLAIM.fullmatch(key):
        return ClaimKey(_timeline(match))
    if match := _START.fullmatch(key):
        return StartKey(_timeline(match))
    return None


def _timeline(match: re.Match[str]) -> Timeline:
    return Timeline(int(match["number"]), match["nonce"])


def _step_id(match: re.Match[str]) -> StepId:
    return StepId(_timeline(match), int(match["step"]))


def _checked_digest(digest_hex: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest_hex):
        raise ValueError(f"digest {digest_hex!r} is not 64 lowercase hex digits")
    return digest_hex
