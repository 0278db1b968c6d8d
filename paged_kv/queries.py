"""The newest queries of each sequence, for methods that score tokens by the attention they get.

Attention hands every query over once, while it computes; the newest few are kept in a ring per sequence and layer. No
model is patched, and nothing is kept unless a policy asks for it.

Owns: the rings, which of their places are valid after rollbacks, forks and gaps, and whose queries are wanted.
Does not know: policies, attention, pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from allocator import SeqId
from paged_kv.live import RecentQueries


@dataclass(slots=True)
class _Row:
    """The ring of one sequence: positions `start` to `end - 1` were recorded without a gap."""

    index: int
    start: int
    end: int


class RaggedStep(Protocol):
    """The rows of one forward pass."""

    seqs: list[SeqId]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tokens of one step go: int64 tensors of one entry per recorded token.

    Attributes:
        step: Whose tokens.
        tokens: Index among the step's packed tokens.
        rows: Ring.
        offsets: Place in the ring.
    """

    step: RaggedStep
    tokens: Tensor
    rows: Tensor
    offsets: Tensor


class QueryWindow:
    """Rings of the `newest` queries of sequences; memory is `newest * q_heads * width` a sequence and layer."""

    def __init__(self, newest: int, *, only: set[SeqId] | None = None) -> None:
        """Start with nothing recorded.

        Args:
            newest: Queries of a ring.
            only: The sequences to record; all by default.

        Raises:
            ValueError: `newest` is below 1.
        """
        if newest < 1:
            raise ValueError(f"newest must be at least 1 query, got {newest}")
        self.newest = newest
        self.only = only
        self._rows: dict[SeqId, _Row] = {}
        self._free: list[int] = []
        self._rings: dict[int, Tensor] = {}  # layer: [rows, newest, q_heads, width]
        self._scales: dict[int, float] = {}
        self._places: _Places | None = None

    def record(
        self, step: RaggedStep, seen_len: Callable[[SeqId], int], layer: int, queries: Tensor, scale: float
    ) -> None:
        """Take a layer's queries of one step.

        Args:
            step: Whose tokens; the first call with a step makes room for them in every layer.
            seen_len: How many tokens a sequence has seen, those of the step included.
            layer: Model layer index.
            queries: Packed `[tokens, q_heads, width]`, rotated as attention sees them.
            scale: Factor on the logits.
        """
        places = self._places
        if places is None or places.step is not step:
            places = self._places = self._begin(step, seen_len)
        if not len(places.tokens):
            return
        ring = self._ring(layer, queries)
        device = queries.device
        ring[places.rows.to(device), places.offsets.to(device)] = queries[places.tokens.to(device)].detach()
        self._scales[layer] = scale

    def _begin(self, step: RaggedStep, seen_len: Callable[[SeqId], int]) -> _Places:
        parts: list[list[np.ndarray]] = [[], [], []]
        first = 0
        for seq, count in zip(step.seqs, step.counts, strict=True):
            if self.only is not None and seq not in self.only:
                first += count
                continue
            end = seen_len(seq)
            begin = end - count
            row = self._row_of(seq, begin)
            # What a rolled-back token overwrote is gone; what was skipped was never there.
            row.start = begin if begin > row.end else min(begin, max(row.start, row.end - self.newest))
            row.end = end
            kept = min(count, self.newest)
            parts[0].append(np.arange(first + count - kept, first + count))
            parts[1].append(np.full(kept, row.index))
            parts[2].append(np.arange(end - kept, end) % self.newest)
            first += count
        empty = np.zeros(0, np.int64)
        return _Places(step, *(torch.from_numpy(np.concatenate([*part, empty])) for part in parts))

    def recent(self, seq: SeqId, layer: int, seen_len: int) -> RecentQueries | None:
        """The recorded queries of a sequence up to its newest token, None if there are none."""
        row = self._rows.get(seq)
        if row is None or layer not in self._rings:
            return None
        start, end = max(row.start, row.end - self.newest), min(row.end, seen_len)
        if end <= start or end < seen_len:
            return None
        ring = self._rings[layer]
        index = torch.arange(start, end, device=ring.device) % self.newest
        return RecentQueries(ring[row.index, index].transpose(0, 1), self._scales[layer])

    def fork(self, seq: SeqId, forks: Sequence[SeqId]) -> None:
        """Give each fork a copy of a sequence's ring."""
        row = self._rows.get(seq)
        if row is None:
            return
        for fork in forks:
            copy = self._row_of(fork, row.start)
            copy.start, copy.end = row.start, row.end
            for ring in self._rings.values():
                ring[copy.index] = ring[row.index]

    def forget(self, seq: SeqId) -> None:
        """Drop what was recorded of a sequence."""
        if self.only is not None:
            self.only.discard(seq)
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row.index)

    def copy(self) -> QueryWindow:
        """The same rings in tensors of their own."""
        twin = QueryWindow(self.newest, only=None if self.only is None else set(self.only))
        twin._rows = {seq: replace(row) for seq, row in self._rows.items()}
        twin._free = list(self._free)
        twin._rings = {layer: ring.clone() for layer, ring in self._rings.items()}
        twin._scales = dict(self._scales)
        return twin

    def _row_of(self, seq: SeqId, begin: int) -> _Row:
        row = self._rows.get(seq)
        if row is None:
            index = self._free.pop() if self._free else len(self._rows)
            row = self._rows[seq] = _Row(index, begin, begin)
            for layer, ring in self._rings.items():
                self._rings[layer] = _with_rows(ring, index + 1)
        return row

    def _ring(self, layer: int, queries: Tensor) -> Tensor:
        if layer not in self._rings:
            rows = len(self._rows) + len(self._free)
            self._rings[layer] = queries.new_zeros((rows, self.newest, *queries.shape[1:]))
        return self._rings[layer]


