"""Turns what a caller passed into checked arrays, or raises an error that names the value. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from allocator.errors import InvalidArgument
from allocator.scratch import Scratch
from allocator.types import Counts, Int32, Int64, Keep, LayerKind, Tokens

__all__ = [
    "INT32_MAX",
    "check_counts",
    "check_index",
    "check_keep",
    "check_kinds",
    "check_scope",
    "check_size",
    "check_tokens",
    "check_windows",
]

INT32_MAX = 2**31 - 1

AnyInts: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


def check_size(name: str, value: object, *, least: int, most: int = INT32_MAX) -> int:
    """An integer within limits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidArgument(name, value, "must be an integer")
    if not least <= value <= most:
        raise InvalidArgument(name, value, f"must be from {least} to {most}")
    return int(value)


def check_index(name: str, value: object, size: int) -> int:
    """An index below `size`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidArgument(name, value, "must be an integer")
    if not 0 <= value < size:
        raise InvalidArgument(name, value, f"must be from 0 to {size - 1}")
    return int(value)


def check_counts(counts: Counts, num_seqs: int, limits: Int64 | None = None, reason: str = "") -> Int64:
    """One non-negative count a sequence, int64 [num_seqs]; none above its limit."""
    if isinstance(counts, int):
        checked = np.empty(num_seqs, np.int64)
        checked.fill(check_size("counts", counts, least=0))
    else:
        given = np.asarray(counts)
        if given.size and given.dtype.kind not in "iu":
            raise InvalidArgument("counts", counts, "must be integers")
        if given.shape not in ((), (num_seqs,)):
            raise InvalidArgument("counts", counts, f"needs one count for each of {num_seqs} sequences")
        checked = np.empty(num_seqs, np.int64)
        checked[:] = given
        if num_seqs and int(checked.min()) < 0:
            raise InvalidArgument("counts", int(checked.min()), "must not be negative")
    if limits is not None and np.count_nonzero(checked > limits):
        worst = int((checked - limits).argmax())
        raise InvalidArgument("counts", int(checked[worst]), f"{reason} ({int(limits[worst])})")
    return checked


def check_tokens(tokens: Tokens) -> Int32:
    """Token ids, int32 [n]."""
    given = np.asarray(tokens)
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidArgument("tokens", tokens, "must be a one-dimensional sequence of integers")
    low, high = int(given.min()), int(given.max())
    if low < -INT32_MAX - 1 or high > INT32_MAX:
        raise InvalidArgument("tokens", high if high > INT32_MAX else low, "token ids must fit into 32 bits")
    return np.ascontiguousarray(given, np.int32)


def check_scope(scope: object) -> bytes:
    """A scope."""
    if not isinstance(scope, bytes):
        raise InvalidArgument("scope", scope, "must be bytes")
    return scope


def check_windows(windows: Sequence[int | None] | None, num_layers: int, lanes: int) -> Int64:
    """The window of each row, int64 [rows]; 0 for none."""
    if windows is None:
        return np.zeros(num_layers * lanes, np.int64)
    if len(windows) != num_layers:
        raise InvalidArgument("windows", windows, f"needs one entry for each of {num_layers} layers")
    sizes = [0 if window is None else check_size("windows", window, least=1) for window in windows]
    return np.repeat(np.array(sizes, np.int64), lanes)


def check_kinds(kinds: Sequence[LayerKind] | None, num_layers: int, lanes: int) -> list[LayerKind]:
    """The kind of each row."""
    if kinds is None:
        return [LayerKind.ATTENTION] * (num_layers * lanes)
    if len(kinds) != num_layers or not all(isinstance(kind, LayerKind) for kind in kinds):
        raise InvalidArgument("kinds", kinds, f"needs one LayerKind for each of {num_layers} layers")
    return [kind for kind in kinds for _ in range(lanes)]


def check_keep(keep: Keep, lens: Int64, lanes: int, scratch: Scratch) -> tuple[Int64, Int64, Int64]:
    """A keep-list a row.

    Args:
        keep: live indices by layer, or by layer and lane.
        lens: int64 [rows], live tokens of each row.
        lanes: lanes a layer.
        scratch: lends the memory of the indices: they are valid until its array "keep" is asked for again.

    Returns:
        The rows in order (int64 [k]), all indices concatenated (int64), and how many belong to each row (int64 [k]).
    """
    rows, lists = _lists_by_row(keep, len(lens) // lanes, lanes)
    counts = np.array([len(indices) for indices in lists], np.int64)
    flat = scratch.int64("keep", int(counts.sum()))
    if len(flat):
        np.concatenate(lists, out=flat, casting="unsafe")
    _check_rising(rows, flat, counts, lens[rows], lanes, scratch)
    return rows, flat, counts


def _lists_by_row(keep: Keep, num_layers: int, lanes: int) -> tuple[Int64, list[AnyInts]]:
    """The rows that a keep-list names, ascending, and the indices for each."""
    rows: list[int] = []
    lists: list[AnyInts] = []
    for key, indices in keep.items():
        given = indices if type(indices) is np.ndarray else np.asarray(indices)
        if given.dtype.kind not in "iu" or given.ndim != 1:
            if given.size:
                raise InvalidArgument(f"keep[{key!r}]", given.dtype, "must be a one-dimensional list of integers")
            given = np.empty(0, np.int64)
        if lanes == 1 and type(key) is int and 0 <= key < num_layers:  # the usual case, with less to do
            rows.append(key)
            lists.append(given)
        else:
            named = _rows_of(key, num_layers, lanes)
            rows.extend(named)
            lists.extend([given] * len(named))
    ids = np.array(rows, np.int64)
    if np.count_nonzero(ids[1:] > ids[:-1]) < len(ids) - 1:
        order = ids.argsort(kind="stable")
        ids, lists = ids[order], [lists[at] for at in order.tolist()]
        twice = ids[1:] == ids[:-1]
        if twice.any():
            raise InvalidArgument("keep", divmod(int(ids[twice.argmax()]), lanes), "names a lane twice")
    return ids, lists


def _check_rising(rows: Int64, flat: Int64, counts: Int64, lens: Int64, lanes: int, scratch: Scratch) -> None:
    """Every row's indices strictly increase, from 0 at least to its last live token at most."""
    filled = counts.nonzero()[0]
    if len(filled) < len(rows):
        rows, counts, lens = rows[filled], counts[filled], lens[filled]
    if len(rows) == 0:
        return
    ends = counts.cumsum()
    rising = np.greater(flat[1:], flat[:-1], out=scratch.bool(len(flat) - 1))
    rising[ends[:-1] - 1] = True
    if np.count_nonzero(rising) < len(rising):
        at = int(rising.argmin()) + 1
        row = int(rows[np.searchsorted(ends, at, side="right")])
        raise InvalidArgument(f"keep[{divmod(row, lanes)}]", int(flat[at]), "indices must be strictly increasing")
    for index in (flat[ends - counts], flat[ends - 1]):
        outside = (index < 0) | (index >= lens)
        if np.count_nonzero(outside):
            at = int(outside.argmax())
            raise InvalidArgument(
                f"keep[{divmod(int(rows[at]), lanes)}]", int(index[at]), f"live indices are 0 to {lens[at] - 1}"
            )


def _rows_of(key: object, num_layers: int, lanes: int) -> range:
    if isinstance(key, tuple) and len(key) == 2:
        row = check_index("layer", key[0], num_layers) * lanes + check_index("lane", key[1], lanes)
        return range(row, row + 1)
    layer = check_index("layer", key, num_layers)
    return range(layer * lanes, layer * lanes + lanes)
