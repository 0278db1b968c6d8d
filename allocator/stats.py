"""Frozen statistics of an allocator. Every kind of waste is defined here, once.

All of them count slots of one row (one token's K and V in one layer or lane); a page holds `page_size` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from allocator.core import Core

__all__ = ["AllocatorStats", "collect"]


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