class QueryLog:
    """What is recorded of whom: a window for all sequences, and windows for those that asked for themselves."""

    def __init__(self) -> None:
        self._windows: dict[int, QueryWindow] = {}
        self._sizes: dict[SeqId, int] = {}
        self._everyone: QueryWindow | None = None

    def want(self, newest: int, seq: SeqId | None = None) -> None:
        """Record at least the newest queries of all sequences, or exactly so many of one (0 stops that)."""
        if seq is None:
            if newest > 0 and (self._everyone is None or self._everyone.newest < newest):
                self._everyone = QueryWindow(newest)
        elif newest != self._sizes.get(seq, 0):
            self.forget(seq)
            if newest > 0:
                window = self._windows.setdefault(newest, QueryWindow(newest, only=set()))
                assert window.only is not None
                window.only.add(seq)
                self._sizes[seq] = newest

    @property
    def is_idle(self) -> bool:
        """Whether nobody's queries are wanted now."""
        return self._everyone is None and not self._sizes

    def record(
        self, step: RaggedStep, seen_len: Callable[[SeqId], int], layer: int, queries: Tensor, scale: float
    ) -> None:
        """Take a layer's queries of one step; see `QueryWindow.record`."""
        for window in self._all():
            window.record(step, seen_len, layer, queries, scale)

    def recent(self, seq: SeqId, layer: int, seen_len: int) -> RecentQueries | None:
        """The recorded queries of a sequence up to its newest token, None if there are none."""
        size = self._sizes.get(seq)
        window = self._everyone if size is None else self._windows[size]
        return None if window is None else window.recent(seq, layer, seen_len)

    def fork(self, seq: SeqId, forks: Sequence[SeqId]) -> None:
        """Record forks as the sequence that they come from, beginning with what is recorded of it."""
        if (size := self._sizes.get(seq)) is not None:
            self._sizes.update(dict.fromkeys(forks, size))
            only = self._windows[size].only
            assert only is not None
            only.update(forks)
        for window in self._all():
            window.fork(seq, forks)

    def forget(self, seq: SeqId) -> None:
        """Drop what was recorded of a sequence; a window that nobody wants any more gives its memory back."""
        size = self._sizes.pop(seq, None)
        for window in self._all():
            window.forget(seq)
        if size is not None and not self._windows[size].only:
            del self._windows[size]

    def _all(self) -> list[QueryWindow]:
        return [*self._windows.values(), *([] if self._everyone is None else [self._everyone])]


def _with_rows(ring: Tensor, rows: int) -> Tensor:
    """The same ring with room for at least so many sequences."""
    if rows <= len(ring):
        return ring
    grown = ring.new_zeros((max(rows, 2 * len(ring)), *ring.shape[1:]))
    grown[: len(ring)] = ring
    return grown
