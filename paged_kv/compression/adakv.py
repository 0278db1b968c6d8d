"""AdaKV: one budget for all heads of a layer, shared out by where the best tokens are.

Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
2024 (arXiv 2407.11550).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paged_kv.compression.base import ScorePolicy, check_budget
from paged_kv.live import LiveTokens, Policy
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class AdaKV:
    """Keeps `lanes * budget` tokens of a layer, those with the best scores over all lanes.

    Needs a page table per head (`lanes="head"`) to differ from the policy inside.

    Attributes:
        policy: Scores the tokens.
        safeguard: Share of the budget that every lane gets in any case, from 0 to 1; at least one token above 0.
        budget: Tokens to keep a head, on average, where nothing else says how many; by default the policy's.
    """

    policy: ScorePolicy
    safeguard: float = 0.2
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, ScorePolicy):
            raise TypeError(f"AdaKV compares scores and needs a ScorePolicy, got {type(self.policy).__name__}")
        if not 0 <= self.safeguard <= 1:
            raise ValueError(f"safeguard must be from 0 to 1, got {self.safeguard}")

    def decider(self, layer: int) -> Policy:
        """The policy inside."""
        return self.policy

    @property
    def needs_queries(self) -> int:
        """Those of the policy inside."""
        return self.policy.needs_queries

    @property
    def num_protected(self) -> int:
        """As the policy inside."""
        return self.policy.num_protected

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """The best live indices over all lanes; see `Policy.keep`."""
        check_budget(budget, self.num_protected, self)
        lens = [len(positions) for positions in tokens.positions]
        if sum(lens) <= budget * len(lens):
            return [np.arange(live) for live in lens]
        safe = int(budget * self.safeguard)
        if self.safeguard > 0 and budget > 0:
            safe = max(1, safe)
        lanes = []
        for lane, live in enumerate(lens):
            scores = self.policy.lane_scores(tokens, lane).float().clone()
            scores[scores.topk(min(safe, live)).indices] = float("inf")
            lanes.append(scores)
        best = torch.cat(lanes).topk(budget * len(lens)).indices.sort().values.cpu().numpy()
        first = np.cumsum([0, *lens[:-1]])
        return [best[(best >= lo) & (best < lo + live)] - lo for lo, live in zip(first, lens, strict=True)]
