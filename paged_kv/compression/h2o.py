"""H2O: heavy hitters, the tokens that queries have attended to so far.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference", 2023 (arXiv 2306.14048). The paper
adds attention up over all queries since the start; here over the newest `queries` ones, divided by how many of them
could see the token, so that late tokens are not at a disadvantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paged_kv.compression.base import ALWAYS, ScorePolicy, attention_of_newest
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class H2O(ScorePolicy):
    """Keeps the tokens with the most attention received per query, and the newest ones.

    Attributes:
        recent: Newest tokens that are always kept.
        queries: Newest queries that are counted.
        budget: Tokens to keep where nothing else says how many.
    """

    recent: int = 32
    queries: int = 512
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(f"recent must be at least 0 tokens, got {self.recent}")
        if self.queries < 1:
            raise ValueError(f"queries must be at least 1, got {self.queries}")

    @property
    def needs_queries(self) -> int:
        """All that are counted."""
        return self.queries

    @property
    def num_protected(self) -> int:
        """The newest tokens."""
        return self.recent

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Attention received per query that saw the token: `[heads_per_lane, live]`."""
        attention = attention_of_newest(tokens, lane, self.queries)
        positions = torch.from_numpy(tokens.positions[lane]).to(attention.device)
        seen_by = (tokens.seen_len - positions).clamp(1, attention.shape[2])
        scores = attention.sum(dim=2).mean(dim=1) / seen_by
        return scores.masked_fill(positions >= tokens.seen_len - self.recent, ALWAYS)
