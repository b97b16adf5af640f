"""A bar on stderr for verbs that move many bytes; where stderr is no terminal nothing is printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar while the block runs.

    Args:
        label: One word beside it.
        total: Bytes in all.

    Yields:
        What is told of further bytes; None where nobody looks.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
