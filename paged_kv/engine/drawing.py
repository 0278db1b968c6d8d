"""One token per row from logits and uniform numbers, all rows at once.

Owns: the numbers themselves (a counter-based generator), inversion, temperature, top-k, top-p and min-p.
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
#: Columns of a block in which `likeliest` looks.
BLOCK = 384
#: Lines in which `largest` lays a row out.
STRIDE = 16
#: Lowest temperature that is divided by; below it a draw is the likeliest token anyway.
COLDEST = 1e-6


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


def likeliest(logits: Tensor) -> Tensor:
    """The column of the largest value of each row, the first of equal ones: int64 `[rows]`."""
    columns = logits.shape[-1]
    size = BLOCK
    if columns < 4 * size or logits.device.type != "cpu":
        return logits.argmax(-1)
    # On CPUs the maximum of a block is vectorised, and where it lies is not: look for that in one block of each row.
    number = columns // size
    blocks = logits[:, : number * size].view(-1, number, size)
    tops = torch.cat([blocks.amax(-1), logits[:, number * size :]], 1)
    best = tops.argmax(-1)
    block = best.clamp(max=number - 1)
    inside = blocks[torch.arange(len(logits)), block].argmax(-1)
    return torch.where(best < number, block * size + inside, best + number * (size - 1))


def largest(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, largest first, and their columns, both `[rows, number]`: as `topk`, but faster.

    The columns are laid out as `STRIDE` lines. The wanted values lie where the maxima over the lines are largest, so
    that only a few thousand values are compared with each other, after one pass over all of them.
    """
    columns = values.shape[-1]
    width = columns // STRIDE
    if width < 4 * number:
        best = values.topk(number)
        return best.values, best.indices
    lines = values[:, : STRIDE * width].view(-1, STRIDE, width)
    places = lines.amax(1).topk(number, sorted=False).indices
    starts = torch.arange(0, STRIDE * width, width, device=values.device)
    rest = torch.arange(STRIDE * width, columns, device=values.device).expand(len(values), -1)
    where = torch.cat([(places.unsqueeze(1) + starts.unsqueeze(1)).flatten(1), rest], 1)
    best = values.gather(1, where).topk(number)
    return best.values, where.gather(1, best.indices)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The column at which each row's running sum of weights passes `uniform` of its total: int64 `[rows]`.

    Sums blocks first, so that the running sum is over a few hundred numbers.
    """
    rows, columns = weights.shape
    size = 256
    if columns % size:
        weights = torch.nn.functional.pad(weights, (0, -columns % size))
    padded = weights.view(rows, -1, size)
    blocks = padded.sum(-1).double().cumsum(-1)
    target = uniform.unsqueeze(1) * blocks[:, -1:]
    block = torch.searchsorted(blocks, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded[torch.arange(rows, device=weights.device), block[:, 0]].double().cumsum(-1)
    offset = torch.searchsorted(inside, (target - before).contiguous(), right=True)
    # Rounding may put the target at the very end: take the last column that has weight.
    last = (inside < inside[:, -1:]).sum(-1, keepdim=True)
    return (block * size + torch.minimum(offset, last))[:, 0]


@dataclass(frozen=True, slots=True)
class Limits:
    """Which tokens may be drawn and how likely, per row: all `[rows, 1]`.

    Attributes:
        temperature: float32, above 0.
        top_k: int64, the vocabulary's size for all.
        top_p, min_p: float32.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    first: int
    cuts: tuple[bool, ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Limits:
        """The limits of rows with these parameters."""
        ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
        most = max((k for k in ks if k < vocab), default=0)
        fewest = most if most and max(ks) < vocab else FIRST_CANDIDATES
        return cls(
            temperature=_column([max(p.temperature, COLDEST) for p in params], device),
            top_k=torch.tensor(ks, device=device).unsqueeze(1),
            top_p=_column([p.top_p for p in params], device),
            min_p=_column([p.min_p for p in params], device),
            first=min(vocab, max(most, fewest)),
            cuts=tuple(k < vocab or p.top_p < 1.0 or p.min_p > 0.0 for k, p in zip(ks, params, strict=True)),
        )

    def __getitem__(self, rows: Tensor) -> Limits:
        """The limits of some of the rows."""
        cuts = tuple(self.cuts[row] for row in rows.tolist())
        temperature, top_k, top_p, min_p = (p[rows] for p in (self.temperature, self.top_k, self.top_p, self.min_p))
        return Limits(temperature, top_k, top_p, min_p, self.first, cuts)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def draw(logits: Tensor, limits: Limits, uniform: Tensor) -> Tensor:
    """Draw a token per row: int64 `[rows]`.

    Args:
        logits: float32 `[rows, vocab]`.
        limits: Temperature, and which tokens are left: top-k first, then top-p of what is left, then min-p, as
            transformers does.
        uniform: float64 `[rows]`.
    """
    if all(limits.cuts):
        return _draw_cut(logits, limits, uniform)
    whole = torch.tensor([row for row, cut in enumerate(limits.cuts) if not cut], device=logits.device)
    weights = torch.softmax((logits if len(whole) == len(logits) else logits[whole]) / limits.temperature[whole], -1)
    if len(whole) == len(logits):
        return invert(weights, uniform)
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    picked[whole] = invert(weights, uniform[whole])
    cut = torch.tensor([row for row, cut in enumerate(limits.cuts) if cut], device=logits.device)
    picked[cut] = _draw_cut(logits[cut], limits[cut], uniform[cut])
    return picked


def _draw_cut(logits: Tensor, limits: Limits, uniform: Tensor) -> Tensor:
    """Draw among the likeliest candidates, in falling order of probability."""
    vocab = logits.shape[-1]
    picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    todo = torch.arange(len(logits), device=logits.device)
    number = limits.first
    mass = _mass(logits, limits)
    while len(todo):
        is_all = len(todo) == len(logits)
        values, ids = largest(logits if is_all else logits[todo], number)
        left = limits if is_all else limits[todo]
        scaled = (values - values[:, :1]) / left.temperature
        kept, complete = _kept(scaled, left, mass if is_all else mass[todo])
        complete |= number == vocab
        column = invert(torch.where(kept, scaled.exp(), 0.0), uniform[todo])
        picked[todo[complete]] = ids.gather(1, column.unsqueeze(1))[complete, 0]
        todo = todo[~complete]
        number = min(vocab, number * 8)
    return picked


def _mass(logits: Tensor, limits: Limits) -> Tensor:
    """The sum of all tokens' weights over the likeliest's, 0 where top-p does not need it: float64 `[rows, 1]`."""
    needs = ((limits.top_p < 1.0) & (limits.top_k >= logits.shape[-1]))[:, 0]
    mass = torch.zeros(len(logits), 1, dtype=torch.float64, device=logits.device)
    if bool(needs.any()):
        is_all = bool(needs.all())
        scaled = (logits if is_all else logits[needs]) / limits.temperature[needs]
        # The likeliest token's share of all is one over the mass.
        mass[needs] = 1.0 / torch.softmax(scaled, -1).amax(-1, keepdim=True).double()
    return mass


def _kept(scaled: Tensor, limits: Limits, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the sorted candidates `[rows, number]` may be drawn, and whether no later one could be.

    Args:
        scaled: Logits over temperature, 0 for the likeliest.
        limits: Of these rows.
        mass: See `_mass`.
    """
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = rank < limits.top_k
    weights = torch.where(kept, scaled.double().exp(), 0.0)
    share = weights / torch.where(mass > 0, mass, weights.sum(-1, keepdim=True))
    better = share.cumsum(-1) - share
    kept &= (better < limits.top_p) | (rank == 0) | (limits.top_p >= 1.0)
    kept &= (scaled >= limits.min_p.log()) | (limits.min_p == 0)
    return kept, ~kept[:, -1] | (limits.top_k[:, 0] <= scaled.shape[1])
