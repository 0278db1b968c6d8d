"""`DeltaLog`: what changed in the tables since the last look, for copies of them on a device.

The copy is one int32 array ``[capacity * num_rows, columns]``; a sequence's rows are `TableQueries.device_rows`.
Entries past the end of a row are left as they were: a kernel reads as far as the live length says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.arena import ragged
from allocator.table import PageTables
from allocator.types import Int32, Int64

__all__ = ["DeltaLog", "TableDelta"]


@dataclass(frozen=True, slots=True)
class TableDelta:
    """Entries to write into a copy of the tables, each place once: ``copy[rows, columns] = pages``.

    Attributes:
        rows: int32 [n], ``slot * num_rows + row``.
        columns: int32 [n].
        pages: int32 [n].
    """

    rows: Int32
    columns: Int32
    pages: Int32


class DeltaLog:
    """Sequences that changed, and the first column of each row from which they did."""

    def __init__(self) -> None:
        self._rewritten: set[int] = set()
        self._grown: list[tuple[Int64, Int64, Int64, Int64, Int32]] = []

    def rewrite(self, slot: int) -> None:
        """Any entry of a sequence may have changed. O(1)."""
        self._rewritten.add(slot)

    def grow(self, slots: Int64, rows: Int64, columns: Int64, lengths: Int64, pages: Int32) -> None:
        """Runs of `lengths` pages were written from `columns` on. O(1)."""
        self._grown.append((slots, rows, columns, lengths, pages))

    def drain(self, tables: PageTables) -> TableDelta:
        """All changes since the last drain, and forgets them. O(changes)."""
        rows, columns, pages = [], [], []
        for slots, row, column, lengths, new in self._grown:
            rows.append(np.repeat(slots * tables.num_rows + row, lengths))
            columns.append(ragged(column, lengths))
            pages.append(new)
        for slot in self._rewritten:
            used = tables.pages_for(tables.row_lens(slot))
            rows.append(np.repeat(slot * tables.num_rows + np.arange(tables.num_rows), used))
            columns.append(ragged(np.zeros_like(used), used))
            pages.append(tables.pages_of(slot))
        self._rewritten, self._grown = set(), []
        return _newest(rows, columns, pages)


def _newest(rows: list[Int64], columns: list[Int64], pages: list[Int32]) -> TableDelta:
    """One entry a place: the last one written."""
    none = np.zeros(0, np.int64)
    row, column = np.concatenate([none, *rows]), np.concatenate([none, *columns])
    page = np.concatenate([none.astype(np.int32), *pages])
    _, last = np.unique((row << 32 | column)[::-1], return_index=True)
    order = np.sort(len(row) - 1 - last)
    return TableDelta(row[order].astype(np.int32), column[order].astype(np.int32), page[order])
