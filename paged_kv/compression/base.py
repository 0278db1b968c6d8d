"""What every compression method shares: scores in, budgets kept, live indices out.

Owns: `Policy` and `LiveTokens` by their public names, `ScorePolicy`, from which a method is a few lines, and the
attention that the newest queries pay to live tokens.
Does not know: pages, when to crop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from allocator import KVError
from paged_kv.compression.errors import BudgetTooSmall, NeedsQueries
from paged_kv.live import LiveTokens, Policy
from paged_kv.traits import TokenBudget

__all__ = ["LiveTokens", "Policy", "ScorePolicy", "attention_of_newest", "check_budget", "narrowed"]

#: The score of a token that is always kept.
ALWAYS = float("inf")


class ScorePolicy(ABC):
    """Keeps the tokens with the highest scores; a subclass says what a token scores.

    Attributes:
        budget: Tokens to keep where nothing else says how many, such as in `SamplingParams(compression=policy)`.
    """

    budget: TokenBudget = None

    @property
    def needs_queries(self) -> int:
        """How many of the newest queries `scores` reads, 0 if none."""
        return 0

    @property
    def num_protected(self) -> int:
        """Tokens that are kept whatever the budget; a smaller budget is refused."""
        return 0

    @abstractmethod
    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """How much each live token of a lane matters: `[live]`, or `[heads_per_lane, live]` to be averaged.

        `ALWAYS` (infinity) marks a token that must stay.
        """

    def lane_scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """One score per live token of a lane: `[live]`.

        Raises:
            KVError: `scores` gave another number of them.
        """
        scores, live = self.scores(tokens, lane), len(tokens.positions[lane])
        if scores.shape[-1:] != (live,) or scores.ndim > 2:
            raise KVError(f"{type(self).__name__} gave scores of shape {tuple(scores.shape)} for {live} live tokens")
        return scores.mean(dim=0) if scores.ndim == 2 else scores

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """The `budget` best live indices of each lane, strictly increasing; all of a lane that fits its budget.

        Raises:
            BudgetTooSmall: The budget is below `num_protected`.
            NeedsQueries: The method scores with queries that were not recorded.
            KVError: The budget is not a number of tokens.
        """
        check_budget(budget, self.num_protected, self)
        kept = []
        for lane in range(tokens.num_lanes):
            live = len(tokens.positions[lane])
            kept.append(np.arange(live) if live <= budget else _best(self.lane_scores(tokens, lane), budget))
        return kept


def check_budget(budget: object, protected: int, policy: object) -> None:
    """Refuse what is not a number of tokens, or fewer than a policy always keeps.

    Raises:
        KVError: Not an integer, or below 0.
        BudgetTooSmall: Below `protected`.
    """
    if isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 0:
        raise KVError(f"a budget is a number of tokens, at least 0, got {budget!r}")
    if budget < protected:
        raise BudgetTooSmall(policy, protected, int(budget))


def attention_of_newest(tokens: LiveTokens, lane: int, newest: int) -> Tensor:
    """The attention that the newest queries pay to a lane's live tokens, causal by position.

    Args:
        tokens: The layer.
        lane: Which page table.
        newest: How many queries; fewer if fewer are recorded.

    Returns:
        float32 `[heads_per_lane, group, queries, live]`, `group` being the query heads that read one KV head.

    Raises:
        NeedsQueries: None are recorded.
    """
    if tokens.queries is None:
        raise NeedsQueries(tokens.layer)
    keys = tokens.keys[lane].float()
    heads, _, width = keys.shape
    states = tokens.queries.states
    group = states.shape[0] // sum(part.shape[0] for part in tokens.keys)
    first = sum(part.shape[0] for part in tokens.keys[:lane]) * group
    queries = states[first : first + heads * group, -newest:].float().reshape(heads, group, -1, width)
    logits = torch.einsum("hgqd,hkd->hgqk", queries, keys) * tokens.queries.scale
    at = torch.arange(tokens.seen_len - queries.shape[2], tokens.seen_len)
    hidden = torch.from_numpy(tokens.positions[lane])[None] > at[:, None]
    return logits.masked_fill(hidden.to(logits.device), float("-inf")).softmax(dim=-1)


def narrowed(tokens: LiveTokens, kept: Sequence[np.ndarray]) -> LiveTokens:
    """The same layer as it would be if only `kept` live indices of each lane were left."""
    index = [torch.from_numpy(np.asarray(lane, np.int64)) for lane in kept]
    return replace(
        tokens,
        keys=[keys[:, at.to(keys.device)] for keys, at in zip(tokens.keys, index, strict=True)],
        values=[values[:, at.to(values.device)] for values, at in zip(tokens.values, index, strict=True)],
        positions=[positions[lane] for positions, lane in zip(tokens.positions, kept, strict=True)],
    )


def _best(scores: Tensor, budget: int) -> np.ndarray:
    best: np.ndarray = scores.topk(budget).indices.sort().values.cpu().numpy()
    return best
