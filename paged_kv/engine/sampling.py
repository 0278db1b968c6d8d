"""From logits to tokens, for all rows of a step at once.

Owns: penalties, biases and bans, greedy choice, seeded draws, log probabilities.
Does not know: pages, scheduling, text.

Where transformers has a processor that depends on the tokens so far (repetition penalty, bad words), that one is used.
Temperature, top-k, top-p and min-p are done here on the likeliest candidates of all rows together, with a sort of a
hundred candidates instead of the whole vocabulary; tests hold them to transformers' processors.

A draw is a function of the request's seed, the completion's index and the token's index alone (a counter-based
generator), so that neither the batch around it nor a preemption changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import Logprobs, Row

#: Candidates looked at first for top-p and min-p; more are taken for the rows that need them.
FIRST_CANDIDATES = 128


@dataclass(frozen=True, slots=True)
class Draw:
    """A row's next token.

    Attributes:
        token: Its id.
        logprob: Its log probability before any processing, if asked for.
        top: Log probabilities of the likeliest tokens and of the chosen one, if asked for.
    """

    token: int
    logprob: float | None = None
    top: Logprobs | None = None


@dataclass(slots=True)
class RowSampler:
    """What one request needs of the sampler, worked out once.

    Attributes:
        shared: Transformers' processors, with the key by which rows of equal ones are processed together.
        custom: The request's own processors.
        stops: Tokens banned until `min_tokens`.
        edits: Whether single logits are changed.
        wants_logprobs: Whether log probabilities are reported or rank completions.
        plain: Whether the likeliest token of the raw logits is the answer, and nothing else is asked for.
    """

    params: SamplingParams
    seed: int
    shared: dict[tuple[Any, ...], LogitsProcessor] = field(default_factory=dict)
    custom: tuple[Callable[[Any, Any], Any], ...] = ()
    stops: tuple[int, ...] = ()
    edits: bool = field(init=False)
    wants_logprobs: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.edits = penalised or bool(params.logit_bias) or params.min_tokens > 0
        self.wants_logprobs = params.logprobs is not None or (params.best_of or 0) > params.n
        changed = self.edits or bool(self.shared) or bool(self.custom)
        self.plain = params.greedy and not changed and not self.wants_logprobs


class Sampler:
    """Draws the next token of each row."""

    def __init__(self, *, eos_ids: Sequence[int] = (), encode: Callable[[str], list[int]] | None = None) -> None:
        """Keep the model's end-of-sequence tokens and, for bad words, how to encode text."""
        self._eos_ids = tuple(eos_ids)
        self._encode = encode

    def prepare(self, params: SamplingParams, seed: int) -> RowSampler:
        """Work out what a request needs.

        Raises:
            ValueError: Bad words without a tokenizer.
        """
        shared: dict[tuple[Any, ...], LogitsProcessor] = {}
        if params.repetition_penalty != 1.0:
            penalty = float(params.repetition_penalty)
            shared["repetition", penalty] = RepetitionPenaltyLogitsProcessor(penalty)
        if params.bad_words:
            shared["bad words", params.bad_words] = NoBadWordsLogitsProcessor(self._bad_words(params.bad_words))
        custom = tuple(params.logits_processors)
        if params.structured is not None:
            custom = (*custom, params.structured)
        stops = (() if params.ignore_eos else self._eos_ids) + params.stop_token_ids if params.min_tokens else ()
        return RowSampler(params, seed, shared, custom, stops)

    def _bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        if self._encode is None:
            raise ValueError("bad_words needs a tokenizer")
        # A word is banned at the start of the text and after a space alike.
        spelled = (tuple(self._encode(prefix + word.lstrip())) for word in words for prefix in ("", " "))
        return [list(ids) for ids in dict.fromkeys(spelled) if ids]

    def __call__(self, logits: Tensor, rows: Sequence[Row]) -> list[Draw | Exception]:
        """Draw one token per row.

        Args:
            logits: `[rows, vocab]`, any float type; may be overwritten.
            rows: Whose logits they are.

        Returns:
            One draw per row, or the exception that a row's own processor raised.
        """
        samplers: list[RowSampler] = [row.sampler for row in rows]
        if all(sampler.plain for sampler in samplers):
            return [Draw(token) for token in logits.argmax(-1).tolist()]
        logits = logits.float()
        wanted = [i for i, sampler in enumerate(samplers) if sampler.wants_logprobs]
        raw = torch.log_softmax(logits[wanted], -1) if wanted else None
        failed = self.process(logits, rows)
        tokens = self._choose(logits, rows)
        draws: list[Draw | Exception] = [Draw(token) for token in tokens]
        if raw is not None:
            for line, i in enumerate(wanted):
                draws[i] = _with_logprobs(tokens[i], raw[line], samplers[i].params.logprobs)
        for i, error in failed.items():
            draws[i] = error
        return draws

    def process(self, logits: Tensor, rows: Sequence[Row]) -> dict[int, Exception]:
        """Apply everything but temperature and truncation to float32 `logits` in place.

        Returns:
            The exceptions of custom processors, by row.
        """
        if any(row.sampler.edits for row in rows):
            _edit(logits, rows)
        groups: dict[tuple[Any, ...], tuple[LogitsProcessor, list[int]]] = {}
        for i, row in enumerate(rows):
            for key, processor in row.sampler.shared.items():
                groups.setdefault(key, (processor, []))[1].append(i)
        for processor, members in groups.values():
            ids = _padded([rows[i].tokens for i in members], logits.device)
            logits[members] = processor(ids, logits[members])
        failed: dict[int, Exception] = {}
        for i, row in enumerate(rows):
            try:
                for custom in row.sampler.custom:
                    ids = torch.tensor([row.tokens], device=logits.device)
                    logits[i] = custom(ids, logits[i : i + 1].clone())[0]
            except Exception as error:  # noqa: BLE001 - foreign code: its failure is its own request's result
                failed[i] = error
        return failed

    def _choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """A token per row: the likeliest, or a draw."""
        params = [row.sampler.params for row in rows]
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        if not drawn:
            return [int(token) for token in logits.argmax(-1).tolist()]
        tokens = logits.argmax(-1)
        uniform = draw_uniform(
            [rows[i].sampler.seed for i in drawn], [rows[i].index for i in drawn], [rows[i].num_output for i in drawn]
        )
        scaled = logits[drawn] / torch.tensor([[params[i].temperature] for i in drawn], device=logits.device)
        cut = [p for p, i in enumerate(drawn) if _truncates(params[i])]
        whole = [p for p, i in enumerate(drawn) if not _truncates(params[i])]
        picked = torch.empty(len(drawn), dtype=torch.int64, device=logits.device)
        if whole:
            picked[whole] = _invert(torch.softmax(scaled[whole], -1), uniform[whole].to(logits.device))
        if cut:
            limits = Truncation.of([params[drawn[p]] for p in cut], scaled.shape[-1], logits.device)
            picked[cut] = draw_truncated(scaled[cut], limits, uniform[cut].to(logits.device))
        tokens[drawn] = picked
        return [int(token) for token in tokens.tolist()]


