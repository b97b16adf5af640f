"""The rows of many layouts as arrays: which rows are one box, and whether the boxes of each tensor tile it.

Owns: the arithmetic that planning does with millions of rows at once. Does not own: messages about what is wrong: it
says `None` whenever anything is out of the ordinary, and its callers then go through the rows one by one. Pure.
Invariant: boxes are grouped by equality; hashes only bring equal ones together and are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptd.protos import shard_table
from ckptd.protos.snapshot_pb2 import SCOPE_GLOBAL, SCOPE_PER_RANK, ShardTable

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MOST = 1 << 53
"""Sums and products are looked at as doubles first; beyond this they may not be exact."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Rows of all ranks, ascending, each rank's in order.

    Attributes:
        names: Distinct names.
        dtypes: Distinct dtypes.
        begins: Rank: its first row; one more entry for the end.
        rank: Row: position of its rank among the ranks, ascending.
        name: Row: position in names.
        dtype: Row: position in dtypes.
        ndim: Row: number of dimensions.
        scope: Row.
        nbytes: Row.
        shape: One row a dimension, zeros beyond the row's own: shape of the global tensor.
        offset: As shape: where the box begins.
        length: As shape: how long it is.
    """

    names: list[str]
    dtypes: list[str]
    begins: Ints
    rank: Ints
    name: Ints
    dtype: Ints
    ndim: Ints
    scope: Ints
    nbytes: Ints
    shape: Ints
    offset: Ints
    length: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """Rows by box: those of one name with equal offsets and lengths.

    Attributes:
        order: Rows, those of one box together, in ascending order of rank.
        begins: Box: its first place in order; one more entry for the end.
        head: Box: its first row.
        box: Row: its box.
    """

    order: Ints
    begins: Ints
    head: Ints
    box: Ints


def columns_of(layouts: Mapping[int, ShardTable]) -> Columns | None:
    """Return the rows of all layouts, or None where numbers are too large for this arithmetic.

    Raises:
        ValueError: the columns of a table do not fit together.
    """
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    parts: dict[str, list[npt.NDArray[np.uint64]]] = {
        column: [] for column in ("ndim", "scope", "nbytes", "global_shape", "box_offset", "box_length")
    }
    name: list[Ints] = []
    dtype: list[Ints] = []
    texts: list[str] | None = None
    own: Ints = np.zeros(0, dtype=np.int64)
    for rank in sorted(layouts):
        table = layouts[rank]
        shard_table.check(table)
        if texts is None or texts != list(table.names):  # ranks that hold parts of the same tensors name them alike
            texts = list(table.names)
            own = np.array([names.setdefault(text, len(names)) for text in texts], dtype=np.int64)
        kinds = np.array([dtypes.setdefault(text, len(dtypes)) for text in table.dtypes], dtype=np.int64)
        name.append(own[np.asarray(table.name, dtype=np.int64)])
        dtype.append(kinds[np.asarray(table.dtype, dtype=np.int64)])
        for column, found in parts.items():
            found.append(np.asarray(getattr(table, column), dtype=np.uint64))
    if not name:
        return None
    counts = np.array([len(rows) for rows in name], dtype=np.int64)
    flat = {column: np.concatenate(found) for column, found in parts.items()}
    if any(len(values) and int(values.max()) >= _MOST for values in flat.values()):
        return None
    flat_ints = {column: values.astype(np.int64) for column, values in flat.items()}
    ndim = flat_ints["ndim"]
    if not len(ndim):
        return None
    # Entry i of a row stands in its column, at i of the widest row's dimensions.
    starts = np.cumsum(ndim) - ndim
    within = np.arange(int(ndim.sum())) - np.repeat(starts, ndim)
    at = (within, np.repeat(np.arange(len(ndim)), ndim))
    wide: dict[str, Ints] = {}
    for column in ("global_shape", "box_offset", "box_length"):
        wide[column] = np.zeros((int(ndim.max()), len(ndim)), dtype=np.int64)
        wide[column][at] = flat_ints[column]
    return Columns(
        names=list(names),
        dtypes=list(dtypes),
        begins=np.concatenate([[0], np.cumsum(counts)]),
        rank=np.repeat(np.arange(len(counts)), counts),
        name=np.concatenate(name),
        dtype=np.concatenate(dtype),
        ndim=ndim,
        scope=flat_ints["scope"],
        nbytes=flat_ints["nbytes"],
        shape=wide["global_shape"],
        offset=wide["box_offset"],
        length=wide["box_length"],
    )


def boxes_of(rows: Columns) -> Boxes | None:
    """Return the rows by box, or None where a rank holds a box twice, or the rows of one tensor do not fit together."""
    key = _mixed(rows)
    order = np.argsort(key, kind="stable")
    ahead, behind = order[1:], order[:-1]
    opens = np.concatenate([[True], key[ahead] != key[behind]])
    ahead, behind = ahead[~opens[1:]], behind[~opens[1:]]
    same = (rows.name[ahead] == rows.name[behind]) & (rows.ndim[ahead] == rows.ndim[behind])
    same &= rows.rank[ahead] != rows.rank[behind]
    same &= (rows.nbytes[ahead] == rows.nbytes[behind]) & (rows.scope[ahead] == rows.scope[behind])
    same &= (rows.offset[:, ahead] == rows.offset[:, behind]).all(axis=0)
    same &= (rows.length[:, ahead] == rows.length[:, behind]).all(axis=0)
    if not same.all() or not _is_consistent(rows):
        return None
    begins = np.flatnonzero(opens)
    box = np.empty(len(order), dtype=np.int64)
    box[order] = np.cumsum(opens) - 1
    return Boxes(order=order, begins=np.concatenate([begins, [len(order)]]), head=order[begins], box=box)


def untiled(rows: Columns, heads: Ints) -> list[int] | None:
    """Return the names whose boxes are not cells of one grid, so have to be looked at one by one.

    Args:
        rows: All rows.
        heads: One row per box, of global tensors.

    Returns:
        None where the boxes of a tensor leave it, or are not as large together as the tensor.
    """
    # In the order of the rows the cuts of a tensor ascend, most often, and memory is gone through from end to end.
    is_head = np.zeros(len(rows.name), dtype=np.bool_)
    is_head[heads] = True
    heads = np.flatnonzero(is_head)
    shape, offset, length = rows.shape[:, heads], rows.offset[:, heads], rows.length[:, heads]
    if (offset + length > shape).any():
        return None
    # A dimension that the tensor does not have counts as one.
    beyond = np.arange(len(shape))[:, None] >= rows.ndim[heads][None, :]
    sizes = np.where(beyond, 1, shape), np.where(beyond, 1, length)
    if any((np.prod(size.astype(np.float64), axis=0) >= _MOST).any() for size in sizes):
        return None
    whole, part = (np.prod(size, axis=0, dtype=np.int64) for size in sizes)
    name = rows.name[heads]
    covered = np.zeros(len(rows.names), dtype=np.int64)
    if float(part.sum(dtype=np.float64)) >= _MOST:
        return None
    np.add.at(covered, name, part)
    if (covered[name] != whole).any():
        return None
    filled = part > 0
    name, offset, length = name[filled], offset[:, filled], length[:, filled]
    odd: set[int] = set()
    # A sort of two bytes takes time in proportion, and tensors are seldom more than those can number.
    by_name = np.argsort(name.astype(np.min_scalar_type(len(rows.names))), kind="stable")
    name = name[by_name]
    is_same = name[1:] == name[:-1]
    for begin, size in zip(offset[:, by_name], length[:, by_name], strict=True):
        falls = (begin[1:] < begin[:-1]) | (begin[1:] == begin[:-1]) & (size[1:] < size[:-1])
        if (is_same & falls).any():
            order = np.lexsort((size, begin, name))
            begin, size = begin[order], size[order]  # noqa: PLW2901 - names stay where they are: they are sorted
        cuts_differ = (begin[1:] != begin[:-1]) | (size[1:] != size[:-1])
        meets = is_same & cuts_differ & (begin[:-1] + size[:-1] > begin[1:])
        odd.update(name[1:][meets].tolist())
    return sorted(odd)


def _mixed(rows: Columns) -> npt.NDArray[np.uint64]:
    """Return a number per row that is equal for equal boxes, and nearly never for others."""
    key = rows.name.astype(np.uint64) * _FACTOR + rows.ndim.astype(np.uint64)
    for values in (*rows.offset, *rows.length):
        key ^= key >> _SHIFT
        key = (key + values.astype(np.uint64)) * _FACTOR
    return key ^ (key >> _SHIFT)


def _is_consistent(rows: Columns) -> bool:
    """Whether scopes are known and, of each name, all equal, and dtype and shape of a global tensor as well."""
    first = np.empty(len(rows.names), dtype=np.int64)
    first[rows.name[::-1]] = np.arange(len(rows.name))[::-1]
    like = first[rows.name]
    scope = rows.scope
    same = (rows.dtype == rows.dtype[like]) & (rows.ndim == rows.ndim[like])
    same &= (rows.shape == rows.shape[:, like]).all(axis=0)
    known: Flags = (scope == SCOPE_GLOBAL) | (scope == SCOPE_PER_RANK)
    fits: Flags = (scope == scope[like]) & known & (same | (scope == SCOPE_PER_RANK))
    return bool(fits.all())
