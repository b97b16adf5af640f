"""What every driver must do, as checks that a driver's test file runs on a fresh, empty root.

Owns the executable half of the contract in ``base``. A test file needs a fixture that opens an
empty root, and:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_driver_keeps_the_contract(check, store):
        check(store)

Invariant: a check uses nothing but the contract, so that a new driver is judged by the same
words as the old ones. Each is a public function whose docstring is the property.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .base import PutMode
from .errors import AlreadyExists, InvalidKey, NotFound, StorageError, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import ObjectStore

__all__ = ["CHECKS", "ODD_KEYS", "REFUSED_KEYS", "ConformanceError"]

_RACERS = 8
_RACES = 3
# How long the racers wait for one another at the start.
_BARRIER_S = 30.0

ODD_KEYS = (
    "plain",
    "folder/with space/and  two",
    " lead and trail ",
    "hash#question?star*",
    "brackets[0]{1}(2)",
    "percent%20encoded%2Fslash%",
    "plus+and&equals=",
    "quote'double\"back`",
    "colon:semi;comma,pipe|",
    "less<greater>caret^tilde~at@",
    "dots.../..hidden/.x",
    "accent-é-\u0065\u0301-☃-🧊",
    "00000003-9f2ca1.000000001200.json",
    "segment/" + "s" * 255,
    "deep/" * 20 + "end",
)
"""Allowed keys that careless drivers lose, change or refuse."""

REFUSED_KEYS = (
    "",
    "/absolute",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "a//b",
    "a/",
    "new\nline",
    "nul\0",
    "del\x7f",
    "back\\slash",
    "lone\ud800surrogate",
    "s" * 256,
    "long/" * 180 + "x",
    ".ckptd-tmp/x",
)
"""Keys that every driver refuses with InvalidKey before it sends anything."""


class ConformanceError(AssertionError):
    """A driver breaks the contract."""


def put_then_get_gives_the_bytes(store: ObjectStore) -> None:
    """What was put is what get, get_into and head give, whatever kind of buffer it came from."""
    for kind in (bytes, bytearray, memoryview):
        key = f"kinds/{kind.__name__}"
        store.put(key, kind(b"some bytes"))
        _equal(store.get(key), b"some bytes", key)
        _equal(store.head(key).size, 10, key)
        _equal(store.head(key).key, key, key)
        _equal(_read(store, key, 10), b"some bytes", key)


def a_part_of_a_larger_buffer_can_be_put(store: ObjectStore) -> None:
    """A slice of a memoryview, of any item type, is put as exactly its bytes."""
    whole = memoryview(bytearray(range(256)))
    store.put("slice", whole[16:48])
    _equal(store.get("slice"), bytes(range(16, 48)), "slice")
    store.put("words", whole.cast("Q")[1:3])
    _equal(store.get("words"), bytes(range(8, 24)), "words")


def empty_objects_exist(store: ObjectStore) -> None:
    """An object of no bytes is an object."""
    store.put("empty", b"")
    _equal(store.get("empty"), b"", "empty")
    _equal(store.head("empty").size, 0, "empty")
    _equal(_keys(store), ["empty"], "list")
    store.get_into("empty", memoryview(bytearray()))


def large_objects_come_back_whole(store: ObjectStore) -> None:
    """5 MiB, and 33 MiB that a driver may read in several pieces, come back bit for bit."""
    for mebibytes in (5, 33):
        pattern = bytes(range(251)) * ((mebibytes << 20) // 251 + 1)
        data = memoryview(pattern)[: mebibytes << 20]
        key = f"large/{mebibytes}"
        store.put(key, data)
        _require(_read(store, key, len(data)) == data, f"{key} differs")
        odd = (mebibytes << 20) - 4099
        _require(_read(store, key, odd, offset=4099) == data[4099:], f"{key} differs from an odd offset")


def ranges_are_exact(store: ObjectStore) -> None:
    """get_into fills exactly the buffer, from exactly the offset."""
    data = bytes(range(100))
    store.put("ranged", data)
    for offset, length in ((0, 100), (0, 1), (99, 1), (10, 50), (50, 50)):
        _equal(
            _read(store, "ranged", length, offset=offset),
            data[offset : offset + length],
            f"{offset}+{length}",
        )
    store.get_into("ranged", memoryview(bytearray()), offset=100)


def reading_beyond_the_end_is_truncated(store: ObjectStore) -> None:
    """A buffer that reaches past the object's end raises Truncated, never a short read."""
    store.put("short", b"0123456789")
    for offset, length in ((0, 11), (9, 2), (10, 1), (20, 5), (11, 0)):
        _raises(Truncated, lambda at=offset, n=length: _read(store, "short", n, offset=at))  # type: ignore[misc]
    store.put("none", b"")
    _raises(Truncated, lambda: _read(store, "none", 1))