# -- single logits -----------------------------------------------------------------------------------------------------


def _edit(logits: Tensor, rows: Sequence[Row]) -> None:
    """Add penalties and biases, ban stop tokens before `min_tokens`; in place, all rows at once."""
    lines: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for i, row in enumerate(rows):
        params: SamplingParams = row.sampler.params
        changes: dict[int, float] = dict(params.logit_bias or {})
        if params.presence_penalty or params.frequency_penalty:
            for token, count in zip(*np.unique(row.output_ids, return_counts=True), strict=True):
                penalty = params.presence_penalty + params.frequency_penalty * int(count)
                changes[int(token)] = changes.get(int(token), 0.0) - penalty
        if row.num_output < params.min_tokens:
            changes |= dict.fromkeys(row.sampler.stops, -float("inf"))
        lines += [i] * len(changes)
        tokens += changes.keys()
        values += map(float, changes.values())
    if lines:
        index = torch.tensor([lines, tokens], device=logits.device)
        logits.index_put_((index[0], index[1]), torch.tensor(values, device=logits.device), accumulate=True)


def _padded(tokens: Sequence[list[int]], device: torch.device) -> Tensor:
    """Rows of token ids as a rectangle, filled on the left with the row's own first token.

    Transformers' processors used here look at the set of tokens or at the newest ones, so that the filling is neutral.
    """
    longest = max(map(len, tokens))
    ids = np.empty((len(tokens), longest), np.int64)
    for line, row in zip(ids, tokens, strict=True):
        line[: longest - len(row)] = row[0]
        line[longest - len(row) :] = row
    return torch.from_numpy(ids).to(device)


def _with_logprobs(token: int, logprobs: Tensor, number: int | None) -> Draw:
    """A draw with the log probabilities of the chosen token and of the `number` likeliest ones."""
    chosen = float(logprobs[token])
    if number is None:
        return Draw(token, chosen)
    return Draw(token, chosen, top_logprobs(token, logprobs, number))


def top_logprobs(token: int, logprobs: Tensor, number: int) -> Logprobs:
    """The `number` likeliest tokens of `[vocab]`, likeliest first, and `token`, with their log probabilities."""
    best = logprobs.topk(min(number, logprobs.shape[-1])) if number else None
    top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best is not None else {}
    top.setdefault(token, float(logprobs[token]))
    return top


# -- draws -------------------------------------------------------------------------------------------------------------


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


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
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
        column = _invert(torch.where(kept, (values - values[:, :1]).exp(), 0.0), uniform[todo])
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
