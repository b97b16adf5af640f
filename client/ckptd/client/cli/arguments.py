"""What the verbs of this package share: reading roots, formats and sizes as people write them."""

from __future__ import annotations

import re
from typing import get_args
from urllib.parse import quote

import typer

from ckptd.client.exporting import DEFAULT_SHARD_BYTES, Format

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def root_url(text: str) -> str:
    """Return the URL of a root; a plain absolute path is one, as for the other verbs."""
    return f"file://{quote(text)}" if text.startswith("/") else text


def checked_format(text: str) -> Format:
    """Return the format of this name.

    Raises:
        BadParameter: there is none.
    """
    for known in get_args(Format):
        if known == text:
            found: Format = known
            return found
    raise typer.BadParameter(f"format {text!r}: {', '.join(get_args(Format))}")


def size_of(text: str) -> int:
    """Return bytes of a text such as "5GB" (10^9) or "2GiB" (2^30).

    Raises:
        BadParameter: it is no such text.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"size {text!r}: write {DEFAULT_SHARD_BYTES // 10**9}GB, 500MB or 2GiB")
    number, unit, binary = match.groups()
    found = int(float(number) * (1024 if binary else 1000) ** _POWER[unit.upper()])
    if found < 1:
        raise typer.BadParameter(f"size {text!r} is nothing")
    return found
