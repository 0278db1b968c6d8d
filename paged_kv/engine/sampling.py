"""From logits to tokens, for all rows of a step at once.

Owns: which rows are greedy, drawn, changed and kept to grammars; custom processors; log probabilities.
Does not know: pages, scheduling, text.

Penalties, biases and bans are in `edits`; temperature, top-k, top-p and min-p in `drawing`, with the draw itself.

A draw is a function of the request's seed, the completion's index and the token's index alone (a counter-based
generator), so that neither the batch around it nor a preemption changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allocator import KVError
from paged_kv.engine import edits
from paged_kv.engine.drawing import Limits, draw, draw_uniform, largest, likeliest
from paged_kv.engine.grammar import Grammars
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


class NoTokenLeft(KVError, ValueError):
    """Raised when every token of a row is banned, or its logits are no numbers. Do: loosen what the message names."""


@dataclass(slots=True)
class RowSampler:
    """What one request needs of the sampler, worked out once.

    Attributes:
        edits: The single logits that are changed, None for none.
        custom: The request's own processors.
        grammar: What the output is kept to, compiled.
        wants_logprobs: Whether log probabilities are reported or rank completions.
        plain: Whether the likeliest token of the raw logits is the answer, and nothing else is asked for.
    """

    params: SamplingParams
    seed: int
    edits: edits.Edits | None = None
    custom: tuple[Callable[[Any, Any], Any], ...] = ()
    grammar: Any = None
    wants_logprobs: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.wants_logprobs = params.logprobs is not None or (params.best_of or 0) > params.n
        changed = self.edits is not None or bool(self.custom) or self.grammar is not None
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
        grammar = None
        if params.structured_outputs is not None and self._grammars is not None:
            grammar = self._grammars.compile(params.structured_outputs)
        stops = (() if params.ignore_eos else self._eos_ids) + params.stop_token_ids
        changes = edits.Edits.of(params, stops, self._bad_words(params.bad_words))
        return RowSampler(params, seed, changes, tuple(params.logits_processors), grammar)

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        if self._encode is None:
            raise ValueError("bad_words needs a tokenizer")
        # A word is banned at the start of the text and after a space alike.
        spelled = (tuple(self._encode(prefix + word.lstrip())) for word in words for prefix in ("", " "))
        return tuple(ids for ids in dict.fromkeys(spelled) if ids)

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
            return [Draw(token) for token in likeliest(logits).tolist()]
        logits = logits.float()
        wanted = [i for i, sampler in enumerate(samplers) if sampler.wants_logprobs]
        raw = torch.log_softmax(logits if len(wanted) == len(rows) else logits[wanted], -1) if wanted else None
        failed = self.process(logits, rows)
        tokens = self._choose(logits, rows)
        draws: list[Draw | Exception] = [Draw(token) for token in tokens]
        if raw is not None:
            numbers = [samplers[i].params.logprobs for i in wanted]
            tops = tops_of([tokens[i] for i in wanted], raw, numbers, self.decode)
            for line, (i, top) in enumerate(zip(wanted, tops, strict=True)):
                draws[i] = Draw(tokens[i], float(raw[line, tokens[i]]), top)
        for i, error in failed.items():
            draws[i] = error
        return draws

    def process(self, logits: Tensor, rows: Sequence[Row]) -> dict[int, Exception]:
        """Apply everything but temperature and truncation to float32 `logits` in place.

        Returns:
            The exceptions of custom processors, by row.
        """
        changed = edits.apply(logits, rows)
        failed: dict[int, Exception] = {}
        for i, row in enumerate(rows):
            try:
                for custom in row.sampler.custom:
                    ids = torch.tensor([row.tokens], device=logits.device)
                    logits[i] = custom(ids, logits[i : i + 1].clone())[0]
                    changed.append(i)
            except Exception as error:  # noqa: BLE001 - foreign code: its failure is its own request's result
                failed[i] = error
        held = [i for i, row in enumerate(rows) if row.sampler.grammar is not None]
        if self._grammars is not None and held:
            self._keep_to_grammars(self._grammars, logits, rows, held)
        return failed | _dead(logits, sorted({*changed, *held} - failed.keys()), rows)

    @staticmethod
    def _keep_to_grammars(grammars: Grammars, logits: Tensor, rows: Sequence[Row], lines: list[int]) -> None:
        """Ban what the rows' grammars do not allow."""
        for i in lines:
            if rows[i].constraint is None:
                rows[i].constraint = grammars.begin(rows[i].sampler.grammar)
        grammars.mask(logits, lines, [rows[i].constraint for i in lines])

    def _choose(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """A token per row: the likeliest, or a draw."""
        drawn = [i for i, row in enumerate(rows) if not row.sampler.params.greedy]
        if not drawn:
            return [int(token) for token in likeliest(logits).tolist()]
        uniform = draw_uniform(
            [rows[i].sampler.seed for i in drawn], [rows[i].index for i in drawn], [rows[i].num_output for i in drawn]
        )
        limits = Limits.of([rows[i].sampler.params for i in drawn], logits.shape[-1], logits.device)
        if len(drawn) == len(rows):
            return [int(token) for token in draw(logits, limits, uniform.to(logits.device)).tolist()]
        tokens = likeliest(logits)
        tokens[drawn] = draw(logits[drawn], limits, uniform.to(logits.device))
        return [int(token) for token in tokens.tolist()]


def _dead(logits: Tensor, lines: list[int], rows: Sequence[Row]) -> dict[int, Exception]:
    """Those of some rows that have no token left to draw, or logits that are no numbers."""
    if not lines:
        return {}
    best = (logits if len(lines) == len(logits) else logits[lines]).amax(-1).tolist()
    dead: dict[int, Exception] = {}
    for i, value in zip(lines, best, strict=True):
        if value == -torch.inf:
            dead[i] = NoTokenLeft(
                "no token is left that the grammar, min_tokens, biases, allowed tokens and bad words all allow"
            )
        elif math.isnan(value):
            whose = "a logits processor" if rows[i].sampler.custom else "a bias"
            dead[i] = NoTokenLeft(f"the logits are no numbers (nan) after {whose}")
    return dead


# -- log probabilities -------------------------------------------------------------------------------------------------


def tops_of(
    tokens: Sequence[int], logprobs: Tensor, numbers: Sequence[int | None], decode: Decode | None = None
) -> list[Logprobs | None]:
    """Log probabilities of the likeliest tokens of each row, likeliest first, and of `tokens`; with their ranks.

    Args:
        tokens: One per row, reported whether likely or not.
        logprobs: `[rows, vocab]`.
        numbers: How many of each row; -1 for all, None for no report.
        decode: A token's text.
    """
    vocab = logprobs.shape[-1]
    wanted = [vocab if number is not None and number < 0 else min(number or 0, vocab) for number in numbers]
    most = max(wanted, default=0)
    values, ids = largest(logprobs, most) if most else (logprobs[:, :0], logprobs[:, :0])
    chosen = logprobs[range(len(tokens)), list(tokens)] if tokens else logprobs[:, 0]
    ranks = (logprobs > chosen.unsqueeze(1)).sum(-1) + 1
    tops: list[Logprobs | None] = []
    rows = zip(tokens, wanted, numbers, values.tolist(), ids.tolist(), chosen.tolist(), ranks.tolist(), strict=True)
    for token, count, number, best, others, value, rank in rows:
        pairs = zip(others[:count], best[:count], strict=True)
        top: Logprobs = {other: Logprob(high, place, other, decode) for place, (other, high) in enumerate(pairs, 1)}
        if token not in top:
            top[token] = Logprob(value, rank, token, decode)
        tops.append(None if number is None else top)
    return tops
