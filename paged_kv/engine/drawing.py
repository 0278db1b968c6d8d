"""One token per row from logits and uniform numbers, all rows at once.

Owns: the numbers themselves (a counter-based generator), inversion, top-k, top-p and min-p.
Does not know: rows, requests, penalties, text.

The likeliest candidates of all rows are looked at together, with a sort of a hundred candidates instead of the whole
vocabulary; tests hold them to transformers' processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_kv.engine.params import SamplingParams

#: Candidates looked at first for top-p and min-p; more are taken for the rows that need them.
FIRST_CANDIDATES = 128


def draw_uniform(seeds: Sequence[int], indices: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Numbers in [0, 1) that depend on seed, completion and token index alone: float64 `[rows]`.

    Source: SplitMix64's finaliser (Steele, Lea, Flood 2014) over the three counters.
    """
    mask = (1 << 64) - 1
    state = np.array([seed & mask for seed in seeds], np.uint64)
    with np.errstate(over="ignore"):
        for counter in (np.array(indices, np.uint64), np.array(steps, np.uint64)):
            state = _mix(state + np.uint64(0x9E3779B97F4A7C15) * (counter + np.uint64(1)))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


def truncates(params: SamplingParams) -> bool:
    """Whether some tokens may not be drawn."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The column at which each row's running sum of weights passes `uniform` of its total: int64 `[rows]`.

    Sums blocks first, so that the running sum is over a few hundred numbers.
    """
    rows, columns = weights.shape
    size = 256
    padded = torch.nn.functional.pad(weights, (0, -columns % size)).view(rows, -1, size)
    blocks = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform.unsqueeze(1) * blocks[:, -1:]
    block = torch.searchsorted(blocks, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded[torch.arange(rows, device=weights.device), block[:, 0]].double().cumsum(-1)
    offset = torch.searchsorted(inside, (target - before).contiguous(), right=True)
    # Rounding may put the target at the very end: take the last column that has weight.
    last = (inside < inside[:, -1:]).sum(-1, keepdim=True)
    return (block * size + torch.minimum(offset, last))[:, 0]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which candidates may be drawn, per row: `top_k` (0 for all) int64 `[rows, 1]`, `top_p` and `min_p` float32."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    first: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Truncation:
        """The limits of rows with these parameters."""
        most = max((p.top_k for p in params), default=0)
        return cls(
            top_k=torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params], device=device),
            top_p=torch.tensor([[p.top_p] for p in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=device),
            first=min(vocab, max(most, FIRST_CANDIDATES)),
        )


def draw_truncated(scaled: Tensor, limits: Truncation, uniform: Tensor) -> Tensor:
    """Draw among the likeliest candidates, in falling order of probability: int64 `[rows]`.

    Args:
        scaled: Logits over temperature, `[rows, vocab]`.
        limits: Which candidates are left. Top-k first, then top-p of what is left, then min-p, as transformers does.
        uniform: float64 `[rows]`.
    """
    vocab = scaled.shape[-1]
    picked = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    todo = torch.arange(len(scaled), device=scaled.device)
    number = limits.first
    total = scaled.logsumexp(-1, keepdim=True).double() if bool((limits.top_k >= vocab).any()) else None
    while len(todo):
        values, ids = scaled[todo].topk(number)
        kept, complete = _kept(values, limits, todo, None if total is None else total[todo])
        complete |= number == vocab
        column = invert(torch.where(kept, (values - values[:, :1]).exp(), 0.0), uniform[todo])
        picked[todo[complete]] = ids.gather(1, column.unsqueeze(1))[complete, 0]
        todo = todo[~complete]
        number = min(vocab, number * 8)
    return picked


def _kept(values: Tensor, limits: Truncation, rows: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which of the sorted candidates `[rows, number]` may be drawn, and whether no later one could be."""
    top_k, top_p, min_p = limits.top_k[rows], limits.top_p[rows], limits.min_p[rows]
    rank = torch.arange(values.shape[1], device=values.device)
    kept = rank < top_k
    weights = values.double()
    among_k = weights.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
    norm = among_k if total is None else torch.where(top_k <= values.shape[1], among_k, total)
    probability = (weights - norm).exp()
    better = probability.cumsum(-1) - probability
    kept &= (better < top_p) | (rank == 0) | (top_p >= 1.0)
    kept &= (values >= values[:, :1] + min_p.log()) | (min_p == 0)
    return kept, ~kept[:, -1] | (top_k[:, 0] <= values.shape[1])
