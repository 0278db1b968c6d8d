"""`LruLists`: which block to evict next. One doubly linked list a priority, in two flat int32 arrays.

Owns the order alone; knows nothing of hashes or pages. The lists are rings through a sentinel each: the sentinel's
`after` is the block that was used longest ago, its `before` the one used last.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from allocator.types import Int32

__all__ = ["LruLists"]


class LruLists:
    """Blocks 1 .. capacity in order of use, lowest priority first.

    Args:
        capacity: highest block id.
        levels: number of priorities.
    """

    def __init__(self, capacity: int, levels: int) -> None:
        self.sentinels = range(capacity + 1, capacity + 1 + levels)
        self.before = np.zeros(capacity + 1 + levels, np.int32)
        self.after = np.zeros(capacity + 1 + levels, np.int32)
        for sentinel in self.sentinels:
            self.before[sentinel] = self.after[sentinel] = sentinel
        self._before, self._after = self.before.data, self.after.data  # scalar access without numpy objects

    def push(self, block: int, level: int) -> None:
        """Files a block as used last. O(1)."""
        sentinel = self.sentinels[level]
        last = self._before[sentinel]
        self._before[block], self._after[block] = last, sentinel
        self._after[last] = self._before[sentinel] = block

    def remove(self, block: int) -> None:
        """Takes a block out, if it is in. O(1)."""
        after, before = self._after[block], self._before[block]
        if after:
            self._after[before], self._before[after] = after, before
            self._after[block] = 0

    def load(self, before: Int32, after: Int32) -> None:
        """Replaces the lists by those of a snapshot."""
        self.before, self.after = before, after
        self._before, self._after = before.data, after.data

    def __iter__(self) -> Iterator[int]:
        """Blocks in the order of eviction. O(1) a block; the block just given may be removed meanwhile."""
        for sentinel in self.sentinels:
            block = self._after[sentinel]
            while block != sentinel:
                following = self._after[block]
                yield block
                block = following
