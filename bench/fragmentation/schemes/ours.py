"""The real `BlockAllocator`: with all layers alike, with a table for each layer, and for each head."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from allocator import BlockAllocator, OutOfPages, SeqId
from allocator.types import Placement, Verdict
from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Ints, Request, Scheme, State
from bench.fragmentation.shape import Shape

__all__ = ["Lockstep", "PerHead", "PerLayer", "RunAware"]

SINKS = 4


class _Ours(Scheme):
    """Drives a `BlockAllocator`. Subclasses say what a row is and how long it must be.

    Attributes:
        lens: int64 [capacity, rows], live tokens of each row that the allocator was asked to keep.
    """

    per_head: ClassVar[bool] = False
    placement: ClassVar[Placement] = "lifo"
    slides: ClassVar[bool] = True

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.lanes = shape.heads if self.per_head else 1
        self.row_heads = shape.heads // self.lanes
        pages = shape.pool_slots // self.page_unit
        windows = schedule.windows if self.slides else None
        self.windows = windows
        self.allocator = BlockAllocator(
            pages + 1,
            page_size=shape.page_size,
            num_layers=shape.layers,
            lanes=self.lanes,
            windows=None if windows is None else [int(window) or None for window in windows],
            placement=self.placement,
            watermark=int(watermark * pages),
        )
        self.seqs: dict[int, SeqId] = {}
        self.lens: dict[int, Ints] = {}

    def rows(self, live: Ints) -> Ints:
        """Length that each row must have, int64 [batch, rows], of `live` [batch, layers, heads or 1]."""
        raise NotImplementedError

    @property
    def page_unit(self) -> int:
        return self.shape.page_size * self.row_heads

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        seq = self.allocator.open().seq
        try:
            if self.allocator.can_append([seq], [request.prompt]).verdict is not Verdict.OK:
                raise Full
            self.allocator.append([seq], [request.prompt])
        except (Full, OutOfPages):
            self.allocator.close(seq)
            raise Full from None
        self.seqs[slot] = seq
        self.lens[slot] = np.full(self.shape.layers * self.lanes, request.prompt, np.int64)
        self._crop(slot, self.rows(live[None])[0])
        self._slide([seq])

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        seqs = [self.seqs[s] for s in slots.tolist()]
        try:
            self.allocator.append(seqs, 1 + drafts)
        except OutOfPages:
            raise Full from None
        if drafts.any():
            self.allocator.truncate(seqs, drafts)
        wanted = self.rows(live)
        have = np.stack([self.lens[s] for s in slots.tolist()]) + 1
        for i, slot in enumerate(slots.tolist()):
            self.lens[slot] = have[i]
        for i in np.flatnonzero((wanted < have).any(axis=1)):
            self._crop(int(slots[i]), wanted[i])
        self._slide(seqs)

    def _crop(self, slot: int, wanted: Ints) -> None:
        """Keep the first `SINKS` and the newest tokens of each row that has more than it must."""
        have = self.lens[slot]
        keep = {
            divmod(int(row), self.lanes): _sinks_and_newest(int(have[row]), int(wanted[row]))
            for row in np.flatnonzero((wanted < have) & ~self._sliding())
        }
        if keep:
            self.allocator.crop(self.seqs[slot], keep)
        self.lens[slot] = np.minimum(have, wanted)

    def _sliding(self) -> npt.NDArray[np.bool_]:
        """Rows whose pages `slide` frees."""
        if self.windows is None:
            return np.zeros(self.shape.layers * self.lanes, bool)
        return np.repeat(self.windows > 0, self.lanes)

    def _slide(self, seqs: list[SeqId]) -> None:
        if self.windows is not None:
            self.allocator.slide(seqs)

    def release(self, slot: int) -> None:
        self.allocator.close(self.seqs.pop(slot))
        self.lens.pop(slot)

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        stats = self.allocator.stats()
        held = stats.active_pages * self.page_unit
        wanted = sum(int(lens.sum()) for lens in self.lens.values()) * self.row_heads
        needed = self.needed(slots, state)
        # Pages end at page boundaries, and a window slides off them only there: both are room inside a page.
        rest = self.shape.pool_slots % self.page_unit
        return Waste(self.shape.pool_slots, needed, internal=held - wanted + rest, imbalance=wanted - needed)

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        pages = sum(self.allocator.num_pages_of(seq).astype(np.int64) for seq in self.seqs.values())
        return np.asarray(pages).reshape(self.shape.layers, self.lanes).sum(axis=1) * self.page_unit

    def table_bytes(self, slots: Ints) -> int:
        return self.allocator.stats().table_bytes

    def page_tables(self, slots: Ints) -> list[npt.NDArray[np.integer]]:
        seqs = list(self.seqs.values())
        padded = self.allocator.block_tables(seqs)  # [rows, batch, pages], 0 is padding
        return [row[row > 0] for rows in padded for row in rows]


def _sinks_and_newest(have: int, wanted: int) -> Ints:
    sinks = min(SINKS, wanted)
    return np.concatenate([np.arange(sinks), np.arange(have - (wanted - sinks), have)])


class Lockstep(_Ours):
    """All layers keep what the longest of them needs."""

    key = "ours-lockstep"
    title = "paged-kv, all layers alike"
    models = "this project, cropping all layers of a sequence to one length"
    checked = "the real allocator"
    slides = False

    def rows(self, live: Ints) -> Ints:
        longest = live.max(axis=(1, 2))
        return np.repeat(longest[:, None], self.shape.layers, axis=1)


class PerLayer(_Ours):
    """Each layer keeps what its longest head needs."""

    key = "ours-per-layer"
    title = "paged-kv, per layer"
    models = "this project: a page table for each layer over one pool"
    checked = "the real allocator"

    def rows(self, live: Ints) -> Ints:
        return live.max(axis=2)


class PerHead(_Ours):
    """Each head keeps what it needs."""

    key = "ours-per-head"
    title = "paged-kv, per head"
    models = "this project with a lane for each KV head"
    checked = "the real allocator"
    per_head = True

    def rows(self, live: Ints) -> Ints:
        batch = live.shape[0]
        full = np.broadcast_to(live, (batch, self.shape.layers, self.lanes))
        return full.reshape(batch, self.shape.layers * self.lanes)


class RunAware(PerLayer):
    """Per layer, with free pages chosen so that tables are runs of neighbours."""

    key = "ours-runs"
    title = "paged-kv, per layer, run-aware"
    models = "this project with placement in runs of neighbouring pages"
    checked = "the real allocator"
    placement = "runs"
