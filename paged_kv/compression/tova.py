"""TOVA: the newest token's attention decides who stays, the same for all heads.

Source: Oren et al., "Transformers are Multi-State RNNs", 2024 (arXiv 2401.06104). As in the paper's code the attention
is averaged over all heads that read the lane; the newest token itself always stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paged_kv.compression.base import ALWAYS, ScorePolicy, attention_of_newest
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class TOVA(ScorePolicy):
    """Keeps what the newest query attends to most.

    Attributes:
        budget: Tokens to keep where nothing else says how many.
    """

    budget: TokenBudget = field(default=None, kw_only=True)

    @property
    def needs_queries(self) -> int:
        """The newest."""
        return 1

    @property
    def num_protected(self) -> int:
        """The newest token."""
        return 1

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Attention from the newest query, averaged over heads: `[live]`."""
        scores = attention_of_newest(tokens, lane, 1).mean(dim=(0, 1, 2))
        if len(tokens.positions[lane]) and tokens.positions[lane][-1] == tokens.seen_len - 1:
            scores[-1] = ALWAYS
        return scores
