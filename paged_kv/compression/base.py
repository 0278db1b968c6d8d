"""What every compression method shares: scores in, budgets kept, live indices out.

Owns: `Policy` and `LiveTokens` by their public names, and `ScorePolicy`, from which a method is a few lines.
Does not know: pages, when to crop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paged_kv.live import LiveTokens, Policy

__all__ = ["LiveTokens", "Policy", "ScorePolicy"]


class ScorePolicy(ABC):
    """Keeps the tokens with the highest scores; a subclass says what a token scores."""

    @abstractmethod
    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """How much each live token of a lane matters: `[live]`, or `[heads_per_lane, live]` to be averaged."""

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """The `budget` best live indices of each lane, strictly increasing; all of a lane that fits its budget."""
        kept = []
        for lane in range(tokens.num_lanes):
            live = len(tokens.positions[lane])
            if live <= budget:
                kept.append(np.arange(live))
                continue
            scores = self.scores(tokens, lane)
            if scores.ndim == 2:
                scores = scores.mean(dim=0)
            best = scores.topk(budget).indices if budget else scores.new_zeros(0).long()
            kept.append(best.sort().values.cpu().numpy())
        return kept
