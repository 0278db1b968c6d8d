"""Truncate and slide: rows lose tokens at their end or at their start, and whole pages with them.

No byte moves in either: what stays, stays where it is.
"""

from __future__ import annotations

import numpy as np

from allocator.arena import ragged
from allocator.core import Core
from allocator.plan import EMPTY_PLAN, Plan
from allocator.types import Int32, Int64

__all__ = ["truncate"]


def truncate(core: Core, slots: Int64, counts: Int64) -> Plan:
    """Rolls back; see `BlockAllocator.truncate`."""
    busy = counts > 0
    slots, counts = slots[busy], counts[busy]
    if len(slots) == 0:
        return EMPTY_PLAN
    tables = core.tables
    before = tables.lens_of(slots)
    after = before - counts.astype(np.int32)[:, None]
    for at in np.flatnonzero(tables.diverged[slots]).tolist():
        after[at] = _row_lens_after(core, int(slots[at]), int(counts[at]))
    dropped = _clear_ends(core, slots, before, after)
    tables.seen[slots] -= counts
    tables.lens[slots] = after
    tables.kept_len[slots] = np.minimum(tables.kept_len[slots], after)
    core.frozen_tail[slots] = True
    core.counters.live_tokens -= int(before.sum()) - int(after.sum())
    return Plan(freed=core.release(dropped))


def _row_lens_after(core: Core, slot: int, count: int) -> Int32:
    """Live tokens of each row whose position is below ``seen - count``. O(num_rows)."""
    tables = core.tables
    seen = int(tables.seen[slot]) - count
    lens, stored = tables.lens[slot], tables.kept_len[slot]
    after: Int32 = np.where(tables.grows, lens - count, lens).astype(np.int32)
    for row in np.flatnonzero(tables.grows & (after < stored)).tolist():
        after[row] = np.searchsorted(tables.kept_row(slot, row), seen)
    return np.maximum(after, 0)


def _clear_ends(core: Core, slots: Int64, before: Int32, after: Int32) -> Int32:
    """Takes the pages past the new ends out of the tables and returns them. O(rows + pages)."""
    tables = core.tables
    first = tables.pages_for(after.astype(np.int64))
    gone = tables.pages_for(before.astype(np.int64)) - first
    batch, rows = np.nonzero(gone)
    owner = slots[batch]
    starts = tables.base[owner] + rows * tables.width[owner] + first[batch, rows]
    at = ragged(starts, gone[batch, rows])
    pages: Int32 = tables.arena.data[at]
    tables.arena.data[at] = 0
    core.counters.table_entries -= len(pages)
    return pages
