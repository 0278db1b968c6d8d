"""When a running row is cropped, and to what.

Owns: budgets of the layers of one request, the moments of its crops.
Does not know: how a policy chooses, how pages are freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allocator import OutOfPages, SeqId
from paged_kv.live import Policy
from paged_kv.memory import PagedMemory


@dataclass(frozen=True, slots=True)
class Compression:
    """Crop a request's layers at the end of its prompt, and if wanted again while it decodes.

    Attributes:
        policy: Chooses the tokens.
        budget: Tokens that each lane of each layer keeps: one number for all layers, or one per layer in order.
        every: Crop again after so many output tokens; None crops the prompt only.
    """

    policy: Policy
    budget: int | tuple[int, ...]
    every: int | None = None

    def __post_init__(self) -> None:
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        for budget in budgets:
            if type(budget) is not int or budget < 1:
                raise ValueError(f"a budget is a number of tokens, at least 1, got {budget!r}")
        if getattr(self.policy, "rerotate", False):
            raise ValueError("the engine does not turn keys: rerotate=True is for a cache, not for a request")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 token, got {self.every}")

    def of_layers(self, layers: Sequence[int]) -> dict[int, int]:
        """The budget of each paged layer.

        Raises:
            ValueError: As many budgets as layers were expected.
        """
        if isinstance(self.budget, int):
            return dict.fromkeys(layers, self.budget)
        if len(self.budget) != len(layers):
            raise ValueError(f"the model has {len(layers)} paged layers, got {len(self.budget)} budgets")
        return dict(zip(layers, self.budget, strict=True))

    def is_due(self, num_prompt: int, num_computed: int) -> bool:
        """Whether to crop now that `num_computed` tokens are in the pages."""
        if num_computed == num_prompt:
            return True
        return self.every is not None and num_computed > num_prompt and (num_computed - num_prompt) % self.every == 0

    def until_due(self, num_prompt: int, num_computed: int) -> int | None:
        """Tokens to compute until the next crop, None if there is none."""
        if num_computed < num_prompt:
            return num_prompt - num_computed
        return None if self.every is None else self.every - (num_computed - num_prompt) % self.every

    def crop(self, memory: PagedMemory, seq: SeqId) -> int:
        """Crop one sequence, layer by layer, smallest budget first; returns how many fewer pages are in use.

        Raises:
            OutOfPages: Survivors must move off shared or published pages and no page is left for them. The layers
                cropped so far stay cropped; calling again goes on with the others.
        """
        before = _num_active(memory)
        for layer, budget in sorted(self.of_layers(memory.layers).items(), key=lambda item: item[1]):
            if int(memory.live_lens([seq], layer).max()) <= budget:
                continue
            lanes = self.policy.keep(memory.live_tokens(seq, layer), budget)
            keep = {(layer, lane): indices for lane, indices in enumerate(lanes)}
            try:
                memory.crop(seq, keep)
            except OutOfPages:
                _make_room(memory, budget)
                memory.crop(seq, keep)
        return before - _num_active(memory)


def _num_active(memory: PagedMemory) -> int:
    return sum(stats.active_pages for stats in memory.stats())


def _make_room(memory: PagedMemory, num_tokens: int) -> None:
    """Let a growing pool grow by what `num_tokens` take, by reserving them for a moment.

    Raises:
        OutOfPages: The pool is as large as it may be.
    """
    scratch, _ = memory.open()
    try:
        memory.append([scratch], [num_tokens])
    finally:
        memory.close(scratch)


def ramp(mean: int, num_layers: int, spread: float) -> tuple[int, ...]:
    """Budgets that fall in a straight line over the layers and keep their mean, as PyramidKV shapes them.

    Args:
        mean: Mean budget in tokens.
        num_layers: Paged layers.
        spread: The first layer gets `mean * (1 + spread)`, the last `mean * (1 - spread)`; 0 for equal budgets.

    Source: Cai et al., "PyramidKV", 2024 (arXiv 2406.02069). Here the line is given by its spread, not by a window.
    """
    if not 0 <= spread < 1:
        raise ValueError(f"spread must be at least 0 and below 1, got {spread}")
    line = np.linspace(1 + spread, 1 - spread, num_layers) if num_layers > 1 else np.ones(1)
    return tuple(max(1, round(mean * float(share))) for share in line)
