"""What a restore is asked for, and what it gives back.

Owns: the values a caller sees. Does not own: any of the work (`restoring`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .selecting import EVERYTHING, Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep:
    """A step that was found bad and left for an older one.

    Attributes:
        step: The step.
        timeline: The one it was saved in.
        why: One sentence.
    """

    step: int
    timeline: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        step: The step, the same on all ranks.
        timeline: The one it was saved in.
        tier: "memory" when all bytes this node needed were in its agent's slots, else "store".
        metrics: As given to save().
        tags: As given to save().
        fell_back_from: Newer steps that were found bad, newest first.
        missing: With strict=False: what is tracked but not stored; it keeps its value.
        unexpected: With strict=False: what is stored but not tracked.
        left_out: With `only`: what is stored and was not chosen, under the names here.
        bytes_by_tier: Where this node's bytes came from, in bytes.
        dropped: As given to restore(): tracked names that were left as they are.
    """

    step: int
    timeline: str
    tier: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    fell_back_from: tuple[BadStep, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked for; equal on all ranks.

    Attributes:
        step: A step, or None for the newest.
        required: Whether finding nothing is an error.
        on_corrupt: What a bad newest step means.
        strict: Whether names must fit on both sides.
        rollback: Whether history may drop what is newer.
        timeout_s: Seconds.
        chosen: What of it is taken.
        drop: Tracked names that stay as they are.
    """

    step: int | None
    required: bool
    on_corrupt: Literal["fallback", "raise"]
    strict: bool
    rollback: bool
    timeout_s: float
    chosen: Choice = EVERYTHING
    drop: tuple[str, ...] = ()
