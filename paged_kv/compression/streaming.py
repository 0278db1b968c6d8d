"""StreamingLLM: the first tokens, which attention sinks into, and the newest ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023 (arXiv 2309.17453). Here kept keys
keep the positions they were computed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_kv.keep import ends
from paged_kv.live import LiveTokens


@dataclass(frozen=True, slots=True)
class StreamingLLM:
    """Keeps `sinks` oldest live tokens and as many of the newest as the budget leaves.

    Attributes:
        sinks: Oldest live tokens to keep; all of the budget goes to them if it is smaller.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0 tokens, got {self.sinks}")

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """The ends of each lane; see `Policy.keep`."""
        first = min(self.sinks, budget)
        return [ends(len(positions), first, budget - first) for positions in tokens.positions]
