"""LagKV: a token counts if it stands out against the tokens that follow it; no queries needed.

Source: Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", 2025
(arXiv 2504.04704).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paged_kv.compression.base import ALWAYS, ScorePolicy
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class LagKV(ScorePolicy):
    """Ranks the tokens of each block by how their channels spread, measured in the range of the next block.

    The sinks, the last whole block and what follows it have no next block and are kept first. Fewer tokens than
    `sinks + 2 * lag` are kept by age alone, sinks and the newest.

    Attributes:
        sinks: Oldest tokens that are always kept.
        lag: Tokens of a block.
        budget: Tokens to keep where nothing else says how many.
    """

    sinks: int = 4
    lag: int = 128
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0 tokens, got {self.sinks}")
        if self.lag < 2:
            raise ValueError(f"lag must be at least 2 tokens, got {self.lag}")

    @property
    def num_protected(self) -> int:
        """The sinks."""
        return self.sinks

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Rank within the block, from 0 to below 1: `[heads_per_lane, live]`; newer tokens win at equal ranks."""
        keys, values = tokens.keys[lane], tokens.values[lane]
        heads, live, _ = keys.shape
        age = torch.linspace(0, 1, live, device=keys.device).expand(heads, live).clone()
        age[:, : self.sinks] = ALWAYS
        if live < self.sinks + 2 * self.lag:
            return age
        blocks = (live - self.sinks) // self.lag
        whole = slice(self.sinks, self.sinks + blocks * self.lag)
        spread = (self._spread(keys[:, whole]) + self._spread(values[:, whole])) / 2
        ranks = spread.argsort(dim=-1).argsort(dim=-1).float().flatten(1)
        ranked = slice(self.sinks, self.sinks + (blocks - 1) * self.lag)
        # Age decides between equal ranks, and among the tokens that have no rank.
        scores = age + self.lag
        scores[:, ranked] = ranks + age[:, ranked] / 2
        return scores

    def _spread(self, states: Tensor) -> Tensor:
        """How far each token's channels spread, in units of the next block's range: `[heads, blocks - 1, lag]`."""
        blocks = states.float().reshape(len(states), -1, self.lag, states.shape[-1])
        following = blocks[:, 1:]
        low, high = following.amin(dim=2, keepdim=True), following.amax(dim=2, keepdim=True)
        return ((blocks[:, :-1] - low) / (high - low)).std(dim=-1).softmax(dim=-1)