def missing_objects_are_not_found(store: ObjectStore) -> None:
    """get, get_into and head of a key without an object raise NotFound; a folder is no object."""
    store.put("folder/object", b"x")
    for key in ("missing", "folder/missing", "folder", "no/such/folder", "folder/object/below"):
        _raises(NotFound, lambda key=key: store.get(key))  # type: ignore[misc]
        _raises(NotFound, lambda key=key: store.head(key))  # type: ignore[misc]
        _raises(NotFound, lambda key=key: _read(store, key, 1))  # type: ignore[misc]
        _raises(NotFound, lambda key=key: _read(store, key, 0))  # type: ignore[misc]


def create_refuses_what_is_there(store: ObjectStore) -> None:
    """A CREATE put on an existing object raises AlreadyExists and leaves it as it was."""
    store.put("once", b"first")
    if not store.capabilities.put_if_absent:
        return
    for data in (b"second", b"first"):
        _raises(AlreadyExists, lambda data=data: store.put("once", data))  # type: ignore[misc]
    _equal(store.get("once"), b"first", "once")
    store.delete("once")
    store.put("once", b"third")
    _equal(store.get("once"), b"third", "once")


def a_create_race_has_one_winner(store: ObjectStore) -> None:
    """Of 8 threads that CREATE one key at once, one succeeds and 7 get AlreadyExists."""
    if not store.capabilities.put_if_absent:
        return
    with ThreadPoolExecutor(_RACERS) as pool:
        for race in range(_RACES):
            key = f"race/{race}"
            start = threading.Barrier(_RACERS)

            def racer(number: int, key: str = key, start: threading.Barrier = start) -> bool:
                start.wait(_BARRIER_S)
                try:
                    store.put(key, str(number).encode() * 1000)
                except AlreadyExists:
                    return False
                return True

            winners = [number for number, won in enumerate(pool.map(racer, range(_RACERS))) if won]
            _equal(len(winners), 1, f"winners of {key}")
            _equal(store.get(key), str(winners[0]).encode() * 1000, key)


def overwrite_replaces(store: ObjectStore) -> None:
    """An OVERWRITE put makes or replaces the object; the next get, head and list see it."""
    for data in (b"one", b"three four", b""):
        store.put("again", data, mode=PutMode.OVERWRITE)
        _equal(store.get("again"), data, "again")
        _equal([(info.key, info.size) for info in store.list()], [("again", len(data))], "list")


def list_shows_each_put_and_delete_at_once(store: ObjectStore) -> None:
    """LIST shows every finished put and no finished delete, time after time."""
    for number in range(10):
        store.put(f"seen/{number}", b"x" * number)
        _equal(_keys(store, "seen/"), [f"seen/{n}" for n in range(number + 1)], "after put")
    for number in range(10):
        store.delete(f"seen/{number}")
        _equal(_keys(store, "seen/"), [f"seen/{n}" for n in range(number + 1, 10)], "after delete")


def list_prefixes_are_strings(store: ObjectStore) -> None:
    """A prefix is a string, not a folder; keys come sorted, with sizes, and no folders."""
    keys = ["log/03-a/x", "log/03-a.json", "log/1", "logs", "lo", "m/log/1"]
    for key in keys:
        store.put(key, key.encode())
    for prefix in ("", "l", "log", "log/", "log/0", "log/03", "log/03-a", "log/03-a/", "m", "none", "none/"):
        wanted = sorted(key for key in keys if key.startswith(prefix))
        _equal([(i.key, i.size) for i in store.list(prefix)], [(k, len(k)) for k in wanted], repr(prefix))
    for prefix in ("/", "a//b", "../a", "..", "a/../"):
        _raises(InvalidKey, lambda prefix=prefix: list(store.list(prefix)))  # type: ignore[misc]


def an_empty_root_lists_nothing(store: ObjectStore) -> None:
    """A root that nothing was put into is empty, not an error."""
    _equal(_keys(store), [], "list")
    _equal(_keys(store, "log/"), [], "list of a folder")
    store.delete("never/there")


def delete_is_idempotent(store: ObjectStore) -> None:
    """Deleting takes exactly one object away, and deleting nothing is no error."""
    store.put("tree/a", b"a")
    store.put("tree/b", b"b")
    for _ in range(2):
        store.delete("tree/a")
        _equal(_keys(store), ["tree/b"], "list")
    store.delete("tree")
    store.delete("missing/folder/x")
    _equal(store.get("tree/b"), b"b", "tree/b")
    _raises(NotFound, lambda: store.get("tree/a"))


