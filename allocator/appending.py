"""Append: slots for new tokens in every row of many sequences at once, copying frozen tails first.

Pure arithmetic in `demand`, which changes nothing and serves `can_append` too; `append` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.arena import ragged
from allocator.core import Core
from allocator.errors import OutOfPages
from allocator.plan import EMPTY_PLAN, CopyPages, Plan
from allocator.table import PageTables
from allocator.types import Admission, Bool, Int32, Int64, Verdict

__all__ = ["Demand", "Entries", "append", "can_append", "demand", "write_cross"]

_LONG_RUN = 32


@dataclass(frozen=True, slots=True)
class Entries:
    """Places in the page tables, int64 [k] each."""

    slots: Int64
    rows: Int64
    columns: Int64

    def places(self, tables: PageTables) -> Int64:
        """Where the entries are in the arena."""
        places: Int64 = self.rows * tables.width.take(self.slots)
        places += tables.base.take(self.slots)
        places += self.columns
        return places


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that an append takes, as runs of new columns and as copies of frozen tails.

    Attributes:
        runs: where each run of new pages begins.
        lengths: int64 [k], pages of each run.
        tails: entries whose page must be copied before it is written.
        diverged: int64, slots of the diverged sequences.
        lens: int32 [len(diverged), num_rows], their lengths after the append.
        fresh, needed: pages in the runs; pages in all.
    """

    runs: Entries
    lengths: Int64
    tails: Entries
    diverged: Int64
    lens: Int32
    fresh: int
    needed: int


_NONE = np.zeros(0, np.int64)
_NO_ENTRIES = Entries(_NONE, _NONE, _NONE)


def demand(core: Core, slots: Int64, counts: Int64) -> Demand:
    """Computes what appending `counts` tokens takes. O(rows of diverged sequences + new pages), changes nothing."""
    is_diverged = core.tables.diverged[slots]
    num_diverged = np.count_nonzero(is_diverged)  # much cheaper than any() and all() on few entries
    if num_diverged == 0:
        diverged, lens = _NONE, np.zeros((0, core.num_rows), np.int32)
        runs, lengths = _new_columns_in_step(core, slots, counts)
    elif num_diverged == len(slots):
        diverged = slots
        runs, lengths, lens = _new_columns(core, slots, counts)
    else:
        diverged = slots[is_diverged]
        runs, lengths, lens = _new_columns(core, diverged, counts[is_diverged])
        more, more_lengths = _new_columns_in_step(core, slots[~is_diverged], counts[~is_diverged])
        runs, lengths = _join(runs, more), np.concatenate([lengths, more_lengths])
    tails = _frozen_tails(core, slots, counts)
    fresh = int(lengths.sum())
    return Demand(runs, lengths, tails, diverged, lens, fresh, fresh + len(tails.slots))


def _join(one: Entries, other: Entries) -> Entries:
    return Entries(
        np.concatenate([one.slots, other.slots]),
        np.concatenate([one.rows, other.rows]),
        np.concatenate([one.columns, other.columns]),
    )


def _new_columns_in_step(core: Core, slots: Int64, counts: Int64) -> tuple[Entries, Int64]:
    """Runs of sequences in lock-step: all rows of a sequence are alike."""
    tables, num_rows = core.tables, core.num_rows
    after = tables.seen[slots] + counts
    growing = (tables.offset(after - 1) < counts).nonzero()[0]  # the last new token is near the start of its page
    if len(growing) == 0:
        return _NO_ENTRIES, _NONE
    after, counts = after[growing], counts[growing]
    columns = tables.pages_for(after - counts)
    lengths = tables.pages_for(after) - columns
    rows = np.broadcast_to(np.arange(num_rows), (len(growing), num_rows)).ravel()
    return Entries(slots[growing].repeat(num_rows), rows, columns.repeat(num_rows)), lengths.repeat(num_rows)


