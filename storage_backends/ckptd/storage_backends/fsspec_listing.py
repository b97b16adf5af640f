"""What an fsspec file system holds below a folder, whole, or an error.

Owns the walk over folders. fsspec's own (`find`, `walk`) leaves out every folder whose listing fails, whatever the reason
and whatever it is told, so that an outage reads as an empty root; it is used for none but the services in `FLAT`. Does not
own keys, or what an error means (`fsspec_errors`). Invariant: what is not in the answer was not there when it was asked for.
"""

from __future__ import annotations

from typing import Any

from .base import RESERVED_FOLDER
from .errors import BucketMissing, StorageError, Unavailable
from .fsspec_errors import is_missing

__all__ = ["FLAT", "UNFIT", "files_below"]

FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"}
"""Protocols whose file system (s3fs, gcsfs, adlfs, fsspec's own) has a `find` of its own: one listing of a service that knows
no folders, asked for anew each time, and whose errors come through. Read in their sources; the others walk."""

UNFIT = {"ftp": "its listings do not tell a folder that is empty from one that could not be read"}
"""Protocols whose `ls` itself answers an error with an empty list, and why that is."""

_LOOKS = 3
_MAX_DEPTH = 64


def files_below(filesystem: Any, root: str, folder: str, *, protocol: str) -> dict[str, int]:
    """Return path and size of every file below a folder; empty where there is no such folder.

    Args:
        filesystem: A synchronous one that keeps no listings.
        root: Path of the root; nothing above it is asked for.
        folder: The root, or a folder below it.
        protocol: Of the URL.

    Raises:
        StorageError: A folder that is there cannot be listed, or an entry cannot be followed.
        BucketMissing: There is no such bucket.
        Exception: Whatever the file system raised.
    """
    if protocol in FLAT:
        filesystem.invalidate_cache()
        try:
            found = filesystem.find(folder, detail=True)
        except Exception as error:
            if not is_missing(error):
                raise
            # A prefix that nobody has used is an empty list there.
            raise BucketMissing("the bucket does not exist") from error
        return {name: int(info["size"]) for name, info in found.items() if info["type"] == "file"}
    files: dict[str, int] = {}
    left = [(folder, 0)]
    while left:
        path, depth = left.pop()
        if depth > _MAX_DEPTH:
            raise StorageError(f"{path} lies more than {_MAX_DEPTH} folders deep")
        for name, info in _entries(filesystem, root, path).items():
            if info["type"] == "directory":
                left.append((name, depth + 1))
            elif info["type"] == "file":
                files[name] = int(info["size"])
            else:
                # Its target may be anywhere, and a folder: neither "nothing there" nor following it would be right.
                raise StorageError(
                    f"{name} is neither a file nor a folder", hint="remove it, or put what it leads to there"
                )
    return files


def _entries(filesystem: Any, root: str, path: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a folder by path; none where there is no such folder.

    "No such folder" counts only where the folder above does not show it either. One that somebody removes while it is
    being listed is no error: what was in it is gone, as it may be from any LIST during which it is deleted. One that goes on to
    be shown and cannot be read is no empty folder.
    """
    for _ in range(_LOOKS):
        filesystem.invalidate_cache()
        try:
            return _by_path(filesystem.ls(path or "/", detail=True), root, path)
        except Exception as error:
            if not is_missing(error):
                raise
            missing = error
        if path == root:
            return {}
        above = _entries(filesystem, root, path.rpartition("/")[0])
        if path not in above or above[path]["type"] == "file":
            return {}
    raise Unavailable(f"the folder {path} is shown by the one above it, and cannot be listed") from missing


def _by_path(entries: list[dict[str, Any]], root: str, path: str) -> dict[str, dict[str, Any]]:
    found = {}
    for info in entries:
        name = info["name"].rstrip("/")
        if name == path:  # some list a file as the one entry of itself
            continue
        if name.rpartition("/")[0] != path:
            raise StorageError(f"the listing of {path} shows {name}, which does not lie in it")
        if name != f"{root}/{RESERVED_FOLDER}":
            found[name] = info
    return found