def odd_keys_are_kept(store: ObjectStore) -> None:
    """Spaces, brackets, percent signs, quotes and any Unicode in a key come back as they went in."""
    for number, key in enumerate(ODD_KEYS):
        store.put(key, str(number).encode())
    _equal(_keys(store), sorted(ODD_KEYS), "list")
    for number, key in enumerate(ODD_KEYS):
        _equal(store.get(key), str(number).encode(), key)
        _equal(store.head(key).size, len(str(number)), key)
    for key in ODD_KEYS:
        store.delete(key)
    _equal(_keys(store), [], "list after deletes")


def refused_keys_are_refused_everywhere(store: ObjectStore) -> None:
    """Keys that lead out of the root or that some store cannot hold raise InvalidKey in every method."""
    buffer = memoryview(bytearray(1))
    for key in REFUSED_KEYS:
        calls: tuple[Callable[[], object], ...] = (
            lambda key=key: store.put(key, b"x"),  # type: ignore[misc]
            lambda key=key: store.get(key),  # type: ignore[misc]
            lambda key=key: store.get_into(key, buffer),  # type: ignore[misc]
            lambda key=key: store.head(key),  # type: ignore[misc]
            lambda key=key: store.delete(key),  # type: ignore[misc]
        )
        for call in calls:
            _raises(InvalidKey, call)
    _equal(_keys(store), [], "list")


def threads_do_not_disturb_one_another(store: ObjectStore) -> None:
    """8 threads that put, list, read and delete their own keys see exactly their own objects."""

    def worker(number: int) -> None:
        for turn in range(6):
            key = f"worker/{number}/{turn % 2}"
            data = bytes([number, turn]) * 5000
            store.put(key, data)
            _equal(_keys(store, f"worker/{number}/"), [key], "list")
            _equal(_read(store, key, len(data)), data, key)
            store.delete(key)

    with ThreadPoolExecutor(_RACERS) as pool:
        list(pool.map(worker, range(_RACERS)))
    _equal(_keys(store), [], "list")


def readers_see_whole_objects_only(store: ObjectStore) -> None:
    """While one thread overwrites, readers get the old object or the new one, never a mixture."""
    size = 64 << 10
    store.put("torn", bytes([0]) * size)
    stop = threading.Event()

    def reader() -> int:
        turns = 0
        while not stop.is_set() or turns == 0:
            data = store.get("torn")
            _require(data == bytes([data[0]]) * size, "a reader saw a mixture")
            turns += 1
        return turns

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(reader) for _ in range(2)]
        try:
            for turn in range(1, 11):
                store.put("torn", bytes([turn]) * size, mode=PutMode.OVERWRITE)
        finally:
            stop.set()
        for future in readers:
            future.result()


CHECKS: tuple[Callable[[ObjectStore], None], ...] = (
    put_then_get_gives_the_bytes,
    a_part_of_a_larger_buffer_can_be_put,
    empty_objects_exist,
    large_objects_come_back_whole,
    ranges_are_exact,
    reading_beyond_the_end_is_truncated,
    missing_objects_are_not_found,
    create_refuses_what_is_there,
    a_create_race_has_one_winner,
    overwrite_replaces,
    list_shows_each_put_and_delete_at_once,
    list_prefixes_are_strings,
    an_empty_root_lists_nothing,
    delete_is_idempotent,
    odd_keys_are_kept,
    refused_keys_are_refused_everywhere,
    threads_do_not_disturb_one_another,
    readers_see_whole_objects_only,
)
"""Every check; each wants a root of its own that is empty."""


def _keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def _read(store: ObjectStore, key: str, length: int, *, offset: int = 0) -> bytearray:
    buffer = bytearray(length)
    store.get_into(key, memoryview(buffer), offset=offset)
    return buffer


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ConformanceError(complaint)


def _equal(got: object, wanted: object, where: str) -> None:
    if got != wanted:
        raise ConformanceError(f"{where}: got {str(got)[:200]}, wanted {str(wanted)[:200]}")


def _raises(condition: type[StorageError], call: Callable[[], object]) -> None:
    try:
        result = call()
    except condition:
        return
    except StorageError as error:
        raise ConformanceError(f"wanted {condition.__name__}, got {type(error).__name__}: {error}") from error
    raise ConformanceError(f"wanted {condition.__name__}, got {str(result)[:200]}")
