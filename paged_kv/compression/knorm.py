"""Key norm: keys of small L2 norm attract attention, so the largest ones go.

Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", 2024
(arXiv 2406.11430).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paged_kv.compression.base import ScorePolicy
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class KeyNorm(ScorePolicy):
    """Keeps the tokens whose keys have the lowest L2 norm, averaged over the heads of a lane.

    Attributes:
        budget: Tokens to keep where nothing else says how many.
    """

    budget: TokenBudget = field(default=None, kw_only=True)

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Minus the norm of each key: `[heads_per_lane, live]`."""
        return -tokens.keys[lane].norm(dim=-1)