def _new_columns(core: Core, slots: Int64, counts: Int64) -> tuple[Entries, Int64, Int32]:
    """Runs of diverged sequences, and the lengths of all their rows after the append."""
    tables = core.tables
    lens: Int32 = tables.lens.take(slots, axis=0)
    if tables.uniform and np.count_nonzero(counts == 1) == len(counts):  # a decode step: full rows grow by one page
        full = (tables.offset(lens) == 0).ravel().nonzero()[0]
        batch = full // core.num_rows
        columns = tables.page(lens.ravel().take(full).astype(np.int64))
        lens += np.int32(1)
        return Entries(slots.take(batch), full - batch * core.num_rows, columns), np.ones(len(full), np.int64), lens
    added: Int32 = counts.astype(np.int32)[:, None]
    if (counts == counts[0]).all():
        added = added[:1]  # one number for all: numpy's loops are twice as fast without a column to broadcast
    if not tables.uniform:
        added = added * tables.grows + (core.state_rows & (lens == 0) & (added > 0))
    lens += added
    growing = np.flatnonzero(tables.offset(lens - 1) < added)
    batch = growing // core.num_rows
    rows = growing - batch * core.num_rows
    ends = lens.ravel().take(growing).astype(np.int64)
    columns = tables.pages_for(ends - (counts[batch] if tables.uniform else added[batch, rows]))
    return Entries(slots.take(batch), rows, columns), tables.pages_for(ends) - columns, lens


