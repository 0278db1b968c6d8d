"""`check_core`: every invariant of the allocator, asserted over the whole state. O(pages + table entries)."""

from __future__ import annotations

import numpy as np

from allocator.core import Core
from allocator.errors import BrokenInvariant
from allocator.prefix import PrefixIndex
from allocator.types import Int32

__all__ = ["check_core"]


def _expect(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise BrokenInvariant(message)


def check_core(core: Core) -> None:
    """Raises `BrokenInvariant` at the first thing that does not hold."""
    entries = [_check_sequence(core, slot) for slot in core.tables.open_slots().tolist()]
    _check_counters(core, entries)
    _check_pool(core, [*entries, *core.pins.values()])
    if core.prefix is not None:
        _check_index(core, core.prefix)


def _check_sequence(core: Core, slot: int) -> Int32:
    tables = core.tables
    lens, view, seen = tables.row_lens(slot), tables.view(slot), int(tables.seen[slot])
    used = tables.pages_for(lens)
    inside = np.arange(view.shape[1]) < used[:, None]
    _expect((view[~inside] == 0).all(), f"slot {slot}: entries past the end of a row are not the null page")
    _expect(int(used.max()) <= view.shape[1], f"slot {slot}: a row is longer than its extent")
    pages: Int32 = view[inside]
    _expect(bool((pages > 0).all() and (pages < core.pool.num_pages).all()), f"slot {slot}: page id out of range")
    _expect(len(np.unique(pages)) == len(pages), f"slot {slot}: a page occurs twice")
    for row in range(tables.num_rows if tables.diverged[slot] else 0):
        positions = tables.positions(slot, row)
        _expect(len(positions) == lens[row], f"slot {slot} row {row}: one position a live token")
        _expect((np.diff(positions) > 0).all(), f"slot {slot} row {row}: positions do not increase")
        if tables.grows[row] and len(positions):
            _expect(positions[0] >= 0 and positions[-1] < seen, f"slot {slot} row {row}: position out of range")
    if not core.frozen_tail[slot]:
        tails = np.flatnonzero(core.written_rows(lens[None].astype(np.int32))[0])
        frozen = core.pool.frozen(view[tails, used[tails] - 1])
        _expect(not frozen.any(), f"slot {slot}: an unsuspected tail page is frozen")
    return pages


def _check_counters(core: Core, entries: list[Int32]) -> None:
    tables, counters = core.tables, core.counters
    slots = tables.open_slots()
    _expect(len(slots) + len(tables.free_slots) == len(tables.handles), "slots are neither open nor free")
    _expect(counters.live_tokens == int(tables.lens_of(slots).sum()), "live token counter is wrong")
    _expect(counters.table_entries == sum(map(len, entries)), "table entry counter is wrong")
    _expect(core.total_reserved == int(core.reserved.sum()), "reservation counter is wrong")
    _expect(bool((core.reserved >= 0).all()) and core.total_reserved <= core.available, "reservations exceed the pool")


def _check_pool(core: Core, entries: list[Int32]) -> None:
    pool = core.pool
    counted = np.bincount(np.concatenate([np.empty(0, np.int32), *entries]), minlength=pool.num_pages)
    _expect((counted == pool.refs).all(), "a reference count is not the number of table entries and pins")
    free = pool.free_pages()
    _expect(len(free) == pool.num_free and len(np.unique(free)) == len(free), "the free list has duplicates")
    _expect(not (free == 0).any(), "the null page is free")
    _expect((pool.refs[free] == 0).all() and (pool.block_of[free] == 0).all(), "a free page is referenced or published")
    cached = int(np.count_nonzero((pool.refs == 0) & (pool.block_of != 0)))
    _expect(cached == pool.num_cached, "cached page counter is wrong")
    _expect(pool.num_published == int(np.count_nonzero(pool.block_of)), "published page counter is wrong")
    active = int(np.count_nonzero(pool.refs))
    _expect(len(free) + active + cached + 1 == pool.num_pages, "free + active + cached + 1 is not all pages")


def _check_index(core: Core, index: PrefixIndex) -> None:
    pool = core.pool
    blocks = np.array(sorted(index.by_hash.values()), np.int64)
    _expect(len(np.unique(blocks)) == len(blocks), "two hashes name one block")
    for digest, block in index.by_hash.items():
        _expect(index.hash_of(block) == digest, f"block {block}: hash to block and block to hash disagree")
    pages = index.pages[blocks]
    _expect((pool.block_of[pages] == blocks[:, None]).all(), "page to block and block to pages disagree")
    _expect(pages.size == pool.num_published, "a published page belongs to no block")
    idle = (pool.refs[pages] == 0).sum(axis=1)
    _expect((index.idle[blocks] == idle).all() and index.idle.sum() == idle.sum(), "a block's idle count is wrong")
    listed = list(index.lru)
    _expect(sorted(listed) == blocks[idle > 0].tolist(), "the LRU lists are not exactly the evictable blocks")
    free = index.free_blocks.pages()
    _expect(len(free) + len(blocks) + 1 == len(index.idle), "blocks are neither free nor published")
    _expect(len(np.intersect1d(free, blocks)) == 0, "a published block is free")
    if index.partial is not None:
        _expect(sorted(index.partial.parents) == blocks.tolist(), "partial index and published blocks disagree")
