"""What a compression policy sees of a row, and what it answers.

Owns: the read-only view and the `Policy` protocol, so that the cache can take any policy without importing one.
Does not know: how scores are computed, pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecentQueries:
    """The newest queries of one layer of one sequence, as its attention saw them.

    Attributes:
        states: `[q_heads, queries, key_width]`, the last one at position `seen_len - 1`, without gaps.
        scale: Factor on the logits.
    """

    states: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LiveTokens:
    """The live tokens of one layer of one sequence: private copies, one entry per lane.

    Attributes:
        layer: Model layer index.
        keys: Per lane `[heads_per_lane, live, key_width]`.
        values: Per lane `[heads_per_lane, live, value_width]`.
        positions: Per lane int64 `[live]`, original positions, ascending.
        seen_len: Tokens appended so far; positions are below it.
        queries: The newest queries, if they are recorded; see `PagedMemory.record_queries`.
    """

    layer: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    positions: Sequence[np.ndarray]
    seen_len: int
    queries: RecentQueries | None = None

    @property
    def num_lanes(self) -> int:
        """Page tables of the layer."""
        return len(self.keys)


class Policy(Protocol):
    """Chooses which live tokens a layer keeps."""

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """Live indices to keep, strictly increasing, one array per lane.

        Args:
            tokens: The layer's live tokens.
            budget: How many tokens each lane may keep; a policy never returns more on average over the lanes.
        """
        ...