def _frozen_tails(core: Core, slots: Int64, counts: Int64) -> Entries:
    """Entries that this append would write into although their page is frozen. O(rows of suspected sequences)."""
    suspected = core.frozen_tail[slots]
    if np.count_nonzero(suspected) == 0:
        return _NO_ENTRIES
    suspects = slots[suspected & (counts > 0)]
    tables = core.tables
    lens = tables.lens_of(suspects)
    batch, rows = np.nonzero(core.written_rows(lens))
    written = Entries(suspects[batch], rows, (lens[batch, rows].astype(np.int64) - 1) // core.page_size)
    copied = np.flatnonzero(_must_copy(core, tables.arena.data[written.places(tables)]))
    return Entries(written.slots[copied], written.rows[copied], written.columns[copied])


def _must_copy(core: Core, pages: Int32) -> Bool:
    """Frozen pages, but where all owners of an unpublished page are in the batch the last of them keeps it."""
    frozen = core.pool.frozen(pages)
    distinct, last, times = np.unique(pages[::-1], return_index=True, return_counts=True)
    kept = (core.pool.refs[distinct] == times) & (core.pool.block_of[distinct] == 0)
    frozen[len(pages) - 1 - last[kept]] = False
    return frozen


def can_append(core: Core, slots: Int64, counts: Int64) -> Admission:
    """Answers without changing anything; see `BlockAllocator.can_append`."""
    wanted = demand(core, slots, counts)
    margin = 0 if core.appended[slots].all() else core.watermark
    available = max(0, _available_to(core, slots, wanted) - margin)
    verdict = Verdict.OK
    if wanted.needed > available:
        held = np.unique(np.concatenate([core.tables.pages_of(int(slot)) for slot in slots]))
        fits_alone = wanted.fresh + len(held) <= core.usable - margin
        verdict = Verdict.LATER if fits_alone else Verdict.NEVER
    return Admission(verdict, wanted.needed, available, core.usable)


def _available_to(core: Core, slots: Int64, wanted: Demand) -> int:
    """Pages that this append may take: those not reserved, and those reserved for the sequences that need them."""
    if core.total_reserved == 0:
        return core.available
    return core.available - core.total_reserved + int(_from_reservation(core, slots, wanted).sum())


def _from_reservation(core: Core, slots: Int64, wanted: Demand) -> Int64:
    num_slots = len(core.reserved)
    per_slot = np.bincount(wanted.runs.slots, wanted.lengths, minlength=num_slots).astype(np.int64)
    per_slot += np.bincount(wanted.tails.slots, minlength=num_slots)
    return np.minimum(per_slot, core.reserved)[slots]


def append(core: Core, slots: Int64, counts: Int64) -> Plan:
    """Carries out an append; see `BlockAllocator.append`."""
    tables = core.tables
    wanted = demand(core, slots, counts)
    available = _available_to(core, slots, wanted)
    if wanted.needed > available:
        raise OutOfPages(wanted.needed, max(0, available), core.usable)
    if core.total_reserved:
        used = _from_reservation(core, slots, wanted)
        core.reserved[slots] -= used
        core.total_reserved -= int(used.sum())
    plan = _take_pages(core, wanted) if wanted.needed else EMPTY_PLAN
    grown = slots if np.count_nonzero(counts) == len(counts) else slots[counts > 0]
    core.appended[grown] = True
    core.frozen_tail[grown] = False
    core.counters.live_tokens += _new_live_tokens(core, counts, wanted)
    tables.seen[slots] += counts
    tables.lens[wanted.diverged] = wanted.lens
    return plan


def _new_live_tokens(core: Core, counts: Int64, wanted: Demand) -> int:
    if core.tables.uniform:
        return int(counts.sum()) * core.num_rows
    return int(wanted.lens.sum(dtype=np.int64) - core.tables.lens[wanted.diverged].sum(dtype=np.int64))


def _take_pages(core: Core, wanted: Demand) -> Plan:
    """Writes the pages of a demand that fits into the tables."""
    tables, runs, lengths = core.tables, wanted.runs, wanted.lengths
    if wanted.fresh:
        _make_room(core, runs.slots, runs.columns + lengths)
        pages = core.take(wanted.fresh, after=_last_pages(core, runs), lengths=lengths)
        _write_runs(tables, runs, lengths, pages)
        if core.deltas is not None:
            core.deltas.grow(runs.slots, runs.rows, runs.columns, lengths, pages)
        core.counters.table_entries += wanted.fresh
    copies, freed = _copy_tails(core, wanted.tails) if len(wanted.tails.slots) else (EMPTY_PLAN.copies, 0)
    return Plan(copies, allocated=wanted.needed, freed=freed)


def _make_room(core: Core, slots: Int64, ends: Int64) -> None:
    """Widens the extents of `slots` to `ends` columns where they are narrower. O(k), plus the extents that move."""
    tight = (ends > core.tables.width.take(slots)).nonzero()[0]
    if len(tight) == 0:
        return
    tight = tight[ends[tight].argsort()]
    for slot, end in dict(zip(slots[tight].tolist(), ends[tight].tolist(), strict=True)).items():  # its largest end
        core.tables.ensure_width(slot, end)


def _copy_tails(core: Core, tails: Entries) -> tuple[CopyPages, int]:
    """Replaces frozen pages by copies. Lets go of the old ones last, so that no page is both source and target."""
    tables, places = core.tables, tails.places(core.tables)
    old, new = tables.arena.data[places], core.take(len(places))
    tables.arena.data[places] = new
    if core.deltas is not None:
        core.deltas.grow(tails.slots, tails.rows, tails.columns, np.ones_like(tails.slots), new)
    core.counters.copied_pages += len(new)
    return CopyPages(old, new), core.release(old)


def _last_pages(core: Core, runs: Entries) -> Int32 | None:
    """The page before each new run, 0 at the start of a row; None for a placement that takes no hints."""
    if core.pool.placement == "lifo":
        return None
    last = np.zeros(len(runs.slots), np.int32)
    going_on = runs.columns > 0
    last[going_on] = core.tables.arena.data[runs.places(core.tables)[going_on] - 1]
    return last


def write_cross(core: Core, slot: int, rows: Int64, count: int) -> Plan:
    """Gives the write-once `rows` of a sequence slots for `count` tokens; see `BlockAllocator.write_cross`."""
    tables = core.tables
    pages = -(-count // core.page_size)
    core.require(pages * len(rows))
    entries = Entries(np.full(len(rows), slot), rows, np.zeros(len(rows), np.int64))
    total = pages * len(rows)
    plan = _take_pages(
        core, Demand(entries, np.full(len(rows), pages), _NO_ENTRIES, _NONE, np.zeros((0, 0), np.int32), total, total)
    )
    tables.lens[slot, rows] = count
    core.cross_written[slot] = True
    core.counters.live_tokens += count * len(rows)
    return plan


def _write_runs(tables: PageTables, runs: Entries, lengths: Int64, pages: Int32) -> None:
    """Writes consecutive parts of `pages` to the runs. O(pages)."""
    if len(pages) == len(lengths):
        tables.arena.data[runs.places(tables)] = pages
        return
    if len(pages) < _LONG_RUN * len(lengths):
        tables.arena.data[ragged(runs.places(tables), lengths)] = pages
        return
    done = 0
    entries = np.stack([runs.slots, runs.rows, runs.columns, lengths], axis=1)
    for slot, row, start, length in entries.tolist():
        columns = slice(start, start + length)
        if tables.diverged[slot]:
            tables.view(slot)[row, columns] = pages[done : done + length]
            done += length
        elif row == 0:  # in lock-step all rows grow alike
            total = length * tables.num_rows
            tables.view(slot)[:, columns] = pages[done : done + total].reshape(-1, length)
            done += total
