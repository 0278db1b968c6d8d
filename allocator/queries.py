"""`TableQueries`: what a step needs to know of the tables. Nothing here changes anything.

Shapes: R rows (``layer * lanes + lane``), B sequences, T tokens (``sum(counts)``, sequence after sequence).
"""

from __future__ import annotations

import numpy as np

from allocator import export
from allocator.core import Core
from allocator.types import Counts, Int32, Int64, SeqId, Seqs
from allocator.validate import check_counts, check_index, check_size

__all__ = ["TableQueries"]


class TableQueries:
    """Read-only half of `BlockAllocator`.

    Attributes:
        page_size: tokens a page.
        num_layers, lanes: layers, and page tables a layer.
    """

    page_size: int
    num_layers: int
    lanes: int
    _core: Core

    def seen_len(self, seq: SeqId) -> int:
        """Tokens appended so far; the position of the next one. O(1)."""
        return int(self._core.tables.seen[self._core.tables.slot_of(seq)])

    def is_diverged(self, seq: SeqId) -> bool:
        """Whether rows have lengths of their own (False: every row holds every seen token). O(1)."""
        return bool(self._core.tables.diverged[self._core.tables.slot_of(seq)])

    def live_lens(self, seqs: Seqs) -> Int32:
        """Live tokens, int32 [R, B]. O(R * B)."""
        return np.ascontiguousarray(self._core.tables.lens_of(self._core.tables.slots_of(seqs)).T)

    def num_pages_of(self, seq: SeqId) -> Int32:
        """Pages of each row, int32 [R]. O(R)."""
        tables = self._core.tables
        return tables.pages_for(tables.row_lens(tables.slot_of(seq))).astype(np.int32)

    def block_tables(self, seqs: Seqs, layer: int | None = None) -> Int32:
        """Padded block tables, int32 [R, B, max_pages >= 1], padding is the null page 0. O(R * B * max_pages).

        With a layer its tables alone, [lanes, B, max_pages], which cost as much less.
        """
        first = 0 if layer is None else self._row(layer, 0)
        rows = slice(first, None if layer is None else first + self.lanes)
        return export.block_tables(self._core.tables, self._core.tables.slots_of(seqs), rows)

    def is_frozen(self, seq: SeqId, layer: int) -> bool:
        """Whether any page of a layer must not be written: other tables hold it too, or it is published. O(pages)."""
        pages = self.block_tables([seq], layer)
        return bool(self._core.pool.frozen(pages[pages > 0]).any())

    def csr_table(self, seqs: Seqs, layer: int, lane: int = 0) -> export.CsrTable:
        """Page tables of one row of every sequence without padding: indptr, indices, last_page_len. O(B + pages)."""
        return export.csr_table(self._core.tables, self._core.tables.slots_of(seqs), self._row(layer, lane))

    def _row(self, layer: int, lane: int) -> int:
        return check_index("layer", layer, self.num_layers) * self.lanes + check_index("lane", lane, self.lanes)

    def device_rows(self, seqs: Seqs) -> Int32:
        """Rows of a copy of the tables that is kept up to date by `drain_deltas`, int32 [R, B]. O(R * B)."""
        slots = self._core.tables.slots_of(seqs)
        return (slots * self._core.num_rows + np.arange(self._core.num_rows)[:, None]).astype(np.int32)

    def slot_mapping(self, seqs: Seqs, counts: Counts) -> Int64:
        """Slots of the newest `counts` tokens of each sequence, int64 [R, T]. O(R * T).

        Raises:
            InvalidArgument: a row has fewer live tokens than its count.
        """
        slots, checked = self._newest(seqs, counts)
        return export.slot_mapping(self._core.tables, slots, checked)

    def positions(self, seq: SeqId, layer: int, lane: int = 0) -> Int64:
        """Original positions of the live tokens of a row, int64 [live]. O(live)."""
        return self._core.tables.positions(self._core.tables.slot_of(seq), self._row(layer, lane))

    def visible_start(self, seqs: Seqs, counts: Counts, layer: int, window: int | None) -> Int32:
        """First live index that each of the newest tokens sees, int32 [lanes, T].

        A token at position p sees positions above ``p - window`` (all, if `window` is None), which is a range of live
        indices because positions increase. O(lanes * T), times log(live) where a crop's survivors are in reach.
        """
        slots, checked = self._newest(seqs, counts)
        first = self._row(layer, 0)
        if window is None:
            return np.zeros((self.lanes, int(checked.sum())), np.int32)
        rows = np.arange(first, first + self.lanes)
        return export.visible_start(self._core.tables, slots, checked, rows, check_size("window", window, least=1))

    def _newest(self, seqs: Seqs, counts: Counts) -> tuple[Int64, Int64]:
        tables = self._core.tables
        slots = tables.slots_of(seqs)
        if len(slots) == 0:
            return slots, check_counts(counts, 0)
        shortest = tables.lens_of(slots)[:, tables.grows].min(axis=1, initial=2**31 - 1).astype(np.int64)
        return slots, check_counts(counts, len(slots), shortest, "is more than the live tokens of a row")
