"""Grow and shrink: pages leave the end of the pool, and what they hold moves into free ones below."""

from __future__ import annotations

import numpy as np

from allocator.core import Core
from allocator.errors import OutOfPages, PagesPinned
from allocator.plan import CopyPages, Plan

__all__ = ["resize", "shrink"]


def resize(core: Core, num_pages: int) -> None:
    """Gives pool and index another number of pages. Pages that vanish are free. O(num_pages)."""
    core.pool.resize(num_pages)
    if core.prefix is not None:
        core.prefix.resize()


def shrink(core: Core, n: int) -> Plan:
    """Removes pages; see `PoolLifecycle.shrink`."""
    pool = core.pool
    left = pool.num_pages - n
    needed = pool.num_active + core.total_reserved
    if needed > left - 1:
        raise OutOfPages(needed, left - 1, core.usable)
    pinned = np.concatenate([np.empty(0, np.int32), *core.pins.values()])
    moving_pins = int(np.count_nonzero(np.unique(pinned) >= left))
    if moving_pins:
        raise PagesPinned(moving_pins)
    if core.prefix is not None:
        core.counters.evicted_blocks += core.prefix.evict(pool.num_active + pool.num_cached - (left - 1))
    src = (left + np.flatnonzero((pool.refs[left:] > 0) | (pool.block_of[left:] != 0))).astype(np.int32)
    dst = np.sort(pool.free_pages())[: len(src)]
    remap = np.arange(pool.num_pages, dtype=np.int32)
    remap[src] = dst
    pool.relocate(src, dst)
    core.tables.arena.data[:] = remap[core.tables.arena.data]
    for slot in core.tables.open_slots().tolist():
        core.log_rewrite(slot)
    if core.prefix is not None:
        core.prefix.pages = remap[core.prefix.pages]
    resize(core, left)
    core.counters.copied_pages += len(src)
    return Plan(CopyPages(src, dst))
