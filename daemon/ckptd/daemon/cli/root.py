"""What the verbs that read a root share: opening it, and printing what they found.

Owns: the arguments' types, the retry policy of a person who waits, tables and JSON. Does not own: what is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.retrying import RetryPolicy
from ckptd.storage_backends.urls import open_store

Root: TypeAlias = Annotated[
    str, typer.Argument(metavar="ROOT", help="The job's root URL, e.g. s3://bucket/runs/llama.")
]
Step: TypeAlias = Annotated[int | None, typer.Argument(metavar="[STEP]", help="A step's number; the latest otherwise.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Driver: TypeAlias = Annotated[str, typer.Option(help="Store driver: auto, obstore or fsspec.")]

# Somebody sits and waits: say what is wrong after seconds, not after minutes as a running job would.
_RETRY = RetryPolicy(attempts=6, deadline=timedelta(seconds=20), longest_pause=timedelta(seconds=4))


@contextmanager
def opened(root: str, driver: str) -> Iterator[ObjectStore]:
    """Open a root's store and close it at the end.

    Raises:
        BadParameter: the driver's name is unknown.
        StorageError: InvalidUrl.
    """
    if driver not in {"auto", "obstore", "fsspec"}:
        raise typer.BadParameter(f"driver {driver!r}: auto, obstore or fsspec")
    with open_store(root, driver=driver, retry=_RETRY) as store:  # type: ignore[arg-type]
        yield store


def print_json(value: object) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: for eyes on a terminal, else one line a row with tabs between."""
    if not sys.stdout.isatty():
        for row in [[column.upper() for column in columns], *rows]:
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in {"step", "bytes", "new"} else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def note(text: str) -> None:
    """Say something that is no data."""
    typer.echo(text, err=True)


def size_text(nbytes: int) -> str:
    """Return bytes for people: "1.5 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
