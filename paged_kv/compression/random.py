"""Random tokens: the baseline that any method has to beat."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paged_kv.compression.base import ScorePolicy
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class Random(ScorePolicy):
    """Keeps tokens at random, the same ones every time for one seed and length.

    Attributes:
        seed: Of the generator, started anew for every layer.
        budget: Tokens to keep where nothing else says how many.
    """

    seed: int = 0
    budget: TokenBudget = field(default=None, kw_only=True)

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Uniform numbers: `[heads_per_lane, live]`."""
        heads, live, _ = tokens.keys[lane].shape
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.rand(heads, live, generator=generator) for _ in range(lane + 1)]
        return drawn[lane]
