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

from dataclasses import dataclass
from typing import Any

import numpy as np

from allocator.arena import ragged
from allocator.core import Core
from allocator.plan import EMPTY_PLAN, MoveSlots, Plan
from allocator.types import Bool, Int32, Int64
from allocator.validate import INT32_MAX

__all__ = ["crop"]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the survivors of all cropped rows fill their target pages.

    Attributes:
        num_old, num_targets: int64 [rows], pages before and after.
        old: int64 [rows], index of the first old page of each row among those of all rows.
        first: int64 [targets], index of the first survivor of each target among those of all rows.
        held: int64 [targets], its survivors.
        own: int64 [targets], index of the old page at its column.
        head: int64 [targets], live index of its first survivor.
        reused: int64 [targets], index of the old page that its first survivor comes from.
        intact: bool [targets], whether its survivors are exactly one old page, in order.
    """

    num_old: Int64
    num_targets: Int64
    old: Int64
    first: Int64
    held: Int64
    own: Int64
    reused: Int64
    intact: Bool


def _layout(core: Core, keep: Int64, lens: Int64, counts: Int64) -> _Layout:
    """Places the survivors. O(pages)."""
    tables, size = core.tables, core.page_size
    num_old, num_targets = tables.pages_for(lens), tables.pages_for(counts)
    old, target_ends = num_old.cumsum() - num_old, num_targets.cumsum()
    targets = target_ends - num_targets
    own = np.arange(len(keep) and int(target_ends[-1]))
    first = own * size
    first += (counts.cumsum() - counts - targets * size).repeat(num_targets)
    held = np.empty(len(own), np.int64)
    held.fill(size)
    filled = num_targets.nonzero()[0]
    held[target_ends[filled] - 1] = counts[filled] - (num_targets[filled] - 1) * size
    head = keep.take(first, mode="wrap")  # in range anyway; this mode is the fastest
    last = first + held
    last -= 1
    span = keep.take(last, mode="wrap")
    span -= head
    span += 1
    intact = span == held
    intact &= tables.offset(head) == 0
    reused = tables.page(head)
    reused += old.repeat(num_targets)
    own += (old - targets).repeat(num_targets)
    return _Layout(num_old, num_targets, old, first, held, own, reused, intact)


def crop(core: Core, slot: int, rows: Int64, keep: Int64, counts: Int64) -> Plan:
    """Keeps the live indices `keep` (`counts` of them for each of `rows`, concatenated). O(kept tokens + pages)."""
    tables = core.tables
    lens = tables.row_lens(slot)[rows]
    if np.count_nonzero(counts == lens) == len(lens):
        return EMPTY_PLAN
    layout = _layout(core, keep, lens, counts)
    old_places = ragged(tables.base[slot] + rows * tables.width[slot], layout.num_old)
    old_pages: Int32 = tables.arena.data.take(old_places)
    used = np.zeros(len(old_pages), np.bool_)
    targets, allocated = _target_pages(core, old_pages, layout, used)
    kept = keep.astype(np.int32)
    moves = _moves(core, old_pages, targets, layout, kept, counts)
    positions = _positions(core, slot, rows, lens, kept, counts)
    tables.diverge(slot)
    tables.arena.data[old_places] = 0
    tables.arena.data[old_places.take(layout.own)] = targets
    tables.lens[slot, rows] = counts
    tables.set_kept(slot, rows, counts, positions)
    core.frozen_tail[slot] = True
    core.log_rewrite(slot)
    core.counters.table_entries -= len(old_pages) - len(targets)
    core.counters.live_tokens -= int(lens.sum() - counts.sum())
    core.counters.moved_slots += len(moves)
    return Plan(moves=moves, allocated=allocated, freed=core.release(old_pages[~used]))


def _target_pages(core: Core, old_pages: Int32, layout: _Layout, used: Bool) -> tuple[Int32, int]:
    """The page of every target, by the rules of the module; marks old pages that stay in `used`."""
    own, reused, intact = layout.own, layout.reused, layout.intact
    num_intact = np.count_nonzero(intact)
    if num_intact == len(intact):
        used[reused] = True
        return old_pages[reused], 0
    writable = ~core.pool.frozen(old_pages)
    if num_intact == 0 and np.count_nonzero(writable) == len(writable):
        used[own] = True
        return old_pages.take(own), 0
    targets = np.empty(len(own), np.int32)
    stay = reused[intact]
    targets[intact] = old_pages[stay]
    used[stay] = True
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


def _moves(core: Core, old_pages: Int32, targets: Int32, layout: _Layout, keep: Int32, counts: Int64) -> MoveSlots:
    """Moves of the survivors of every target that is not intact, but for those that are in place. O(survivors).

    Tokens are numbered through all rows: old page q holds tokens ``q * page_size`` onwards. So a token's slot is its
    number plus a shift that depends on its page alone.
    """
    changed = (~layout.intact).nonzero()[0]
    if len(changed) == 0:
        return EMPTY_PLAN.moves
    size, scratch = core.page_size, core.scratch
    first, held, row_start = layout.first, layout.held, layout.old * size
    slot_type: Any = np.int32 if core.pool.num_pages * size <= INT32_MAX else np.int64
    if 2 * len(changed) < len(targets):
        row_start = row_start.repeat(layout.num_targets)[changed]
        first, held, targets = first[changed], held[changed], targets[changed]
        keep, counts = keep[ragged(first, held)], held
        first = held.cumsum() - held
    # else most pages change: whole rows at once are cheaper, and what is in place is sorted out in the end
    tokens = row_start.astype(slot_type).repeat(counts)
    tokens += keep
    pages = core.tables.page(tokens, out=scratch.int64("pages", len(tokens)))
    shift = (old_pages.astype(slot_type) - scratch.count(len(old_pages))) * slot_type(size)
    src = shift.take(pages, mode="wrap")  # in range anyway; this mode is the fastest
    src += tokens
    dst = (targets.astype(slot_type) * slot_type(size) - first.astype(slot_type)).repeat(held)
    dst += scratch.count(len(dst))
    moving = np.not_equal(src, dst, out=scratch.bool(len(src)))
    return MoveSlots(src[moving], dst[moving])


def _positions(core: Core, slot: int, rows: Int64, lens: Int64, keep: Int32, counts: Int64) -> Int32:
    """Original positions of the survivors. O(survivors)."""
    tables = core.tables
    if not tables.diverged[slot]:
        return keep  # nothing was dropped before: index and position are the same
    stored = tables.kept_len[slot, rows].astype(np.int64)
    # Live index i of the run has position i + (seen - live).
    shift = np.where(tables.grows[rows], int(tables.seen[slot]) - lens, 0)
    positions: Int32 = keep + shift.astype(np.int32).repeat(counts)
    kept = tables.kept[slot]
    if kept is not None and stored.any():
        in_stored = keep < stored.repeat(counts)
        offset = tables.kept_off[slot, rows].astype(np.int64).repeat(counts)
        positions[in_stored] = kept[(offset + keep)[in_stored]]
    return positions
