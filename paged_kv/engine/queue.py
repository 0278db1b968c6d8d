"""Rows that wait for pages, in the order in which they are served.

Owns: the order; rows that ended while they waited are skipped when they come up.
Does not know: why a row waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from paged_kv.engine.request import Row


class WaitingQueue:
    """A heap by priority, arrival and completion; its length counts the rows that still want to run."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Row]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def __iter__(self) -> Iterator[Row]:
        return (row for _, _, row in self._heap)

    def push(self, row: Row) -> None:
        """Add a row. O(log rows)."""
        row.queued = True
        heapq.heappush(self._heap, (row.request.key, row.index, row))

    def pop(self) -> Row | None:
        """Take out the first row that still wants to run, None if there is none. O(log rows)."""
        while self._heap:
            row = heapq.heappop(self._heap)[2]
            row.queued = False
            if row.finish_reason is None:
                return row
            self._num_stale -= 1
        return None

    def forget(self, row: Row) -> None:
        """Note that a row has ended; its entry, if it has one, is skipped when it comes up. O(1)."""
        self._num_stale += row.queued
