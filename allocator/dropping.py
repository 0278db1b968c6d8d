"""Truncate and slide: rows lose tokens at their end or at their start, and whole pages with them.

No byte moves in either: what stays, stays where it is.
"""

from __future__ import annotations

import numpy as np

from allocator.arena import ragged
from allocator.core import Core
from allocator.plan import EMPTY_PLAN, Plan
from allocator.sharing import forget_blocks_from
from allocator.types import Int32, Int64

__all__ = ["slide", "truncate"]


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
    for slot in slots.tolist():
        forget_blocks_from(core, slot, int(tables.seen[slot]))
    core.frozen_tail[slots] = True
    core.counters.live_tokens -= int(before.sum()) - int(after.sum())
    return Plan(freed=core.release(dropped))


def _row_lens_after(core: Core, slot: int, count: int) -> Int32:
    """Live tokens of each row whose position is below ``seen - count``. O(num_rows)."""
    tables = core.tables
    seen = int(tables.seen[slot]) - count
    lens, stored = tables.lens[slot], tables.kept_len[slot]
    after: Int32 = np.where(tables.grows, np.maximum(lens - count, 0), lens).astype(np.int32)
    for row in np.flatnonzero(tables.grows & (after < stored)).tolist():
        after[row] = np.searchsorted(tables.kept_row(slot, row), seen)
    return after


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


def slide(core: Core, slots: Int64, windows: Int64, margin: int) -> Plan:
    """Frees pages behind the window; see `BlockAllocator.slide`."""
    tables, size = core.tables, core.page_size
    rows = np.flatnonzero(windows)
    if len(rows) == 0 or len(slots) == 0:
        return EMPTY_PLAN
    lens = tables.lens_of(slots)[:, rows].astype(np.int64)
    oldest = tables.seen[slots][:, None] - windows[rows] + 1 - margin  # first position that must stay
    behind = np.clip(oldest - (tables.seen[slots][:, None] - lens), 0, lens)  # live indices below it, in a plain run
    stored = np.where(tables.diverged[slots][:, None], tables.kept_len[slots][:, rows], 0)
    for at, row in zip(*np.nonzero(behind < stored), strict=True):
        kept = tables.kept_row(int(slots[at]), int(rows[row]))
        behind[at, row] = np.searchsorted(kept, oldest[at, row])
    gone = behind // size
    sliding = np.flatnonzero(gone.any(axis=1))
    dropped = [_drop_columns(core, int(slots[at]), rows, gone[at]) for at in sliding.tolist()]
    return Plan(freed=core.release(np.concatenate(dropped))) if dropped else EMPTY_PLAN


def _drop_columns(core: Core, slot: int, rows: Int64, gone: Int64) -> Int32:
    """Takes the first `gone` pages out of `rows` of a sequence and returns them. O(pages of those rows)."""
    tables, size = core.tables, core.page_size
    tables.diverge(slot)
    core.log_rewrite(slot)
    rows, gone = rows[gone > 0], gone[gone > 0]
    held = tables.pages_for(tables.lens[slot, rows].astype(np.int64))
    start = tables.base[slot] + rows * tables.width[slot]
    data = tables.arena.data
    pages: Int32 = data[ragged(start, gone)]
    staying: Int32 = data[ragged(start + gone, held - gone)]
    data[ragged(start, held)] = 0
    data[ragged(start, held - gone)] = staying
    tokens = (gone * size).astype(np.int32)
    tables.lens[slot, rows] -= tokens
    from_kept = np.minimum(tokens, tables.kept_len[slot, rows])
    tables.kept_len[slot, rows] -= from_kept
    tables.kept_off[slot, rows] += from_kept
    core.counters.live_tokens -= int(tokens.sum())
    core.counters.table_entries -= len(pages)
    return pages
