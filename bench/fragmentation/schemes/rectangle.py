"""Padded batches: transformers' `DynamicCache` (its real class, on real tensors) and `StaticCache`."""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache

from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Ints, Request, Scheme, State
from bench.fragmentation.shape import Shape

__all__ = ["DynamicReplay", "StaticRectangle"]


class _Rectangle(Scheme):
    """A batch is put together from the queue, padded to its longest row, and runs until its last row is done."""

    static = True
    paged = False

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.batch: dict[int, Request] = {}
        self.live: dict[int, Ints] = {}

    def layer_lengths(self, requests: list[Request], live: list[Ints]) -> Ints:
        """Longest length of each layer over the life of the batch, int64 [layers]."""
        raise NotImplementedError

    def overhead(self, rows: int, lengths: Ints) -> int:
        """Tokens of one layer that are held for a moment beside the cache."""
        return 0

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        requests = [*self.batch.values(), request]
        lengths = self.layer_lengths(requests, [*self.live.values(), live])
        tokens = len(requests) * int(lengths.sum()) + self.overhead(len(requests), lengths)
        if tokens > self.shape.pool_tokens * self.shape.layers:
            raise Full
        self.batch[slot], self.live[slot] = request, live

    def release(self, slot: int) -> None:
        self.batch.pop(slot)
        self.live.pop(slot)


class StaticRectangle(_Rectangle):
    """All of the rectangle is allocated when the batch starts."""

    key = "static-cache"
    title = "StaticCache per batch"
    models = "transformers StaticCache, allocated for the longest request of the batch"
    checked = "the class itself is built for one batch in the tests; its bytes equal this row's"

    def layer_lengths(self, requests: list[Request], live: list[Ints]) -> Ints:
        longest = max(request.final for request in requests)
        windows = self.schedule.windows
        if windows is None:
            return np.full(self.shape.layers, longest, np.int64)
        return np.where(windows > 0, np.minimum(windows, longest), longest)

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        """Nothing to do: everything was allocated at the start."""

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        heads = self.shape.heads
        lengths = self.layer_lengths(list(self.batch.values()), [])
        held = len(self.batch) * int(lengths.sum()) * heads
        every = np.fromiter(self.batch, np.int64)
        final = np.minimum(state.final[every][:, None], lengths).sum() * heads
        seen = np.minimum(state.seen[slots][:, None], lengths).sum() * heads
        live = self.needed(slots, state)
        return Waste(
            self.shape.pool_slots,
            live,
            internal=int(held - final),  # rows shorter than the longest
            reservation=int(final - seen),  # tokens to come, and rows that are done
            imbalance=int(seen) - live,
        )

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        return len(self.batch) * self.layer_lengths(list(self.batch.values()), []) * self.shape.heads


class DynamicReplay(_Rectangle):
    """The real `DynamicCache` is driven with one-byte tensors of the batch's true lengths, `torch.cat` and all.

    Rows are left-padded. A crop shortens each layer's tensor to its longest row, as a compression hook does. What is
    held is read off the tensors. `cat` holds the old and the new tensor of one layer at once: `overhead`.
    """

    key = "dynamic-cache"
    title = "DynamicCache, padded batch"
    models = "transformers DynamicCache under generate: left padding, torch.cat at every step, batch until the last row"
    checked = "the class itself is driven; bytes are read off its tensors"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.cache = DynamicCache()

    def layer_lengths(self, requests: list[Request], live: list[Ints]) -> Ints:
        longest = np.max([rows.max(axis=1) for rows in live], axis=0)
        lengths = longest + max(request.output for request in requests)
        budget, windows = self.schedule.budget, self.schedule.windows
        if budget is not None:
            lengths = np.minimum(lengths, budget + self.schedule.every)
        if windows is not None:
            lengths = np.where(windows > 0, np.minimum(windows, lengths), lengths)
        return np.asarray(lengths + (self.schedule.draft or (0, 0))[1])

    def overhead(self, rows: int, lengths: Ints) -> int:
        return rows * int(lengths.max())

    def start(self, slots: Ints, state: State) -> None:
        longest = state.live[slots].max(axis=(0, 2))
        self.cache = DynamicCache()
        for layer, length in enumerate(longest):
            self._append(layer, int(length))

    def _append(self, layer: int, tokens: int) -> None:
        new = torch.zeros(len(self.batch), 1, tokens, 1, dtype=torch.int8)
        self.cache.update(new, new, layer)

    def _keep(self, layer: int, tokens: int) -> None:
        tensors = self.cache.layers[layer]
        if tensors.keys.shape[2] > tokens:
            tensors.keys = tensors.keys[:, :, -tokens:].clone()
            tensors.values = tensors.values[:, :, -tokens:].clone()

    def _lengths(self) -> Ints:
        return np.array([layer.keys.shape[2] for layer in self.cache.layers], np.int64)

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        extra = int(drafts.max(initial=0))
        # A finished row stays in the batch with its padding: the longest row that still runs sets the length.
        shrink = (live - state.live[slots]).max(axis=(0, 2)) < 1
        for layer, length in enumerate(self._lengths()):
            self._append(layer, 1 + extra)
            if extra:
                self._keep(layer, int(length) + 1)
            if shrink[layer]:
                self._keep(layer, int(live[:, layer].max()))

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        # bytes of K, one a token and row: what the real tensors hold
        measured = sum(layer.keys.nbytes for layer in self.cache.layers)
        held = measured * self.shape.heads
        live = self.needed(slots, state)
        done = measured // max(1, len(self.batch)) * (len(self.batch) - len(slots)) * self.shape.heads
        row_live = state.live[slots].max(axis=2)  # a layer keeps what its longest head needs
        held_heads = int(row_live.sum()) * self.shape.heads
        return Waste(
            self.shape.pool_slots,
            live,
            internal=held - done - held_heads,  # padding
            reservation=done,  # rows that are done and stay
            imbalance=held_heads - live,
        )

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        return self._lengths() * len(self.batch) * self.shape.heads
