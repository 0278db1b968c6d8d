"""One region of memory for each sequence: reserved for the longest possible, for the exact length, or by buddies."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Ints, Request, Scheme, State
from bench.fragmentation.shape import Shape

__all__ = ["Buddy", "ContiguousExact", "ContiguousMax"]


class _Contiguous(Scheme):
    """A region is taken at admission and kept until the end; what is cropped in it cannot be used by others.

    The address space counts tokens of all layers.
    """

    paged = False

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.regions: dict[int, tuple[int, int, int]] = {}  # slot -> start, tokens taken, tokens asked for

    def ask(self, request: Request) -> int:
        """Tokens to reserve for a request."""
        return request.final

    def take(self, tokens: int) -> tuple[int, int]:
        """Start and size of a region of at least `tokens`. Raises Full."""
        raise NotImplementedError

    def give(self, start: int, size: int) -> None:
        """Give a region back."""
        raise NotImplementedError

    def fits(self, tokens: int) -> bool:
        """Whether `take` would succeed."""
        raise NotImplementedError

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        tokens = self.ask(request)
        start, size = self.take(tokens)
        self.regions[slot] = start, size, tokens

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        """Nothing to do: the region has room for all tokens, and for drafts as long as the end is not near."""

    def release(self, slot: int) -> None:
        start, size, _ = self.regions.pop(slot)
        self.give(start, size)

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        row = self.shape.layers * self.shape.heads
        taken = sum(size for _, size, _ in self.regions.values())
        asked = sum(tokens for _, _, tokens in self.regions.values())
        seen, live = int(state.seen[slots].sum()) * row, self.needed(slots, state)
        pool = self.shape.pool_slots
        lost = waiting is not None and self.ask(waiting) <= self.shape.pool_tokens - taken
        if lost and waiting is not None:
            lost = not self.fits(self.ask(waiting))
        return Waste(
            pool,
            live,
            internal=(taken - asked) * row,
            reservation=asked * row - seen,
            imbalance=seen - live,
            external=pool - taken * row if lost else 0,
        )

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        taken = sum(size for _, size, _ in self.regions.values())
        return np.full(self.shape.layers, taken * self.shape.heads, np.int64)


class ContiguousExact(_Contiguous):
    """First fit over one address space, for lengths that an oracle knows."""

    key = "contiguous-exact"
    title = "Contiguous, exact (oracle)"
    models = "reservation of the true final length in one region, first fit: Orca (oracle) in the PagedAttention paper"
    checked = "the paper's description; first fit is simulated hole by hole"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.holes: list[tuple[int, int]] = [(0, shape.pool_tokens)]  # (start, size) by start

    def fits(self, tokens: int) -> bool:
        return any(size >= tokens for _, size in self.holes)

    def take(self, tokens: int) -> tuple[int, int]:
        for i, (start, size) in enumerate(self.holes):
            if size >= tokens:
                self.holes[i : i + 1] = [(start + tokens, size - tokens)] if size > tokens else []
                return start, tokens
        raise Full

    def give(self, start: int, size: int) -> None:
        i = bisect_left(self.holes, (start, 0))
        if i < len(self.holes) and self.holes[i][0] == start + size:
            size += self.holes.pop(i)[1]
        if i and sum(self.holes[i - 1]) == start:
            start, before = self.holes.pop(i - 1)
            size += before
        insort(self.holes, (start, size))


class ContiguousMax(ContiguousExact):
    """A region of the model's maximum length for everybody."""

    key = "contiguous-max"
    title = "Contiguous, model maximum"
    models = "reservation of the longest length that the model accepts: Orca (max), FasterTransformer"
    checked = "the PagedAttention paper's description"

    def ask(self, request: Request) -> int:
        return max(self.shape.model_max, request.final)


class Buddy(_Contiguous):
    """Regions of powers of two, split and merged with their buddies."""

    key = "buddy"
    title = "Buddy (powers of two)"
    models = "reservation rounded up to a power of two by a buddy allocator: Orca (pow2)"
    checked = "the PagedAttention paper's description; splits and merges are simulated"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.top = shape.pool_tokens.bit_length() - 1
        self.free: list[set[int]] = [set() for _ in range(self.top + 1)]
        start = 0
        for order in range(self.top, -1, -1):  # a pool that is no power of two is a sum of such
            if shape.pool_tokens >> order & 1:
                self.free[order].add(start)
                start += 1 << order

    def _order(self, tokens: int) -> int:
        return (tokens - 1).bit_length()

    def fits(self, tokens: int) -> bool:
        return any(self.free[self._order(tokens) :])

    def take(self, tokens: int) -> tuple[int, int]:
        wanted = self._order(tokens)
        order = next((o for o in range(wanted, self.top + 1) if self.free[o]), None)
        if order is None:
            raise Full
        start = min(self.free[order])
        self.free[order].remove(start)
        while order > wanted:
            order -= 1
            self.free[order].add(start + (1 << order))
        return start, 1 << wanted

    def give(self, start: int, size: int) -> None:
        order = size.bit_length() - 1
        while order < self.top and start ^ (1 << order) in self.free[order]:
            self.free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self.free[order].add(start)
