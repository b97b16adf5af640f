"""Ends a command in order when a signal asks for it: what it started ends, and what it knows so far is told.

Owns: which signals, and what they raise. Does not own: what is ended (whoever started it does that on its way out), nor
what is told. For the main thread.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class SignalledError(KeyboardInterrupt):
    """The command is to end.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The command's exit status, as shells write it."""
        return 128 + self.number


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Turn the first signal to end into SignalledError; a second one ends the harness at once, and all it started with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_DFL)
        raise SignalledError(number)

    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def broken_off(by: KeyboardInterrupt) -> str:
    """Return in words what ended a trial before its end."""
    number = by.number if isinstance(by, SignalledError) else signal.SIGINT
    return f"broken off by {signal.Signals(number).name} before its end"
