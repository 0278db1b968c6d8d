"""Frozen statistics of an allocator: counters that cost nothing, and a measurement that walks the tables.

Slots are counted by row (one token's K and V in one layer or lane); a page holds `page_size` of them. The places where
slots can be are defined once for every scheme, in `waste`; here they are measured for this allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.core import Core
from allocator.types import Int64
from allocator.waste import Waste

__all__ = ["AllocatorStats", "Fragmentation", "collect", "measure"]


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """Counters at one moment, read in O(1).

    Attributes:
        total_pages: usable pages (without the null page) = free + active + cached.
        free_pages: on the free list.
        active_pages: referenced.
        cached_pages: unreferenced, published; taken when the free ones run out.
        reserved_pages: set aside for admitted sequences; they are part of free + cached.
        num_seqs: open sequences.
        live_tokens: live tokens over all rows (a shared page's tokens count for each sequence).
        table_entries: pages over all tables (a shared page counts for each sequence).
        tail_waste: slots of those pages that hold no live token = table_entries * page_size - live_tokens.
        table_bytes: memory of the page tables.
        prefix_queries, prefix_hits: tokens looked up in the prefix index, and found there.
        evicted_blocks, copied_pages, moved_slots, preemptions: how often each happened.
    """

    total_pages: int
    free_pages: int
    active_pages: int
    cached_pages: int
    reserved_pages: int
    num_seqs: int
    live_tokens: int
    table_entries: int
    tail_waste: int
    table_bytes: int
    prefix_queries: int
    prefix_hits: int
    evicted_blocks: int
    copied_pages: int
    moved_slots: int
    preemptions: int


def collect(core: Core) -> AllocatorStats:
    """The statistics now. O(1)."""
    pool, tables, counters = core.pool, core.tables, core.counters
    return AllocatorStats(
        total_pages=core.usable,
        free_pages=pool.num_free,
        active_pages=pool.num_active,
        cached_pages=pool.num_cached,
        reserved_pages=core.total_reserved,
        num_seqs=len(tables.handles) - len(tables.free_slots),
        live_tokens=counters.live_tokens,
        table_entries=counters.table_entries,
        tail_waste=counters.table_entries * core.page_size - counters.live_tokens,
        table_bytes=tables.arena.data.nbytes,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        evicted_blocks=counters.evicted_blocks,
        copied_pages=counters.copied_pages,
        moved_slots=counters.moved_slots,
        preemptions=counters.preemptions,
    )


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Where the slots are, and how well pages lie next to each other.

    Attributes:
        waste: live, internal, reservation and free slots of the pool; a shared slot counts once, cached pages are free.
        tail_slots: part of internal: slots of referenced pages that hold no live token.
        hole_slots: part of internal: tokens behind their layer's window, in a page with tokens that are not.
        imbalance: mean over sequences of ``1 - mean / max`` of their rows' live lengths; 0 in lock-step.
        mean_run: mean number of pages in a row with consecutive ids; 1 is scattered.
    """

    waste: Waste
    tail_slots: int
    hole_slots: int
    imbalance: float
    mean_run: float


def measure(core: Core, windows: Int64) -> Fragmentation:
    """The measurement; see `BlockAllocator.fragmentation`. O(table entries)."""
    tables, pool, size = core.tables, core.pool, core.page_size
    tokens = np.zeros(pool.num_pages, np.int64)
    hidden = np.full(pool.num_pages, size, np.int64)  # tokens at the start of a page that none of its owners can see
    spreads, runs, entries = [], 0, 0
    for slot in tables.open_slots().tolist():
        lens, view = tables.row_lens(slot), tables.view(slot)
        columns = np.arange(view.shape[1]) * size
        used = columns < lens[:, None]
        pages = view[used]
        np.maximum.at(tokens, pages, np.minimum(lens[:, None] - columns, size)[used])
        np.minimum.at(hidden, pages, np.maximum(_behind(core, slot, windows)[:, None] - columns, 0)[used])
        entries += len(pages)
        runs += int(used[:, :1].sum() + (used[:, 1:] & (view[:, 1:] != view[:, :-1] + 1)).sum())
        if int(lens.max()):
            spreads.append(1 - float(lens.mean()) / int(lens.max()))
    for pinned in core.pins.values():  # a transfer reads them whole
        tokens[pinned], hidden[pinned] = size, 0
    held, holes = int(tokens.sum()), int(np.minimum(hidden, tokens).sum())
    tail = pool.num_active * size - held
    waste = Waste(core.usable * size, held - holes, internal=tail + holes, reservation=core.total_reserved * size)
    mean_run = entries / runs if runs else 1.0
    return Fragmentation(waste, tail, holes, float(np.mean(spreads)) if spreads else 0.0, mean_run)


def _behind(core: Core, slot: int, windows: Int64) -> Int64:
    """Live tokens of each row that no later token can see."""
    tables = core.tables
    behind = np.zeros(core.num_rows, np.int64)
    for row in np.flatnonzero(windows).tolist():
        behind[row] = np.searchsorted(tables.positions(slot, row), int(tables.seen[slot]) - int(windows[row]) + 1)
    return behind
