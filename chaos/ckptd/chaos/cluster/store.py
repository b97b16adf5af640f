"""The store of a run: a local folder, or a SeaweedFS server of its own.

Owns: where roots are and what a process needs to reach them. Invariant: the server ends with the harness, also when
the harness is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ckptd.chaos.seaweed import SeaweedServer, weed_binary

STORES = ("local", "s3")


class Store(Protocol):
    """Where roots are kept."""

    def root(self, name: str) -> str:
        """Return the URL of a root of its own for `name`."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return the variables by which a process reaches the store."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStore:
    """Roots in folders of this machine."""

    folder: Path

    def root(self, name: str) -> str:
        """Return a file:// URL; the folder is made."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path.resolve().as_uri()

    def environment(self) -> Mapping[str, str]:
        """Return nothing: files need no credentials."""
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Store:
    """Roots under prefixes of a bucket."""

    bucket: str
    variables: Mapping[str, str] = field(repr=False)

    def root(self, name: str) -> str:
        """Return an s3:// URL."""
        return f"s3://{self.bucket}/{name}"

    def environment(self) -> Mapping[str, str]:
        """Return endpoint and credentials."""
        return self.variables


def missing_store(kind: str) -> str:
    """Return why the store of `kind` cannot be had on this machine, with the way out; "" where it can. Nothing is started."""
    if kind == "s3":
        try:
            weed_binary()
        except FileNotFoundError as error:
            return f"--store s3 needs a SeaweedFS server: {error}, or say --store local"
    return ""


@contextmanager
def open_store(kind: str, folder: Path) -> Iterator[Store]:
    """Give the store of `kind` ("local" or "s3") for the time of the block; its data is kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "local":
        yield LocalStore(folder=folder)
        return
    with SeaweedServer(folder=folder) as server:
        yield S3Store(bucket=server.bucket, variables=server.env())
