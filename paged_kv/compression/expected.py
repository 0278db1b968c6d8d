"""Expected Attention: what future queries will probably look at, from the distribution of past ones.

Source: Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", 2025 (arXiv 2510.00636).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paged_kv.compression.base import ALWAYS, ScorePolicy
from paged_kv.compression.errors import NeedsQueries
from paged_kv.compression.rotary import Rotary
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class ExpectedAttention(ScorePolicy):
    """Keeps the tokens with the highest expected attention times the norm of their value.

    Queries before their rotation are taken for normally distributed; turned to each of the next `horizon` positions
    and averaged, their mean and covariance give the expectation of `exp(q k)`.

    Attributes:
        rotary: The model's rotary frequencies; see `for_model`.
        sinks: Oldest tokens that are always kept; their queries are left out of the statistics.
        horizon: Future positions to average over.
        queries: Newest queries to take the statistics of.
        budget: Tokens to keep where nothing else says how many.
    """

    rotary: Rotary
    sinks: int = 4
    horizon: int = 512
    queries: int = 512
    budget: TokenBudget = field(default=None, kw_only=True)

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> ExpectedAttention:
        """With the rotary frequencies of a transformers model.

        Raises:
            UnsupportedMethod: The model has no rotary embedding of the usual kind.
        """
        return cls(Rotary.of(model), **options)

    @property
    def needs_queries(self) -> int:
        """All that the statistics are taken of."""
        return self.queries

    @property
    def num_protected(self) -> int:
        """The sinks."""
        return self.sinks

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Expected share of attention times the norm of the value: `[heads_per_lane, live]`."""
        mean, cov, scale = self._future_queries(tokens, lane)
        keys = tokens.keys[lane][:, self.sinks :].float()
        values = tokens.values[lane][:, self.sinks :].float()
        logits = torch.einsum("hgd,hkd->hgk", mean, keys) * scale
        logits += torch.einsum("hki,hgij,hkj->hgk", keys, cov, keys) * (scale**2 / 2)
        scores = logits.softmax(dim=-1).mean(dim=1) * values.norm(dim=-1)
        sinks = scores.new_full((len(scores), tokens.keys[lane].shape[1] - scores.shape[1]), ALWAYS)
        return torch.cat([sinks, scores], dim=1)

    def _future_queries(self, tokens: LiveTokens, lane: int) -> tuple[Tensor, Tensor, float]:
        """Mean `[heads, group, width]` and covariance of the queries to come, and the factor on logits."""
        if tokens.queries is None:
            raise NeedsQueries(tokens.layer)
        heads = tokens.keys[lane].shape[0]
        states = tokens.queries.states.float()
        group = states.shape[0] // sum(part.shape[0] for part in tokens.keys)
        first = sum(part.shape[0] for part in tokens.keys[:lane]) * group
        positions = torch.arange(tokens.seen_len - states.shape[1], tokens.seen_len)
        counted = positions >= self.sinks
        plain = self.rotary.turn(states[first : first + heads * group], -positions)[:, counted]
        mean = plain.mean(dim=1)
        centered = plain - mean[:, None]
        cov = torch.einsum("hqi,hqj->hij", centered, centered) / plain.shape[1]
        rotation = self.rotary.mean_rotation(tokens.seen_len, self.horizon, plain.shape[-1]).to(plain.device)
        mean, cov = mean @ rotation.T, rotation @ cov @ rotation.T
        width = plain.shape[-1]
        return mean.view(heads, group, width), cov.view(heads, group, width, width), tokens.queries.scale
