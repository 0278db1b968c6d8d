"""Arrays for kernels: padded and compressed block tables, slot mappings, visible ranges.

Reads tables, changes nothing. Shapes: R rows, B sequences, T tokens (``sum(counts)``, sequence after sequence).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.arena import ragged
from allocator.table import PageTables
from allocator.types import Int32, Int64

__all__ = ["CsrTable", "block_tables", "csr_table", "slot_mapping", "visible_start"]


@dataclass(frozen=True, slots=True)
class CsrTable:
    """The page tables of one row of B sequences without padding.

    Attributes:
        indptr: int32 [B + 1]; sequence b has pages ``indices[indptr[b] : indptr[b + 1]]``.
        indices: int32 [n].
        last_page_len: int32 [B], live tokens in the last page, 1 to page_size (page_size where there is no page).
    """

    indptr: Int32
    indices: Int32
    last_page_len: Int32


def block_tables(tables: PageTables, slots: Int64, of: slice) -> Int32:
    """Padded tables of some rows, int32 [rows, B, max_pages]; see `TableQueries.block_tables`."""
    longest = int(tables.lens_of(slots)[:, of].max(initial=0))
    most = max(1, -(-longest // tables.page_size))
    rows = np.arange(tables.num_rows)[of, None]
    padded = np.zeros((len(rows), len(slots), most), np.int32)
    widths = tables.width[slots]
    for width in np.unique(widths[widths > 0]).tolist():
        # Extents begin at multiples of their width: the arena is a matrix with one table a line. Entries past the end
        # of a row are the null page already.
        chosen = np.flatnonzero(widths == width)
        data = tables.arena.data
        lines = data[: len(data) // width * width].reshape(-1, width)
        held = lines.take((tables.base[slots[chosen]] // width + rows).ravel(), axis=0)
        columns = min(width, most)
        where = slice(None) if len(chosen) == len(slots) else chosen
        padded[:, where, :columns] = held.reshape(len(rows), len(chosen), width)[:, :, :columns]
    return padded


def csr_table(tables: PageTables, slots: Int64, row: int) -> CsrTable:
    """Compressed tables of one row; see `TableQueries.csr_table`."""
    lens = tables.lens_of(slots)[:, row].astype(np.int64)
    held = tables.pages_for(lens)
    at = ragged(tables.base[slots] + row * tables.width[slots], held)
    indptr = np.concatenate([[0], held.cumsum()]).astype(np.int32)
    last = (tables.offset(lens - 1) + 1).astype(np.int32)
    return CsrTable(indptr, tables.arena.data[at], np.where(lens > 0, last, np.int32(tables.page_size)))


def slot_mapping(tables: PageTables, slots: Int64, counts: Int64) -> Int64:
    """Slots of the newest tokens, int64 [R, T]; see `TableQueries.slot_mapping`."""
    size, rows = tables.page_size, np.arange(tables.num_rows)[:, None]
    index = np.ascontiguousarray(tables.lens_of(slots).T).astype(np.int64) - counts
    start = tables.base[slots] + rows * tables.width[slots]
    if not (counts == 1).all():
        index = np.repeat(index, counts, axis=1) + ragged(np.zeros_like(counts), counts)
        start = np.repeat(start, counts, axis=1)
    if not tables.uniform:  # rows that do not grow have no slot for a token: they point to the null page
        index, start = np.where(tables.grows[:, None], index, 0), np.where(tables.grows[:, None], start, 0)
    column = tables.page(index)
    mapped = tables.arena.data.take(start + column).astype(np.int64)
    mapped *= size
    mapped += index - column * size
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
