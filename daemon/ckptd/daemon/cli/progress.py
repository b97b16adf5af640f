"""A bar on stderr for verbs that move many bytes.

Owns: the bar, and when there is none. Does not own: counting. Invariant: stdout stays clean, and where stderr is no terminal
nothing is printed at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(label: str, total: int | None = None) -> Iterator[Callable[[int], None] | None]:
    """Show a bar while the block runs.

    Args:
        label: One word beside it.
        total: Bytes in all, where they are known.

    Yields:
        What is told of further bytes, from any thread; None where nobody looks.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
