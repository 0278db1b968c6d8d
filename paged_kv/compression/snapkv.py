"""SnapKV: the newest tokens' attention says what the rest of the prompt is worth.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv 2404.14469).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from paged_kv.compression.base import ALWAYS, ScorePolicy, attention_of_newest
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class SnapKV(ScorePolicy):
    """Keeps an observation window, and before it what the window attends to, smoothed over neighbours.

    Attributes:
        window: Newest tokens whose queries observe; they are always kept.
        kernel: Tokens that a score is averaged over, odd.
        budget: Tokens to keep where nothing else says how many.
    """

    window: int = 64
    kernel: int = 5
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd and at least 1 token, got {self.kernel}")

    @property
    def needs_queries(self) -> int:
        """The window's."""
        return self.window

    @property
    def num_protected(self) -> int:
        """The window."""
        return self.window

    def scores(self, tokens: LiveTokens, lane: int) -> Tensor:
        """Mean attention from the window, smoothed: `[heads_per_lane, live]`."""
        received = attention_of_newest(tokens, lane, self.window).mean(dim=(1, 2))
        recent = int(np.searchsorted(tokens.positions[lane], tokens.seen_len - self.window))
        smooth = F.avg_pool1d(received[:, :recent], self.kernel, stride=1, padding=self.kernel // 2)
        window = torch.full_like(received[:, recent:], ALWAYS)
        return torch.cat([smooth, window], dim=1)
