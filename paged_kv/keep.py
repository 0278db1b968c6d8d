"""What a caller may say of tokens to keep, turned into one index array per row and lane.

Owns: the accepted forms and their checks.
Does not know: pages, policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from allocator import KVError

#: Live indices for all rows, or one such list per row.
Keep = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor


def keep_by_lane(keep: Keep, live: np.ndarray, rows: Sequence[int]) -> list[list[np.ndarray]]:
    """Index arrays `[row][lane]` from a caller's `keep`, checked against the live lengths.

    Args:
        keep: One list for all rows, or one per row.
        live: int `[lanes, rows]`, live tokens of the layer.
        rows: The rows that are to be cropped.

    Raises:
        KVError: Not integers, not strictly increasing, out of range, or a number of lists other than rows.
    """
    lists = _per_row(keep, len(rows))
    result = []
    for row, indices in zip(rows, lists, strict=True):
        for lane in range(live.shape[0]):
            check_indices(indices, int(live[lane, row]), f"row {row}")
        result.append([indices] * live.shape[0])
    return result


def keep_ends(keep_last: int, sinks: int, live: np.ndarray, rows: Sequence[int]) -> list[list[np.ndarray]]:
    """Index arrays `[row][lane]` of the first `sinks` and the last `keep_last` live tokens.

    Raises:
        KVError: A negative number of either.
    """
    if keep_last < 0 or sinks < 0:
        raise KVError(f"keep_last and sinks must be at least 0, got {keep_last} and {sinks}")
    return [[ends(int(live[lane, row]), sinks, keep_last) for lane in range(live.shape[0])] for row in rows]


def check_budget(layer: int, budget: object) -> None:
    """Refuse a budget that is not a number of tokens, with the layer's index in the error.

    Raises:
        KVError: Not an integer, or below 0.
    """
    if isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 0:
        raise KVError(f"the budget of layer {layer} must be a number of tokens, at least 0, got {budget!r}")


def check_lanes(kept: Sequence[np.ndarray], num_lanes: int, policy: object, layer: int) -> Sequence[np.ndarray]:
    """What a policy chose of a layer, if it is one keep-list per page table.

    Raises:
        KVError: Fewer or more.
    """
    if len(kept) != num_lanes:
        raise KVError(
            f"{type(policy).__name__} gave {len(kept)} keep-lists for the {num_lanes} page tables of layer {layer}"
        )
    return kept


def ends(length: int, first: int, last: int) -> np.ndarray:
    """The first `first` and the last `last` of `length` indices, each once."""
    if first + last >= length:
        return np.arange(length)
    return np.concatenate([np.arange(first), np.arange(length - last, length)])


def _per_row(keep: Any, num_rows: int) -> list[np.ndarray]:
    if isinstance(keep, Tensor):
        keep = keep.detach().cpu().numpy()
    nested = keep.ndim == 2 if isinstance(keep, np.ndarray) else len(keep) > 0 and not np.isscalar(keep[0])
    if nested and not (isinstance(keep[0], Tensor) and keep[0].ndim == 0):
        if len(keep) != num_rows:
            raise KVError(f"keep holds {len(keep)} lists for {num_rows} rows")
        return [_indices(entry) for entry in keep]
    return [_indices(keep)] * num_rows


def _indices(keep: Any) -> np.ndarray:
    array = np.asarray(keep.detach().cpu() if isinstance(keep, Tensor) else keep)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise KVError(f"keep must be a list of integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def check_indices(indices: np.ndarray, live: int, where: str) -> None:
    """Refuse live indices that are not strictly increasing, or not among the live ones.

    Raises:
        KVError: The message names the index and `where`.
    """
    if indices.size == 0:
        return
    if (np.diff(indices) <= 0).any():
        place = int(np.flatnonzero(np.diff(indices) <= 0)[0])
        raise KVError(
            f"keep must be strictly increasing, got {int(indices[place])} before {int(indices[place + 1])} ({where})"
        )
    if indices[0] < 0 or indices[-1] >= live:
        bad = int(indices[0] if indices[0] < 0 else indices[-1])
        raise KVError(f"keep index {bad} is outside the {live} live tokens of {where}")
