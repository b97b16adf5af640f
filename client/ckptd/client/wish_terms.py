"""What of a restore can only be told with all ranks' wishes side by side, and what comes back of it.

Pure. Owns: the terms that go with a Want, and reading the bits in its answer. Does not own: joining them (the coordinator),
what is chosen (`selecting`). Invariant: a name has one bit, at its place in the sorted list that every rank of another mesh
is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import WantTerms

from .differences import nothing_fits
from .errors import InvalidRequest
from .patterns import matches
from .restored import Question
from .stored import Stored
from .targets import Targets
from .tree import component


def terms_of(question: Question, stored: Stored, targets: Targets, tracked: AbstractSet[str]) -> WantTerms:
    """Return what goes with this rank's want; everything it wants has been asked for."""
    terms = WantTerms(strict=question.strict)
    texts = [("only", text) for text in question.chosen.only or ()] + [("drop", text) for text in question.drop]
    known = targets.names_known | tracked if texts else tracked
    for argument, text in texts:
        if any(_fits(name, text) for name in known):
            terms.matched.append(text)
        else:
            terms.unmatched.append(nothing_fits(argument, text, known).to_wire())
    if stored.other_mesh:
        names = stored.names
        terms.choice = _digest(question, names)
        terms.unused = np.packbits(np.array(targets.unused(names), dtype=np.bool_)).tobytes()
    return terms


def _fits(name: str, text: str) -> bool:
    # What is tracked may be written as it was given, and as a whole with what ends a beginning.
    return matches(name, text) or name == component(text) or text in (f"{name}/", f"{name}/*")


def _digest(question: Question, names: Sequence[str]) -> bytes:
    chosen = question.chosen
    # Sorted: a set has another order in every process.
    only = None if chosen.only is None else sorted(set(chosen.only))
    here = names if chosen.names is None else list(map(chosen.names, names))
    # One text of lists and quoted strings: unambiguous, and made without a loop over names.
    text = repr((question.strict, only, chosen.cast, sorted(set(question.drop)), list(names), here))
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def unused_by_all(bits: bytes | None, stored: Stored, *, strict: bool, step: int) -> tuple[str, ...]:
    """Return the stored names that no rank asked for, as the agents said; for a step of another mesh.

    Raises:
        InvalidRequest: nobody compared what the ranks want, and that was asked for.
    """
    if bits is None:
        if strict:
            raise InvalidRequest(
                f"step {step} was saved on another mesh, and an agent of an older version cannot tell whether all of it is "
                "asked for",
                reason=error_pb2.REASON_VERSION_MISMATCH,
                hint="update the agents; strict=False takes what fits",
                step=step,
                phase="restore",
            )
        return ()
    names = stored.names
    told = np.unpackbits(np.frombuffer(bits, np.uint8))[: len(names)]
    return tuple(name for name, bit in zip(names, told, strict=True) if bit)
