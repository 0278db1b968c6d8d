"""From logits to tokens, for all rows of a step at once.

Owns: penalties, biases and bans, greedy choice, seeded draws, log probabilities.
Does not know: pages, scheduling, text.

Where transformers has a processor that depends on the tokens so far (repetition penalty, bad words), that one is used.
Temperature is applied here, top-k, top-p and min-p with the draw itself in `drawing`.

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

from paged_kv.engine.drawing import Truncation, draw_truncated, draw_uniform, invert, truncates
from paged_kv.engine.grammar import GrammarError, Grammars
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import Logprob, Logprobs, Row

#: A token's text.
Decode = Callable[[int], str]


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
        grammar: What the output is kept to, compiled.
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
    grammar: Any = None
    edits: bool = field(init=False)
    wants_logprobs: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.edits = penalised or bool(params.logit_bias) or params.min_tokens > 0
        self.edits |= params.allowed_token_ids is not None
        self.wants_logprobs = params.logprobs is not None or (params.best_of or 0) > params.n
        changed = self.edits or bool(self.shared) or bool(self.custom) or self.grammar is not None
        self.plain = params.greedy and not changed and not self.wants_logprobs


class Sampler:
    """Draws the next token of each row."""

    def __init__(
        self,
        *,
        eos_ids: Sequence[int] = (),
        encode: Callable[[str], list[int]] | None = None,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Keep the model's end-of-sequence tokens, how text becomes tokens and back, and who follows grammars."""
        self._eos_ids = tuple(eos_ids)
        self._encode = encode
        self.decode = decode
        self._grammars = grammars

    def prepare(self, params: SamplingParams, seed: int) -> RowSampler:
        """Work out what a request needs.

        Raises:
            ValueError: Bad words or a grammar without a tokenizer, or a grammar that is wrong.
        """
        shared: dict[tuple[Any, ...], LogitsProcessor] = {}
        if params.repetition_penalty != 1.0:
            penalty = float(params.repetition_penalty)
            shared["repetition", penalty] = RepetitionPenaltyLogitsProcessor(penalty)
        if params.bad_words:
            shared["bad words", params.bad_words] = NoBadWordsLogitsProcessor(self._bad_words(params.bad_words))
        custom = tuple(params.logits_processors)
        grammar = None
        if params.structured_outputs is not None and self._grammars is not None:
            grammar = self._grammars.compile(params.structured_outputs)
        stops = (() if params.ignore_eos else self._eos_ids) + params.stop_token_ids if params.min_tokens else ()
        return RowSampler(params, seed, shared, custom, stops, grammar)

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
                number, token = samplers[i].params.logprobs, tokens[i]
                top = None if number is None else top_logprobs(token, raw[line], number, self.decode)
                draws[i] = Draw(token, float(raw[line, token]), top)
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
        held = [i for i, row in enumerate(rows) if row.sampler.grammar is not None]
        if self._grammars is not None and held:
            failed |= self._keep_to_grammars(self._grammars, logits, rows, held)
        return failed

    @staticmethod
    def _keep_to_grammars(
        grammars: Grammars, logits: Tensor, rows: Sequence[Row], lines: list[int]
    ) -> dict[int, Exception]:
        """Ban what the rows' grammars do not allow; returns the rows that have no token left."""
        for i in lines:
            if rows[i].constraint is None:
                rows[i].constraint = grammars.begin(rows[i].sampler.grammar)
        grammars.mask(logits, lines, [rows[i].constraint for i in lines])
        is_dead = (logits.amax(-1) == -torch.inf).tolist()
        message = "no token is left that the grammar, min_tokens, biases and bad words all allow"
        return {i: GrammarError(message) for i in lines if is_dead[i]}

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
        cut = [p for p, i in enumerate(drawn) if truncates(params[i])]
        whole = [p for p, i in enumerate(drawn) if not truncates(params[i])]
        picked = torch.empty(len(drawn), dtype=torch.int64, device=logits.device)
        if whole:
            picked[whole] = invert(torch.softmax(scaled[whole], -1), uniform[whole].to(logits.device))
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
        if params.allowed_token_ids is not None:
            allowed = list(params.allowed_token_ids)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept
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


def top_logprobs(token: int, logprobs: Tensor, number: int, decode: Decode | None = None) -> Logprobs:
    """The `number` likeliest tokens of `[vocab]` (-1 for all), likeliest first, and `token`; with their ranks."""
    number = logprobs.shape[-1] if number < 0 else min(number, logprobs.shape[-1])
    top: Logprobs = {}
    if number:
        best = logprobs.topk(number)
        for rank, (other, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), 1):
            top[other] = Logprob(value, rank, other, decode)
    if token not in top:
        chosen = logprobs[token]
        top[token] = Logprob(float(chosen), int((logprobs > chosen).sum()) + 1, token, decode)
    return top
