"""What a script may pass to a Checkpointer: checked before anything is sent, with the way out.

Owns: the rules for steps, metrics, tags, names and timeouts. Does not own: settings (`config`), what is tracked (`tracking`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from ckptd.protos import error_pb2
from ckptd.protos.limits import MAX_LABEL_BYTES

from .errors import InvalidRequest
from .state import check_text

STEP_LIMIT = 10**12
"""Steps are below this number."""
_SHOWN_CHARACTERS = 80


def checked_step(step: int) -> int:
    """Return the step as a number.

    Raises:
        InvalidRequest: it is no whole number, or out of range.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < STEP_LIMIT:
        raise InvalidRequest(
            f"step {step!r} is no whole number from 0 to {STEP_LIMIT - 1}", reason=error_pb2.REASON_INVALID_STEP
        )
    return number


def checked_drop(drop: Sequence[str]) -> tuple[str, ...]:
    """Return the names to drop.

    Raises:
        InvalidRequest: they are no sequence of texts.
    """
    if isinstance(drop, str) or not all(isinstance(name, str) for name in drop):
        raise InvalidRequest(f"drop={drop!r} is no sequence of names", hint='e.g. drop=("loader",)')
    return tuple(drop)


def checked_number(name: str, value: float) -> float:
    """Return a metric as a float.

    Raises:
        InvalidRequest: it is no number, or its name cannot be stored.
    """
    check_text(name)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidRequest(f"metrics[{name!r}] is no number that a float can hold", key=name) from None


def checked_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags.

    Raises:
        InvalidRequest: one is no text, or cannot be stored, or together they are too large.
    """
    for name, text in tags.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequest(f"tags[{name!r}] = {text!r} is no text", key=str(name))
        check_text(name)
        check_text(text)
    _check_size("tags", {name: len(name.encode()) + len(text.encode()) for name, text in tags.items()})
    return dict(tags)


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as floats.

    Raises:
        InvalidRequest: one is no number, its name cannot be stored, or together the names are too large.
    """
    values = {str(name): checked_number(str(name), value) for name, value in metrics.items()}
    _check_size("metrics", {name: len(name.encode()) for name in values})
    return values


def _check_size(argument: str, sizes: Mapping[str, int]) -> None:
    """Refuse labels that are too large: they stand in the step's record, and travel to every rank that restores it."""
    total = sum(sizes.values())
    if total <= MAX_LABEL_BYTES:
        return
    largest = max(sizes, key=sizes.__getitem__)
    shown = largest if len(largest) <= _SHOWN_CHARACTERS else largest[:_SHOWN_CHARACTERS] + "…"
    raise InvalidRequest(
        f"{argument}[{shown!r}] has {sizes[largest]} bytes, and all {len(sizes)} {argument} of the step {total}: "
        f"more than the {MAX_LABEL_BYTES} that {argument} of a step may have",
        hint="they are labels to find a step by; what is large can be tracked, and is stored with the state",
        key=shown,
    )


def checked_timeout(timeout: float | None) -> float | None:
    """Return a timeout in seconds, or None.

    Raises:
        InvalidRequest: it is negative, or no number.
    """
    if timeout is None:
        return None
    if not timeout >= 0:
        raise InvalidRequest(f"timeout={timeout!r} is no number of seconds")
    return float(timeout)
