"""The newest queries of each sequence, for methods that score tokens by the attention they get.

Attention hands every query over once, while it computes; the newest few are kept in a ring per sequence and layer. No
model is patched, and nothing is kept unless a policy asks for it.

Owns: the rings, and which of their places are valid after rollbacks, forks and gaps.
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
    """Rings of the `newest` queries of every sequence; memory is `newest * q_heads * width` a sequence and layer."""

    def __init__(self, newest: int) -> None:
        """Start with nothing recorded.

        Raises:
            ValueError: `newest` is below 1.
        """
        if newest < 1:
            raise ValueError(f"newest must be at least 1 query, got {newest}")
        self.newest = newest
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
        ring = self._ring(layer, queries)
        device = queries.device
        ring[places.rows.to(device), places.offsets.to(device)] = queries[places.tokens.to(device)].detach()
        self._scales[layer] = scale

    def _begin(self, step: RaggedStep, seen_len: Callable[[SeqId], int]) -> _Places:
        parts: list[list[np.ndarray]] = [[], [], []]
        first = 0
        for seq, count in zip(step.seqs, step.counts, strict=True):
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
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row.index)

    def copy(self) -> QueryWindow:
        """The same rings in tensors of their own."""
        twin = QueryWindow(self.newest)
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


def _with_rows(ring: Tensor, rows: int) -> Tensor:
    """The same ring with room for at least so many sequences."""
    if rows <= len(ring):
        return ring
    grown = ring.new_zeros((max(rows, 2 * len(ring)), *ring.shape[1:]))
    grown[: len(ring)] = ring
    return grown


def queries_needed(policy: object) -> int:
    """How many of the newest queries a policy scores with: its `needs_queries`, 0 if it has none."""
    return int(getattr(policy, "needs_queries", 0))
