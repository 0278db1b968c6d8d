"""StreamingLLM: the first tokens, which attention sinks into, and the newest ones.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023 (arXiv 2309.17453). Kept keys keep
the positions they were computed at, unless `rerotate` closes the gap behind the sinks as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.compression.base import check_budget
from paged_kv.compression.errors import UnsupportedMethod
from paged_kv.compression.rotary import Rotary
from paged_kv.keep import ends
from paged_kv.live import LiveTokens
from paged_kv.traits import TokenBudget


@dataclass(frozen=True, slots=True)
class StreamingLLM:
    """Keeps `sinks` oldest live tokens and as many of the newest as the budget leaves.

    Attributes:
        sinks: Oldest live tokens to keep.
        rerotate: Turn the kept keys so that distances are counted over kept tokens: the oldest sink is then as far
            from the next query as there are live tokens, however many were seen. Rotary attention depends on distances
            alone, so this equals counting positions within the cache, while positions of new tokens go on. Crop such
            a sequence by no other policy.
        rotary: The model's frequencies; `for_model` fills them in.
        budget: Tokens to keep where nothing else says how many.
    """

    sinks: int = 4
    rerotate: bool = False
    rotary: Rotary | None = None
    budget: TokenBudget = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0 tokens, got {self.sinks}")

    def for_model(self, model: Any) -> StreamingLLM:
        """The same policy with the rotary frequencies of a model.

        Raises:
            UnsupportedMethod: The model has no rotary embedding of the usual kind.
        """
        return replace(self, rotary=Rotary.of(model))

    @property
    def num_protected(self) -> int:
        """The sinks."""
        return self.sinks

    def keep(self, tokens: LiveTokens, budget: int) -> Sequence[np.ndarray]:
        """The ends of each lane; see `Policy.keep`.

        Raises:
            BudgetTooSmall: The budget is below the sinks.
            UnsupportedMethod: `rerotate` without frequencies.
        """
        check_budget(budget, self.sinks, self)
        if self.rerotate and self.rotary is None:
            raise UnsupportedMethod("rerotate needs the model's frequencies: StreamingLLM(rerotate=True).for_model(m)")
        return [ends(len(positions), self.sinks, budget - self.sinks) for positions in tokens.positions]

    def rewrite(self, tokens: LiveTokens, kept: Sequence[np.ndarray]) -> list[Tensor] | None:
        """The kept keys, turned: per lane `[heads_per_lane, kept, key_width]`; None if nothing changes.

        Args:
            tokens: The layer before the crop, whose live tokens are at consecutive distances.
            kept: What `keep` returned.
        """
        if not self.rerotate or self.rotary is None:
            return None
        turned = []
        for keys, lane in zip(tokens.keys, kept, strict=True):
            new = np.arange(len(lane)) - len(lane)
            old = np.asarray(lane) - keys.shape[1]
            turned.append(self.rotary.turn(keys[:, torch.from_numpy(np.asarray(lane))], torch.from_numpy(new - old)))
        return turned
