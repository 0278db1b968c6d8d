"""Crop: any subset of the live tokens of any rows of a sequence stays, compacted to the front.

The survivors of a row fill its first ``ceil(keep / page_size)`` pages again. Each of these *target* pages is found by
the first rule that fits:

1. **intact** — its survivors are exactly one old page, in order: that page stays, even when frozen; nothing moves.
   (A prefix, or a keep-list that drops whole pages only, is intact everywhere.)
2. **in place** — the row's own page at this column, if nobody else reads it: survivors move inside it.
3. **recycled** — a page that this crop lets go and nobody else reads.
4. **fresh** — a page from the pool; only frozen pages can make this necessary.

Frozen pages are only ever read. Fresh pages are taken before anything changes.
"""

from __future__ import annotations

import numpy as np

from allocator.arena import ragged
from allocator.core import Core
from allocator.plan import EMPTY_PLAN, MoveSlots, Plan
from allocator.types import Bool, Int32, Int64

__all__ = ["crop"]


def crop(core: Core, slot: int, rows: Int64, keep: Int64, counts: Int64) -> Plan:
    """Keeps the live indices `keep` (`counts` of them for each of `rows`, concatenated). O(kept tokens + pages)."""
    tables, size = core.tables, core.page_size
    lens = tables.row_lens(slot)[rows]
    if (counts == lens).all():
        return EMPTY_PLAN
    num_old, num_targets = tables.pages_for(lens), tables.pages_for(counts)
    places = tables.base[slot] + rows * tables.width[slot]
    old_pages: Int32 = tables.arena.data[ragged(places, num_old)]
    old_start = num_old.cumsum() - num_old

    column = ragged(np.zeros_like(num_targets), num_targets)
    first = np.repeat(counts.cumsum() - counts, num_targets) + column * size
    held = np.minimum(size, np.repeat(counts, num_targets) - column * size)
    head = keep[first]
    intact = (tables.offset(head) == 0) & (keep[first + held - 1] - head == held - 1)
    used = np.zeros(len(old_pages), np.bool_)
    row_start = np.repeat(old_start, num_targets)
    targets, allocated = _target_pages(core, old_pages, row_start + column, row_start + head // size, intact, used)

    changed = np.flatnonzero(~intact)
    if 2 * len(changed) < len(targets):
        chosen = ragged(first[changed], held[changed])
        sources = keep[chosen] + np.repeat(row_start[changed] * size, held[changed])
        moves = _moves(core, old_pages, sources, ragged(targets[changed].astype(np.int64) * size, held[changed]))
    else:  # most pages change: whole rows at once are cheaper, and what is in place is sorted out in the end
        sources = np.repeat(old_start * size, counts)
        sources += keep
        moves = _moves(core, old_pages, sources, ragged(targets.astype(np.int64) * size, held))
    positions = _positions(core, slot, rows, keep, counts)
    tables.diverge(slot)
    tables.arena.data[ragged(places + num_targets, num_old - num_targets)] = 0
    tables.arena.data[ragged(places, num_targets)] = targets
    tables.lens[slot, rows] = counts
    tables.set_kept(slot, rows, counts, positions)
    core.frozen_tail[slot] = True
    core.log_rewrite(slot)
    core.counters.table_entries -= len(old_pages) - len(targets)
    core.counters.live_tokens -= int(lens.sum() - counts.sum())
    core.counters.moved_slots += len(moves)
    return Plan(moves=moves, allocated=allocated, freed=core.release(old_pages[~used]))


def _target_pages(
    core: Core, old_pages: Int32, own: Int64, reused: Int64, intact: Bool, used: Bool
) -> tuple[Int32, int]:
    """The page of every target, by the rules of the module; marks old pages that stay in `used`."""
    if intact.all():
        used[reused] = True
        return old_pages[reused], 0
    targets = np.empty(len(own), np.int32)
    stay = reused[intact]
    targets[intact] = old_pages[stay]
    used[stay] = True
    writable = ~core.pool.frozen(old_pages)
    in_place = ~intact & writable[own] & ~used[own]
    targets[in_place] = old_pages[own[in_place]]
    used[own[in_place]] = True
    homeless = np.flatnonzero(~intact & ~in_place)
    if len(homeless) == 0:
        return targets, 0
    recycled = np.flatnonzero(writable & ~used)[: len(homeless)]
    missing = len(homeless) - len(recycled)
    core.require(missing)
    used[recycled] = True
    targets[homeless] = np.concatenate([old_pages[recycled], core.take(missing)])
    return targets, missing


def _moves(core: Core, pages: Int32, tokens: Int64, dst: Int64) -> MoveSlots:
    """Moves of tokens to the slots `dst`, but for those that are there already. O(tokens).

    Tokens are numbered through all rows: page q of `pages` holds tokens ``q * page_size`` onwards. So a token's slot is
    its number plus a shift that depends on its page alone.
    """
    shift = (pages - np.arange(len(pages))) * core.page_size
    src = shift.take(core.tables.page(tokens), mode="wrap")  # in range anyway; this mode is the fastest
    src += tokens
    moving = src != dst
    return MoveSlots(src[moving], dst[moving])


def _positions(core: Core, slot: int, rows: Int64, keep: Int64, counts: Int64) -> Int32:
    """Original positions of the survivors. O(survivors)."""
    tables = core.tables
    stored = tables.kept_len[slot, rows].astype(np.int64)
    # Live index i of the run has position i + (seen - live).
    shift = np.where(tables.grows[rows], int(tables.seen[slot]) - tables.row_lens(slot)[rows], 0)
    positions: Int32 = (keep + np.repeat(shift, counts) if shift.any() else keep).astype(np.int32)
    kept = tables.kept[slot]
    if kept is None or not stored.any():
        return positions
    in_stored = keep < np.repeat(stored, counts)
    offset = np.repeat(tables.kept_off[slot, rows].astype(np.int64), counts)
    positions[in_stored] = kept[(offset + keep)[in_stored]]
    return positions
