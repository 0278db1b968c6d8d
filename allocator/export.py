"""Arrays for kernels: padded block tables, slot mappings, visible ranges.

Reads tables, changes nothing. Shapes: R rows, B sequences, T tokens (``sum(counts)``, sequence after sequence).
"""

from __future__ import annotations

import numpy as np

from allocator.arena import ragged
from allocator.table import PageTables
from allocator.types import Int32, Int64

__all__ = ["block_tables", "slot_mapping", "visible_start"]


def block_tables(tables: PageTables, slots: Int64) -> Int32:
    """Padded tables, int32 [R, B, max_pages]; see `TableQueries.block_tables`."""
    longest = [int(tables.row_lens(slot).max()) for slot in slots.tolist()]
    most = max(1, -(-max(longest, default=0) // tables.page_size))
    padded = np.zeros((tables.num_rows, len(slots), most), np.int32)
    for at, slot in enumerate(slots.tolist()):
        view = tables.view(slot)  # entries past the end of a row are the null page already
        columns = min(most, view.shape[1])
        padded[:, at, :columns] = view[:, :columns]
    return padded


def slot_mapping(tables: PageTables, slots: Int64, counts: Int64) -> Int64:
    """Slots of the newest tokens, int64 [R, T]; see `TableQueries.slot_mapping`."""
    size, rows = tables.page_size, np.arange(tables.num_rows)
    first = tables.lens_of(slots).T.astype(np.int64) - counts
    index = np.repeat(first, counts, axis=1) + ragged(np.zeros_like(counts), counts)
    column = index // size
    start = np.repeat(tables.base[slots] + rows[:, None] * tables.width[slots], counts, axis=1)
    if not tables.uniform:  # rows that do not grow have no slot for a token: they point to the null page
        start, column, index = (np.where(tables.grows[:, None], array, 0) for array in (start, column, index))
    pages = tables.arena.data[start + column]
    mapped = pages.astype(np.int64) * size + (index - column * size)
    return mapped if tables.uniform else np.where(tables.grows[:, None], mapped, 0)


def visible_start(tables: PageTables, slots: Int64, counts: Int64, rows: Int64, window: int) -> Int32:
    """First visible live index, int32 [len(rows), T]; see `TableQueries.visible_start`."""
    first_position = np.repeat(tables.seen[slots] - counts, counts) + ragged(np.zeros_like(counts), counts) - window + 1
    lens = tables.lens_of(slots)[:, rows].T.astype(np.int64)
    # In the run, live index = position - (seen - live).
    index = first_position - np.repeat(tables.seen[slots] - lens, counts, axis=1)
    stored = np.where(tables.diverged[slots], tables.kept_len[slots][:, rows].T, 0)
    for lane, at in zip(*np.nonzero(stored), strict=True):
        tokens = slice(int(counts[:at].sum()), int(counts[: at + 1].sum()))
        kept = tables.kept_row(int(slots[at]), int(rows[lane]))
        below = np.searchsorted(kept, first_position[tokens])
        index[lane, tokens] = np.where(below < len(kept), below, np.maximum(index[lane, tokens], len(kept)))
    return np.maximum(index, 0).astype(np.int32)
