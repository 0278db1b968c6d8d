"""`PageTables`: the page tables, lengths and positions of every open sequence.

Owns token arithmetic (live index, position, page, slot) and the storage of tables. Knows nothing of free pages,
references or hashes.

A sequence has one row per layer and lane, ``row = layer * lanes + lane``. All rows of a sequence lie in one extent of
the arena, ``[num_rows, width]``: entry ``[row, column]`` is the page of live tokens ``column * page_size`` onwards, and
entries past a row's end are the null page.

While a sequence is in lock-step every row holds all seen tokens, and its length is one number. From its first per-row
crop on it is *diverged* and ``lens[slot, row]`` counts. Positions need no storage as long as tokens are appended: a row
is ``kept`` positions (what a crop left) followed by a run of consecutive ones that ends at the newest token::

    row:   3  7  8 20 | 31 32 33 34            seen = 35
           kept       | run = lens - kept_len, starts at seen - run
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from allocator.arena import Arena, ragged
from allocator.errors import InvalidArgument, StaleHandle
from allocator.types import Bool, Int32, Int64, SeqId, Seqs

__all__ = ["PageTables"]

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_CLOSED = -1

AnyInt = TypeVar("AnyInt", np.int32, np.int64)


class PageTables:
    """Dense arrays over sequence slots (an internal index, reused after close) and the extents they own.

    Attributes:
        handles: int64 [capacity], the handle of each open slot, -1 for closed ones.
        seen: int64 [capacity], tokens appended so far.
        diverged: bool [capacity], whether `lens` counts.
        lens: int32 [capacity, num_rows], live tokens of each row of diverged sequences.
        kept_len, kept_off: int32 [capacity, num_rows], how many positions of a row are stored, and where in `kept`.
        kept: int32 [n] per slot, stored positions of all rows; None before the first crop. Replaced, never written.
        base, width: int64 [capacity], the extent in `arena`.
    """

    def __init__(self, num_rows: int, page_size: int, *, grows: Bool | None = None) -> None:
        self.num_rows, self.page_size = num_rows, page_size
        self.grows = np.ones(num_rows, np.bool_) if grows is None else grows
        self.uniform = bool(self.grows.all())
        self.arena = Arena(num_rows)
        self.free_slots: list[int] = []
        self.kept: list[Int32 | None] = []
        self.generation = np.zeros(0, np.int64)
        self.handles = np.zeros(0, np.int64)
        self.seen = np.zeros(0, np.int64)
        self.diverged = np.zeros(0, np.bool_)
        self.lens = np.zeros((0, num_rows), np.int32)
        self.kept_len = np.zeros((0, num_rows), np.int32)
        self.kept_off = np.zeros((0, num_rows), np.int32)
        self.base = np.zeros(0, np.int64)
        self.width = np.zeros(0, np.int64)
        self._add_slots()

    # Slots and handles

    def open(self) -> int:
        """A slot for a new, empty sequence. O(1) amortised."""
        if not self.free_slots:
            self._add_slots()
        slot = self.free_slots.pop()
        self.generation[slot] += 1
        self.handles[slot] = int(self.generation[slot]) << _INDEX_BITS | slot
        self.seen[slot] = 0
        self.diverged[slot] = not self.uniform
        self.lens[slot] = 0
        self.kept_len[slot] = 0
        self.kept[slot] = None
        return slot

    def _add_slots(self) -> None:
        old = len(self.handles)
        new = max(8, 2 * old)
        for name in ("generation", "handles", "seen", "diverged", "lens", "kept_len", "kept_off", "base", "width"):
            array = getattr(self, name)
            grown = np.zeros((new, *array.shape[1:]), array.dtype)
            grown[:old] = array
            setattr(self, name, grown)
        self.handles[old:] = _CLOSED
        self.kept.extend([None] * (new - old))
        self.free_slots.extend(range(new - 1, old - 1, -1))

    def close(self, slot: int) -> None:
        """Forgets a sequence; its handle is stale from now on. O(extent)."""
        self.handles[slot] = _CLOSED
        self.kept[slot] = None
        if self.width[slot]:
            self.arena.give(int(self.base[slot]), int(self.width[slot]))
        self.base[slot] = self.width[slot] = 0
        self.free_slots.append(slot)

    def handle(self, slot: int) -> SeqId:
        """The handle of an open slot."""
        return SeqId(int(self.handles[slot]))

    def slot_of(self, seq: SeqId) -> int:
        """The slot of an open sequence. O(1).

        Raises:
            StaleHandle: it is closed or never was.
        """
        if isinstance(seq, (int, np.integer)):
            slot = int(seq) & _INDEX_MASK
            if slot < len(self.handles) and self.handles[slot] == seq:
                return slot
        raise StaleHandle(seq)

    def slots_of(self, seqs: Seqs) -> Int64:
        """The slots of open, distinct sequences. O(len(seqs)).

        Raises:
            StaleHandle: one is closed or never was.
            InvalidArgument: one occurs twice.
        """
        try:
            ids = np.asarray(seqs, np.int64) if len(seqs) else np.zeros(0, np.int64)
        except (TypeError, ValueError, OverflowError):
            raise StaleHandle(seqs) from None
        if ids.ndim != 1:
            raise InvalidArgument("seqs", seqs, "must be one-dimensional")
        slots = ids & _INDEX_MASK
        stale = self.handles.take(slots, mode="clip") != ids
        if np.count_nonzero(stale):
            raise StaleHandle(int(ids[stale.argmax()]))
        if len(ids) > 1 and np.count_nonzero(np.bincount(slots)) < len(ids):
            raise InvalidArgument("seqs", seqs, "a sequence occurs twice")
        return slots

    def open_slots(self) -> Int64:
        """All open slots, ascending. O(capacity)."""
        slots: Int64 = np.flatnonzero(self.handles != _CLOSED)
        return slots

    # Lengths and tables

    def pages_for(self, lens: Int64) -> Int64:
        """Pages that hold `lens` tokens."""
        return self.page(lens + (self.page_size - 1))

    def page(self, index: npt.NDArray[AnyInt], out: Int64 | None = None) -> npt.NDArray[AnyInt]:
        """Column of the page that holds a live index."""
        if self.page_size & (self.page_size - 1):
            return np.floor_divide(index, index.dtype.type(self.page_size), out=out)
        return np.right_shift(index, index.dtype.type(self.page_size.bit_length() - 1), out=out)

    def offset(self, index: npt.NDArray[AnyInt]) -> npt.NDArray[AnyInt]:
        """Place of a live index in its page."""
        size = index.dtype.type(self.page_size)
        return index & (size - 1) if self.page_size & (self.page_size - 1) == 0 else index % size

    def lens_of(self, slots: Int64) -> Int32:
        """Live tokens, int32 [len(slots), num_rows]. A copy. O(len(slots) * num_rows)."""
        lens: Int32 = self.lens.take(slots, axis=0)
        in_step = ~self.diverged[slots]
        if in_step.any():
            lens[in_step] = self.seen[slots[in_step], None]
        return lens

    def row_lens(self, slot: int) -> Int64:
        """Live tokens of each row of one sequence, int64 [num_rows]. A copy."""
        if self.diverged[slot]:
            row: Int32 = self.lens[slot]
            return row.astype(np.int64)
        lens: Int64 = np.full(self.num_rows, self.seen[slot], np.int64)
        return lens

    def view(self, slot: int) -> Int32:
        """The tables of one sequence, [num_rows, width], not a copy. O(1)."""
        return self.arena.view(int(self.base[slot]), int(self.width[slot]))

    def pages_of(self, slot: int) -> Int32:
        """All pages of one sequence, row after row. A copy; no page occurs twice. O(pages)."""
        view = self.view(slot)
        if not self.diverged[slot]:
            return view[:, : -(-int(self.seen[slot]) // self.page_size)].flatten()
        used = self.pages_for(self.row_lens(slot))
        pages: Int32 = view[np.arange(view.shape[1]) < used[:, None]]
        return pages

    def ensure_width(self, slot: int, columns: int) -> None:
        """Makes room for `columns` pages a row. O(extent) when it has to move, else O(1)."""
        if columns > self.width[slot]:
            self.base[slot], self.width[slot] = self.arena.widen(int(self.base[slot]), int(self.width[slot]), columns)

    def diverge(self, slot: int) -> None:
        """Leaves lock-step: from now on every row has its own length. O(num_rows)."""
        if not self.diverged[slot]:
            self.lens[slot] = self.seen[slot]
            self.diverged[slot] = True

    def clone(self, slot: int, copy: int) -> None:
        """Gives an empty sequence the tables, lengths and positions of another. O(pages)."""
        self.seen[copy] = self.seen[slot]
        self.diverged[copy] = self.diverged[slot]
        self.lens[copy] = self.lens[slot]
        self.kept_len[copy] = self.kept_len[slot]
        self.kept_off[copy] = self.kept_off[slot]
        self.kept[copy] = self.kept[slot]
        if self.width[slot]:
            self.ensure_width(copy, int(self.width[slot]))
            self.view(copy)[:] = self.view(slot)

    # Positions

    def positions(self, slot: int, row: int) -> Int64:
        """Original position of each live token of a row, int64 [live]. A copy. O(live)."""
        live = int(self.lens[slot, row]) if self.diverged[slot] else int(self.seen[slot])
        stored = int(self.kept_len[slot, row])
        end = int(self.seen[slot]) if self.grows[row] else live
        positions = np.arange(end - live, end)
        if stored:
            positions[:stored] = self.kept_row(slot, row)
        return positions

    def kept_row(self, slot: int, row: int) -> Int32:
        """Stored positions of a row, int32 [kept_len], not a copy."""
        kept, start = self.kept[slot], int(self.kept_off[slot, row])
        assert kept is not None, "only rows with kept_len > 0 are asked for"
        return kept[start : start + int(self.kept_len[slot, row])]

    def set_kept(self, slot: int, rows: Int64, lens: Int64, positions: Int32) -> None:
        """Replaces the stored positions of `rows` by `positions`, `lens` of them each. O(stored positions)."""
        offsets = lens.cumsum() - lens
        old = self.kept[slot]
        if old is None or len(rows) == self.num_rows:
            self.kept_len[slot, rows], self.kept_off[slot, rows], self.kept[slot] = lens, offsets, positions
            return
        starts = self.kept_off[slot].astype(np.int64)
        starts[rows] = len(old) + offsets
        self.kept_len[slot, rows] = lens
        stored = self.kept_len[slot].astype(np.int64)
        self.kept[slot] = np.concatenate([old, positions])[ragged(starts, stored)]
        self.kept_off[slot] = stored.cumsum() - stored
