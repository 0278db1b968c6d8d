"""`Core`: the state that all operations share, and the two ways pages move in and out of tables.

Owns nothing of its own but the counters; binds pool, tables and prefix index together, so that each operation
(appending, cropping, dropping, sharing) can live in a module of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.deltas import DeltaLog
from allocator.errors import OutOfPages
from allocator.hashing import HashState
from allocator.pool import PagePool
from allocator.prefix import PrefixIndex
from allocator.scratch import Scratch
from allocator.table import PageTables
from allocator.types import Bool, Int32, Int64, PinId

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
        prefix: published blocks, or None without prefix caching.
        deltas: log of table changes, or None.
        scratch: memory for temporary arrays.
        pins: pages that each pin references.
        chains: per slot, the hash of the scope followed by those of the blocks matched or published so far.
        hash_states: per slot, the hash state at the end of its chain, or None.
        frozen_tail: bool [slots], whether a page that the next append would write into may be frozen. False is a
            promise, True only a hint: append looks at the pages.
        reserved: int64 [slots], pages set aside for a sequence.
        appended: bool [slots], whether a sequence holds slots of its own.
        cross_written: bool [slots], whether its write-once tables were written.
        state_rows: bool [num_rows], rows of recurrent state.
    """

    def __init__(
        self,
        pool: PagePool,
        tables: PageTables,
        *,
        prefix: PrefixIndex | None = None,
        watermark: int = 0,
        state_rows: Bool | None = None,
    ) -> None:
        self.pool, self.tables, self.prefix, self.watermark = pool, tables, prefix, watermark
        self.chains: list[bytearray] = []
        self.hash_states: list[HashState | None] = []
        self.counters = Counters()
        self.scratch = Scratch()
        self.page_size, self.num_rows = tables.page_size, tables.num_rows
        self.frozen_tail = np.zeros(0, np.bool_)
        self.appended = np.zeros(0, np.bool_)
        self.cross_written = np.zeros(0, np.bool_)
        self.reserved = np.zeros(0, np.int64)
        self.total_reserved = 0
        self.deltas: DeltaLog | None = None
        self.pins: dict[PinId, Int32] = {}
        self.next_pin = 1
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
        """Takes `n` available pages, evicting cached blocks if the free ones do not do. O(n). Hints as in the pool."""
        missing = n - self.pool.num_free
        if missing > 0 and self.prefix is not None:
            self.counters.evicted_blocks += self.prefix.evict(missing)
        return self.pool.take(n, after=after, lengths=lengths)

    def release(self, pages: Int32) -> int:
        """Drops one reference per entry; published pages become cached. O(n). Returns how many became available."""
        freed, cached = self.pool.release(pages)
        if self.prefix is not None and len(cached):
            self.prefix.rest(cached)
        return freed

    def open_slot(self) -> int:
        """An empty sequence."""
        slot = self.tables.open()
        missing = len(self.tables.handles) - len(self.frozen_tail)
        if missing:
            for name in ("frozen_tail", "appended", "cross_written", "reserved"):
                array = getattr(self, name)
                setattr(self, name, np.append(array, np.zeros(missing, array.dtype)))
            self.chains.extend(bytearray() for _ in range(missing))
            self.hash_states.extend([None] * missing)
        self.frozen_tail[slot] = self.appended[slot] = self.cross_written[slot] = False
        self.chains[slot], self.hash_states[slot] = bytearray(), None
        return slot

    def log_rewrite(self, slot: int) -> None:
        """Notes, where deltas are recorded, that the tables of a sequence changed other than by growing. O(1)."""
        if self.deltas is not None:
            self.deltas.rewrite(slot)

    def written_rows(self, lens: Int32) -> Bool:
        """Rows of `lens` (int32 [n, num_rows]) whose last page the next append writes: partly filled, or state."""
        partial: Bool = (self.tables.offset(lens) != 0) & self.tables.grows
        return partial | (self.state_rows & (lens > 0))

    def clone_slot(self, slot: int) -> int:
        """A sequence that shares every page of another; neither may write into a partly filled page. O(pages)."""
        tables = self.tables
        self.pool.retain(tables.pages_of(slot))
        copy = self.open_slot()
        tables.clone(slot, copy)
        self.appended[copy] = self.appended[slot]
        self.cross_written[copy] = self.cross_written[slot]
        self.chains[copy] = self.chains[slot].copy()
        state = self.hash_states[slot]
        self.hash_states[copy] = state.copy() if state is not None else None
        self.log_rewrite(copy)
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
