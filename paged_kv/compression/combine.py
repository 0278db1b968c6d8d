"""Policies made of policies: other methods in other layers, one after another, with tokens that always stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paged_kv.compression.base import ALWAYS, ScorePolicy, check_budget, narrowed
from paged_kv.live import LiveTokens, Policy
from paged_kv.traits import TokenBudget, protected_by, queries_needed


@dataclass(frozen=True, slots=True)
class PerLayer:
    """One policy for some layers, others for the rest.

    Attributes:
        default: For layers that are not named.
        layers: Model layer index to policy.
        budget: Tokens to keep where nothing else says how many; by default each policy's own, in its layers.
    """

    default: Policy
    layers: Mapping[int, Policy] = field(default_factory=dict)
    budget: TokenBudget = field(default=None, kw_only=True)

    def decider(self, layer: int) -> Policy:
        """The layer's policy."""
        return self.layers.get(layer, self.default)

    @property
    def needs_queries(self) -> int:
        """The most that any of them needs."""
        return max(map(queries_needed, [self.default, *self.layers.values()]))

    @property
    def num_protected(self) -> int:
        """The most that any of them protects."""
        return max(map(protected_by, [self.default, *self.layers.values()]))

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """What the layer's policy keeps; see `Policy.keep`."""
        return self.decider(tokens.layer).keep(tokens, budget)


@dataclass(frozen=True, slots=True)
class Chain:
    """Policies one after another: each chooses among what the one before it kept.

    Attributes:
        policies: In order; the last gets the budget itself.
        narrowing: The policy before it gets `narrowing` times as much, the one before that again, and so on.
        budget: Tokens to keep where nothing else says how many; by default the last policy's.
    """

    policies: Sequence[Policy]
    narrowing: int = 2
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.policies:
            raise ValueError("a chain needs at least one policy")
        if self.narrowing < 1:
            raise ValueError(f"narrowing must be at least 1, got {self.narrowing}")

    def decider(self, layer: int) -> Policy:
        """The last policy."""
        return self.policies[-1]

    @property
    def needs_queries(self) -> int:
        """The most that any of them needs."""
        return max(map(queries_needed, self.policies))

    @property
    def num_protected(self) -> int:
        """The most that any of them protects."""
        return max(map(protected_by, self.policies))

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """What is left after the last policy; see `Policy.keep`."""
        check_budget(budget, self.num_protected, self)
        kept = [np.arange(len(positions)) for positions in tokens.positions]
        for place, policy in enumerate(self.policies):
            share = budget * self.narrowing ** (len(self.policies) - 1 - place)
            chosen = policy.keep(narrowed(tokens, kept), share)
            kept = [lane[index] for lane, index in zip(kept, chosen, strict=True)]
        return kept


@dataclass(frozen=True, slots=True)
class Protect(ScorePolicy):
    """A scoring policy that besides always keeps the oldest and the newest live tokens.

    Attributes:
        policy: Scores the tokens in between.
        sinks: Oldest live tokens to keep.
        recent: Newest live tokens to keep.
        budget: Tokens to keep where nothing else says how many; by default the policy's.
    """

    policy: ScorePolicy
    sinks: int = 4
    recent: int = 32
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, ScorePolicy):
            raise TypeError(f"Protect changes scores and needs a ScorePolicy, got {type(self.policy).__name__}")
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be at least 0 tokens, got {self.sinks} and {self.recent}")

    def decider(self, layer: int) -> Policy:
        """The policy inside."""
        return self.policy

    @property
    def needs_queries(self) -> int:
        """Those of the policy inside."""
        return self.policy.needs_queries

    @property
    def num_protected(self) -> int:
        """Both ends, and what the policy protects besides."""
        return self.sinks + self.recent + self.policy.num_protected

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """The policy's scores, with both ends at `ALWAYS`: `[live]`."""
        scores = self.policy.lane_scores(tokens, lane).clone()
        index = torch.arange(len(scores), device=scores.device)
        ends = (index < self.sinks) | (index >= len(scores) - self.recent)
        return scores.masked_fill(ends, ALWAYS)


@dataclass(frozen=True, slots=True)
class MinBudget:
    """A policy that is never asked for fewer than so many tokens, whatever the layer's budget.

    Attributes:
        policy: Chooses the tokens.
        least: Tokens that every lane keeps at least.
        budget: Tokens to keep where nothing else says how many; by default the policy's.
    """

    policy: Policy
    least: int
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_budget(self.least, protected_by(self.policy), self.policy)

    def decider(self, layer: int) -> Policy:
        """The policy inside."""
        return self.policy

    @property
    def needs_queries(self) -> int:
        """Those of the policy inside."""
        return queries_needed(self.policy)

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """What the policy keeps of the larger budget; see `Policy.keep`."""
        check_budget(budget, 0, self)
        return self.policy.keep(tokens, max(budget, self.least))
