"""`Core`: the state that all operations share, and the two ways pages move in and out of tables.

Owns nothing of its own but the counters; binds pool, tables and prefix index together, so that each operation
(appending, cropping, dropping, sharing) can live in a module of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.errors import OutOfPages
from allocator.pool import PagePool
from allocator.table import PageTables
from allocator.types import Bool, Int32, Int64

__all__ = ["Core", "Counters"]


@dataclass(slots=True)
class Counters:
    """Running totals, each kept in O(1) by the operation that changes it.

    Attributes:
        live_tokens: live tokens summed over all rows of all sequences (shared ones count for each).
        table_entries: pages in tables, summed likewise.
    """

    live_tokens: int = 0
    table_entries: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evicted_blocks: int = 0
    copied_pages: int = 0
    moved_slots: int = 0
    preemptions: int = 0


class Core:
    """Pool, tables and counters of one allocator.

    Attributes:
        frozen_tail: bool [slots], whether a page that the next append would write into may be frozen. False is a
            promise, True only a hint: append looks at the pages.
        reserved: int64 [slots], pages set aside for a sequence.
        appended: bool [slots], whether a sequence holds slots of its own.
        state_rows: bool [num_rows], rows of recurrent state.
    """

    def __init__(
        self, pool: PagePool, tables: PageTables, *, watermark: int = 0, state_rows: Bool | None = None
    ) -> None:
        self.pool, self.tables, self.watermark = pool, tables, watermark
        self.counters = Counters()
        self.page_size, self.num_rows = tables.page_size, tables.num_rows
        self.frozen_tail = np.zeros(0, np.bool_)
        self.appended = np.zeros(0, np.bool_)
        self.reserved = np.zeros(0, np.int64)
        self.total_reserved = 0
        self.state_rows = np.zeros(self.num_rows, np.bool_) if state_rows is None else state_rows

    @property
    def usable(self) -> int:
        """Pages that can be given out at all."""
        return self.pool.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that nobody references: free or cached. Reservations are not taken off."""
        return self.pool.num_free + self.pool.num_cached

    def require(self, needed: int) -> None:
        """Raises `OutOfPages` unless `needed` unreserved pages are available."""
        available = self.available - self.total_reserved
        if needed > available:
            raise OutOfPages(needed, max(0, available), self.usable)

    def take(self, n: int, *, after: Int32 | None = None, lengths: Int64 | None = None) -> Int32:
        """Takes `n` available pages, evicting cached blocks if the free ones do not do. O(n)."""
        return self.pool.take(n, after=after, lengths=lengths)

    def release(self, pages: Int32) -> int:
        """Drops one reference per entry; published pages become cached. O(n). Returns how many became available."""
        freed, _ = self.pool.release(pages)
        return freed

    def open_slot(self) -> int:
        """An empty sequence."""
        slot = self.tables.open()
        missing = len(self.tables.handles) - len(self.frozen_tail)
        if missing:
            self.frozen_tail = np.append(self.frozen_tail, np.zeros(missing, np.bool_))
            self.appended = np.append(self.appended, np.zeros(missing, np.bool_))
            self.reserved = np.append(self.reserved, np.zeros(missing, np.int64))
        self.frozen_tail[slot] = self.appended[slot] = False
        return slot

    def written_rows(self, lens: Int32) -> Bool:
        """Rows of `lens` (int32 [n, num_rows]) whose last page the next append writes: partly filled, or state."""
        partial: Bool = (lens % np.int32(self.page_size) != 0) & self.tables.grows
        return partial | (self.state_rows & (lens > 0))

    def clone_slot(self, slot: int) -> int:
        """A sequence that shares every page of another; neither may write into a partly filled page. O(pages)."""
        tables = self.tables
        self.pool.retain(tables.pages_of(slot))
        copy = self.open_slot()
        tables.clone(slot, copy)
        self.appended[copy] = self.appended[slot]
        self.frozen_tail[slot] = self.frozen_tail[copy] = True
        lens = tables.row_lens(slot)
        self.counters.live_tokens += int(lens.sum())
        self.counters.table_entries += int(tables.pages_for(lens).sum())
        return copy

    def close_slot(self, slot: int) -> int:
        """Ends a sequence. O(pages). Returns how many pages became available."""
        tables = self.tables
        pages, lens = tables.pages_of(slot), tables.row_lens(slot)
        self.total_reserved -= int(self.reserved[slot])
        self.reserved[slot] = 0
        self.counters.live_tokens -= int(lens.sum())
        self.counters.table_entries -= len(pages)
        tables.close(slot)
        return self.release(pages)
