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
from allocator.types import Admission, Bool, Int32, Int64, Verdict

__all__ = ["Demand", "append", "can_append", "demand"]

_LONG_RUN = 32


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that an append takes, as runs of new columns and as copies of frozen tails.

    Attributes:
        slots, rows, columns, lengths: int64 [k]; `lengths` pages from `columns` on in one row each.
        tail_slots, tail_rows, tail_columns: int64 [m], entries whose page must be copied before it is written.
        in_step, diverged: int64, positions in the batch of the sequences in either state.
        lens: int32 [len(diverged), num_rows], lengths of the diverged ones after the append.
        fresh, needed: pages in the runs; pages in all.
    """

    slots: Int64
    rows: Int64
    columns: Int64
    lengths: Int64
    tail_slots: Int64
    tail_rows: Int64
    tail_columns: Int64
    in_step: Int64
    diverged: Int64
    lens: Int32
    fresh: int
    needed: int


def demand(core: Core, slots: Int64, counts: Int64) -> Demand:
    """Computes what appending `counts` tokens takes. O(rows of diverged sequences + new pages), changes nothing."""
    tables, rows = core.tables, core.num_rows
    is_diverged = tables.diverged[slots]
    if is_diverged.all():
        in_step, diverged = np.zeros(0, np.int64), np.arange(len(slots))
    else:
        in_step, diverged = np.flatnonzero(~is_diverged), np.flatnonzero(is_diverged)
    pieces: list[tuple[Int64, Int64, Int64, Int64]] = []
    lens = np.zeros((0, rows), np.int32)
    if len(in_step):
        pieces.append(_new_columns_in_step(core, slots[in_step], counts[in_step]))
    if len(diverged):
        lens = _lens_after(core, slots[diverged], counts[diverged])
        pieces.append(_new_columns(core, slots[diverged], lens))
    run_slots, run_rows, columns, lengths = pieces[0] if len(pieces) == 1 else _join(pieces)
    tails = _frozen_tails(core, slots, counts)
    fresh = int(lengths.sum())
    return Demand(run_slots, run_rows, columns, lengths, *tails, in_step, diverged, lens, fresh, fresh + len(tails[0]))


def _join(pieces: list[tuple[Int64, Int64, Int64, Int64]]) -> tuple[Int64, Int64, Int64, Int64]:
    slots, rows, columns, lengths = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return slots, rows, columns, lengths


def _new_columns_in_step(core: Core, slots: Int64, counts: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    tables, num_rows = core.tables, core.num_rows
    seen = tables.seen[slots]
    held = tables.pages_for(seen)
    extra = tables.pages_for(seen + counts) - held
    growing = np.flatnonzero(extra)
    rows = np.tile(np.arange(num_rows), len(growing))
    return (
        np.repeat(slots[growing], num_rows),
        rows,
        np.repeat(held[growing], num_rows),
        np.repeat(extra[growing], num_rows),
    )


def _lens_after(core: Core, slots: Int64, counts: Int64) -> Int32:
    tables = core.tables
    if tables.uniform:
        after: Int32 = tables.lens[slots]
        after += counts.astype(np.int32)[:, None]
        return after
    lens: Int32 = tables.lens[slots]
    lens += np.where(tables.grows, counts[:, None], 0).astype(np.int32)
    lens[:, core.state_rows] = np.maximum(lens[:, core.state_rows], (counts > 0)[:, None])
    return lens


def _new_columns(core: Core, slots: Int64, after: Int32) -> tuple[Int64, Int64, Int64, Int64]:
    tables, size = core.tables, core.page_size
    columns = (after + np.int32(size - 1)) // np.int32(size)
    held = (tables.lens[slots] + np.int32(size - 1)) // np.int32(size)
    columns -= held
    growing = np.flatnonzero(columns)
    batch, rows = np.divmod(growing, core.num_rows)
    return slots[batch], rows, held.ravel()[growing].astype(np.int64), columns.ravel()[growing].astype(np.int64)


def _frozen_tails(core: Core, slots: Int64, counts: Int64) -> tuple[Int64, Int64, Int64]:
    """Entries that this append would write into although their page is frozen. O(rows of suspected sequences)."""
    suspects = slots[core.frozen_tail[slots] & (counts > 0)]
    if len(suspects) == 0:
        none = np.zeros(0, np.int64)
        return none, none, none
    tables, size = core.tables, core.page_size
    lens = tables.lens_of(suspects)
    written = core.written_rows(lens)
    batch, rows = np.nonzero(written)
    slots, columns = suspects[batch], (lens[batch, rows].astype(np.int64) - 1) // size
    pages = tables.arena.data[tables.base[slots] + rows * tables.width[slots] + columns]
    frozen = np.flatnonzero(_must_copy(core, pages))
    return slots[frozen], rows[frozen], columns[frozen]


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
    per_slot = np.bincount(wanted.slots, wanted.lengths, minlength=len(core.reserved)).astype(np.int64)
    per_slot += np.bincount(wanted.tail_slots, minlength=len(core.reserved))
    return np.minimum(per_slot, core.reserved)[slots]


def append(core: Core, slots: Int64, counts: Int64) -> Plan:
    """Carries out an append; see `BlockAllocator.append`."""
    wanted = demand(core, slots, counts)
    available = _available_to(core, slots, wanted)
    if wanted.needed > available:
        raise OutOfPages(wanted.needed, max(0, available), core.usable)
    if core.total_reserved:
        used = _from_reservation(core, slots, wanted)
        core.reserved[slots] -= used
        core.total_reserved -= int(used.sum())
    plan = EMPTY_PLAN
    if wanted.needed:
        plan = _take_pages(core, wanted)
    tables = core.tables
    tables.seen[slots] += counts
    grown = slots[counts > 0]
    core.appended[grown] = True
    core.frozen_tail[grown] = False
    if len(wanted.diverged):
        moved = slots[wanted.diverged]
        core.counters.live_tokens += int(wanted.lens.sum()) - int(tables.lens[moved].sum())
        tables.lens[moved] = wanted.lens
    if len(wanted.in_step):
        core.counters.live_tokens += int(counts[wanted.in_step].sum()) * core.num_rows
    return plan


def _take_pages(core: Core, wanted: Demand) -> Plan:
    tables = core.tables
    # The frozen pages are let go only after fresh ones were taken, so that no page is both source and target.
    fresh = core.take(wanted.fresh, after=_last_pages(core, wanted), lengths=wanted.lengths)
    copies, freed = EMPTY_PLAN.copies, 0
    if wanted.fresh:
        last = wanted.columns + wanted.lengths
        tight = np.flatnonzero(last > tables.width[wanted.slots])
        for slot, end in zip(wanted.slots[tight].tolist(), last[tight].tolist(), strict=True):
            tables.ensure_width(slot, end)
        starts = tables.base[wanted.slots] + wanted.rows * tables.width[wanted.slots] + wanted.columns
        _scatter(tables.arena.data, starts, wanted.lengths, fresh)
        if core.deltas is not None:
            core.deltas.grow(wanted.slots, wanted.rows, wanted.columns, wanted.lengths, fresh)
    if len(wanted.tail_slots):
        slots = wanted.tail_slots
        at = tables.base[slots] + wanted.tail_rows * tables.width[slots] + wanted.tail_columns
        old, new = tables.arena.data[at], core.take(len(slots))
        tables.arena.data[at] = new
        if core.deltas is not None:
            core.deltas.grow(slots, wanted.tail_rows, wanted.tail_columns, np.ones_like(slots), new)
        copies = CopyPages(old, new)
        freed = core.release(old)
        core.counters.copied_pages += len(new)
    core.counters.table_entries += wanted.fresh
    return Plan(copies, allocated=wanted.needed, freed=freed)


def _last_pages(core: Core, wanted: Demand) -> Int32 | None:
    """The page before each new run, 0 at the start of a row; None for a placement that takes no hints."""
    if core.pool.placement == "lifo":
        return None
    tables = core.tables
    before = tables.base[wanted.slots] + wanted.rows * tables.width[wanted.slots] + wanted.columns - 1
    last = np.zeros(len(before), np.int32)
    going_on = wanted.columns > 0
    last[going_on] = tables.arena.data[before[going_on]]
    return last


def write_cross(core: Core, slot: int, rows: Int64, count: int) -> Plan:
    """Gives the write-once `rows` of a sequence slots for `count` tokens; see `BlockAllocator.write_cross`."""
    tables = core.tables
    none = np.zeros(0, np.int64)
    pages = -(-count // core.page_size)
    lens: Int32 = tables.lens[[slot]]
    lens[0, rows] = count
    slots, columns, lengths = (np.full(len(rows), value) for value in (slot, 0, pages))
    total = pages * len(rows)
    core.require(total)
    wanted = Demand(slots, rows, columns, lengths, none, none, none, none, np.zeros(1, np.int64), lens, total, total)
    plan = _take_pages(core, wanted) if total else EMPTY_PLAN
    tables.lens[slot] = lens[0]
    core.cross_written[slot] = True
    core.counters.live_tokens += count * len(rows)
    return plan


def _scatter(data: Int32, starts: Int64, lengths: Int64, pages: Int32) -> None:
    """Writes consecutive parts of `pages` to the ranges of `data`. O(pages)."""
    if len(pages) == len(starts):
        data[starts] = pages
    elif len(pages) < _LONG_RUN * len(starts):
        data[ragged(starts, lengths)] = pages
    else:
        done = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            data[start : start + length] = pages[done : done + length]
            done += length
