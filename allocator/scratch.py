"""`Scratch`: memory for temporary arrays that is kept between calls.

Large fresh arrays are dear: the operating system hands their memory out page by page at the first write, which costs
more than computing what is written. Owns that memory, knows nothing of what is put there.
"""

from __future__ import annotations

import numpy as np

from allocator.types import Bool, Int32, Int64

__all__ = ["Scratch"]


class Scratch:
    """Temporary arrays by name. Asking for a name again gives the same memory: an array is used before that, and never
    handed out. Holds as much as the largest calls took.
    """

    def __init__(self) -> None:
        self._int64: dict[str, Int64] = {}
        self._bool: Bool = np.empty(0, np.bool_)
        self._count: Int32 = np.empty(0, np.int32)

    def int64(self, name: str, n: int) -> Int64:
        """Uninitialised int64 [n]. O(1) amortised."""
        held = self._int64.get(name)
        if held is None or len(held) < n:
            held = self._int64[name] = np.empty(max(n, 1024) * 5 // 4, np.int64)
        return held[:n]

    def bool(self, n: int) -> Bool:
        """Uninitialised bool [n]; one array at a time. O(1) amortised."""
        if len(self._bool) < n:
            self._bool = np.empty(max(n, 1024) * 5 // 4, np.bool_)
        return self._bool[:n]

    def count(self, n: int) -> Int32:
        """0, 1 .. n - 1 as int32, only to be read. O(1) amortised."""
        if len(self._count) < n:
            self._count = np.arange(max(n, 1024) * 5 // 4, dtype=np.int32)
            self._count.flags.writeable = False
        return self._count[:n]
