"""Storage of page tables: one flat int32 array, cut into extents of power-of-two width.

Owns the array and its free extents; knows nothing of what the numbers mean. Long contexts cost what they use: 64 rows
of a 128k-token sequence take one extent, not a dense table for every sequence.
"""

from __future__ import annotations

import numpy as np

from allocator.types import Int32, Int64

__all__ = ["Arena", "ragged"]

_SMALLEST = 4


def ragged(starts: Int64, lengths: Int64) -> Int64:
    """Indices ``starts[0] .. starts[0] + lengths[0] - 1``, then those of the next range, and so on. O(total).

    >>> ragged(np.array([10, 50]), np.array([3, 2])).tolist()
    [10, 11, 12, 50, 51]
    """
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    indices: Int64 = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(total)
    return indices


class Arena:
    """Extents shaped [num_rows, width] in one array; entries that nobody wrote are 0.

    Attributes:
        data: int32 [size], all extents.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.data: Int32 = np.zeros(num_rows * 64, np.int32)
        self.top = 0
        self.free: dict[int, list[int]] = {}

    def view(self, base: int, width: int) -> Int32:
        """The extent as [num_rows, width], not a copy. O(1)."""
        return self.data[base : base + self.num_rows * width].reshape(self.num_rows, width)

    def take(self, width: int) -> int:
        """Offset of a zeroed extent of `width` columns (a power of two). O(extent), amortised over growth."""
        bases = self.free.get(width)
        if bases:
            return bases.pop()
        base = -(-self.top // width) * width  # aligned: the arena can be read as a matrix of rows of this width
        self.top = base + self.num_rows * width
        if self.top > len(self.data):
            grown = np.zeros(max(self.top, 2 * len(self.data)), np.int32)
            grown[: len(self.data)] = self.data
            self.data = grown
        return base

    def give(self, base: int, width: int) -> None:
        """Gives an extent back, zeroing it. O(extent)."""
        self.data[base : base + self.num_rows * width] = 0
        self.free.setdefault(width, []).append(base)

    def load(self, data: Int32, free: dict[int, list[int]]) -> None:
        """Replaces all extents by those of a snapshot."""
        self.data = np.zeros(max(len(data), self.num_rows * 64), np.int32)
        self.data[: len(data)] = data
        self.top, self.free = len(data), free

    def widen(self, base: int, width: int, needed: int) -> tuple[int, int]:
        """Moves an extent (width 0: none yet) to one of at least `needed` columns. O(extent), amortised O(1) a column.

        Returns:
            The new offset and width.
        """
        wider = max(_SMALLEST, 1 << (needed - 1).bit_length())
        moved = self.take(wider)
        if width:
            self.view(moved, wider)[:, :width] = self.view(base, width)
            self.give(base, width)
        return moved, wider
