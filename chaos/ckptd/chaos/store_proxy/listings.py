"""What LIST said last, so that it can be said again when it is no longer true."""

from __future__ import annotations

from collections import OrderedDict

_MOST_BYTES = 64 << 20


class Listings:
    """The last true answer to each LIST, page by page; the oldest go when 64 MiB are full."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._nbytes = 0

    def remember(self, question: str, body: bytes) -> None:
        """Keep an answer in place of the one before."""
        self._nbytes += len(body) - len(self._bodies.pop(question, b""))
        self._bodies[question] = body
        while self._nbytes > _MOST_BYTES:
            _, oldest = self._bodies.popitem(last=False)
            self._nbytes -= len(oldest)

    def last(self, question: str) -> bytes | None:
        """Return the last answer; None when there was none."""
        return self._bodies.get(question)
