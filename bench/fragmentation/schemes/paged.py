"""Simulated page tables of other systems: one table for a group of layers, and a private pool for each layer."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Ints, Request, Scheme, State
from bench.fragmentation.shape import Shape

__all__ = ["GroupTables", "PrivatePools", "group_layers"]


def group_layers(kinds: list[int]) -> tuple[list[list[int]], int]:
    """Groups of layers of one kind with one table each, and how many layers a block of any group has room for.

    All groups share one pool of equal blocks, so groups are made equal: the size is the number of layers of the rarer
    kind, unless the kinds are within a quarter of each other, when it is that of the more frequent one. The last group
    of a kind is padded.
    """
    by_kind: dict[int, list[int]] = {}
    for layer, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(layer)
    counts = [len(layers) for layers in by_kind.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = [layers[i : i + size] for layers in by_kind.values() for i in range(0, len(layers), size)]
    return groups, size


class GroupTables(Scheme):
    """One page table for each group of layers; a block holds the same tokens for all layers of its group."""

    key = "group-tables"
    title = "One table per group (vLLM-like)"
    models = (
        "vLLM's hybrid cache manager: groups of equal size, one table per request and group, first-in first-out free "
        "list, blocks behind a window freed. vLLM cannot crop; this row gives back what all layers of a group drop"
    )
    checked = "published padding of its layouts: Llama 3.2 Vision, Gemma 2, Ministral (see the tests)"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        kinds = schedule.windows.tolist() if schedule.windows is not None else [0] * shape.layers
        self.groups, self.size = group_layers(kinds)
        self.window = np.array([kinds[group[0]] for group in self.groups])
        self.block = self.size * shape.heads * shape.page_size
        self.num_blocks = shape.pool_slots // self.block
        self.free = deque(range(self.num_blocks))
        self.held_back = int(watermark * self.num_blocks)
        self.tables: dict[int, list[deque[int]]] = {}
        self.first: dict[int, Ints] = {}  # first page of each group's table, by slot

    def _span(self, seen: Ints, live: Ints) -> tuple[Ints, Ints]:
        """First page and end page of each group, int64 [batch, groups] each, for `live` [batch, layers, heads]."""
        page = self.shape.page_size
        length = np.stack([live[:, group].max(axis=(1, 2)) for group in self.groups], axis=1)
        slid = (self.window > 0) & (seen[:, None] > self.window)
        first = np.where(slid, (seen[:, None] - self.window) // page, 0)
        end = np.where(self.window > 0, -(-seen[:, None] // page), -(-length // page))
        return first, end

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        whole = np.full((1, *live.shape), request.prompt, np.int64)
        end = self._span(np.array([request.prompt]), whole)[1][0]
        first = np.zeros_like(end)
        if int((end - first).sum()) > len(self.free) - (self.held_back if self.tables else 0):
            raise Full
        self.tables[slot] = [deque(self._take(int(n))) for n in end]
        self.first[slot] = first
        self._settle(slot, *(part[0] for part in self._span(np.array([request.prompt]), live[None])))

    def _take(self, n: int) -> list[int]:
        return [self.free.popleft() for _ in range(n)]

    def _settle(self, slot: int, first: Ints, end: Ints) -> None:
        """Free the pages outside [first, end)."""
        for group, table in enumerate(self.tables[slot]):
            while self.first[slot][group] < first[group] and table:
                self.free.append(table.popleft())
                self.first[slot][group] += 1
            while len(table) > end[group] - self.first[slot][group]:
                self.free.append(table.pop())

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        new = (1 + drafts)[:, None, None]
        _, peak = self._span(state.seen[slots] + 1 + drafts, state.live[slots] + new)
        have = np.array([[len(t) for t in self.tables[s]] + self.first[s] for s in slots.tolist()])
        missing = np.maximum(0, peak - have)
        if int(missing.sum()) > len(self.free):
            raise Full
        for i, group in zip(*np.nonzero(missing), strict=True):
            self.tables[int(slots[i])][group].extend(self._take(int(missing[i, group])))
        first, end = self._span(state.seen[slots] + 1, live)
        starts = np.array([self.first[s] for s in slots.tolist()])
        changed = ((first > starts) | (np.maximum(peak, have) > end)).any(axis=1)
        for i in np.flatnonzero(changed):
            self._settle(int(slots[i]), first[i], end[i])

    def release(self, slot: int) -> None:
        for table in self.tables.pop(slot):
            self.free.extend(table)
        self.first.pop(slot)

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        heads, page = self.shape.heads, self.shape.page_size
        held = filled = 0
        live = state.live[slots]
        for g, group in enumerate(self.groups):
            pages = np.array([len(self.tables[s][g]) for s in slots.tolist()], np.int64)
            held += int(pages.sum()) * self.block
            longest = live[:, group].max(axis=(1, 2))
            filled += int(np.minimum(longest, pages * page).sum()) * len(group) * heads
        needed = self.needed(slots, state)
        return Waste(self.shape.pool_slots, needed, internal=held - filled, imbalance=filled - needed)

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        held = np.zeros(self.shape.layers, np.int64)
        for g, group in enumerate(self.groups):
            pages = sum(len(self.tables[s][g]) for s in slots.tolist())
            held[group] = pages * self.shape.page_size * self.shape.heads
        return held

    def table_bytes(self, slots: Ints) -> int:
        return 4 * sum(len(table) for s in slots.tolist() for table in self.tables[s])

    def page_tables(self, slots: Ints) -> list[npt.NDArray[np.integer]]:
        return [np.array(table) for s in slots.tolist() for table in self.tables[s]]

    @property
    def page_unit(self) -> int:
        return self.block


class PrivatePools(Scheme):
    """Tables for each layer over pools of equal size, one for each layer: the fullest one decides."""

    key = "private-pools"
    title = "Equal private pool per layer (OpenVINO-like)"
    models = "per-layer tables where each layer owns a pool of its own, all of one size: OpenVINO GenAI"
    checked = "its sources, read for the design of this project"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.per_layer = shape.pool_tokens // shape.page_size
        self.held_back = int(watermark * self.per_layer)
        self.pages: dict[int, Ints] = {}  # slot -> int64 [layers]
        self.used = np.zeros(shape.layers, np.int64)

    def _pages(self, live: Ints) -> Ints:
        return np.asarray(-(-live.max(axis=-1) // self.shape.page_size))

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        prompt = -(-request.prompt // self.shape.page_size)
        if (self.used + prompt > self.per_layer - (self.held_back if self.pages else 0)).any():
            raise Full
        self.pages[slot] = self._pages(live)
        self.used += self.pages[slot]

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        peak = self._pages(state.live[slots] + (1 + drafts)[:, None, None])
        have = np.stack([self.pages[s] for s in slots.tolist()])
        if (self.used + np.maximum(0, peak - have).sum(axis=0) > self.per_layer).any():
            raise Full
        after = self._pages(live)
        if (after != have).any():
            self.used += (after - have).sum(axis=0)
            for slot, pages in zip(slots.tolist(), after, strict=True):
                self.pages[slot] = pages

    def release(self, slot: int) -> None:
        self.used -= self.pages.pop(slot)

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        unit = self.shape.page_size * self.shape.heads
        held = int(self.used.sum()) * unit
        filled = int(state.live[slots].max(axis=2).sum()) * self.shape.heads
        needed = self.needed(slots, state)
        unusable = 0
        if waiting is not None:
            prompt = -(-waiting.prompt // self.shape.page_size)
            room = self.per_layer - self.used
            if (room < prompt).any() and int(room.sum()) >= prompt * self.shape.layers:
                unusable = int(room.sum()) * unit
        return Waste(self.shape.pool_slots, needed, internal=held - filled, imbalance=filled - needed + unusable)

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        return self.used * self.shape.page_size * self.shape.heads

    def table_bytes(self, slots: Ints) -> int:
        return 4 * int(self.used.sum())
