"""Changes to single logits, for all rows of a step at once, in place.

Owns: penalties, biases, allowed tokens, tokens that may not end the output yet, bad words.
Does not know: draws, log probabilities, grammars.

What changes are a few thousand of some millions of logits, so only those are read and written, where transformers'
processors copy all of them. Repetition penalty and bad words mean what those mean by them; tests hold them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import Row


@dataclass(slots=True)
class Edits:
    """What one request changes.

    Attributes:
        fixed: Tokens that are biased, with their bias.
        stops: Tokens banned until `min_tokens`.
        allowed: The only tokens that may be drawn, None for all.
        penalised: Whether tokens of the output are made less likely, by presence or frequency.
        repetition: Factor by which tokens of prompt and output are made less likely; 1 is off.
        bad_words: Token ids of words that may not be completed, empty for none.
    """

    fixed: tuple[tuple[int, float], ...]
    stops: tuple[int, ...]
    allowed: Tensor | None
    penalised: bool
    repetition: float
    bad_words: tuple[tuple[int, ...], ...]
    _prompt: Any = None

    @classmethod
    def of(cls, params: SamplingParams, stops: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...]) -> Edits | None:
        """The changes that parameters ask for, None for none."""
        edits = cls(
            fixed=tuple((params.logit_bias or {}).items()),
            stops=stops if params.min_tokens > 0 else (),
            allowed=None if params.allowed_token_ids is None else torch.tensor(sorted({*params.allowed_token_ids})),
            penalised=params.presence_penalty != 0 or params.frequency_penalty != 0,
            repetition=float(params.repetition_penalty),
            bad_words=bad_words,
        )
        changes = edits.fixed or edits.stops or edits.penalised or edits.repetition != 1.0 or edits.bad_words
        return edits if changes or edits.allowed is not None else None

    def prompt_of(self, row: Row) -> np.ndarray:
        """The tokens of a row's prompt, each once, worked out once."""
        if self._prompt is None:
            self._prompt = np.unique(np.asarray(row.request.prompt_ids, np.int64))
        prompt: np.ndarray = self._prompt
        return prompt

    def banned(self, row: Row) -> set[int]:
        """The tokens that may not be a row's next: it would end too early, or complete a bad word."""
        tokens = row.tokens
        banned = {word[-1] for word in self.bad_words if len(word) == 1 or tuple(tokens[1 - len(word) :]) == word[:-1]}
        if self.stops and row.num_output < row.sampler.params.min_tokens:
            banned.update(self.stops)
        return banned


def apply(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Change float32 `logits` `[rows, vocab]`; returns the rows of which tokens were banned."""
    edited = [(i, row, row.sampler.edits) for i, row in enumerate(rows) if row.sampler.edits is not None]
    banned: set[int] = set()
    for i, _, edits in edited:
        if edits.allowed is not None:
            allowed = edits.allowed.to(logits.device)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept
            banned.add(i)
    changes = [(i, token, value) for i, _, edits in edited for token, value in edits.fixed]
    changes += [(i, token, -np.inf) for i, row, edits in edited for token in edits.banned(row)]
    if changes:
        banned |= {i for i, _, value in changes if value == -np.inf}
        lines, tokens, values = zip(*changes, strict=True)
        _add(logits, np.array(lines), np.array(tokens), np.array(values, np.float64))
    _penalise([each for each in edited if each[2].penalised], logits)
    _repeat([each for each in edited if each[2].repetition != 1.0], logits)
    return sorted(banned)


def _penalise(edited: Sequence[tuple[int, Row, Edits]], logits: Tensor) -> None:
    """Subtract presence and frequency penalties of the tokens in the outputs."""
    if not edited:
        return
    vocab = logits.shape[-1]
    flat = [np.asarray(row.output_ids, np.int64) + i * vocab for i, row, _ in edited]
    places, counts = np.unique(np.concatenate(flat), return_counts=True)
    lines, tokens = np.divmod(places, vocab)
    presence, frequency = np.zeros(len(logits)), np.zeros(len(logits))
    for i, row, _ in edited:
        params: SamplingParams = row.sampler.params
        presence[i], frequency[i] = params.presence_penalty, params.frequency_penalty
    _add(logits, lines, tokens, -(presence[lines] + frequency[lines] * counts))


def _repeat(edited: Sequence[tuple[int, Row, Edits]], logits: Tensor) -> None:
    """Divide positive logits of the tokens in prompts and outputs by the penalty, multiply negative ones with it."""
    if not edited:
        return
    tokens = [ids for _, row, edits in edited for ids in (edits.prompt_of(row), np.asarray(row.output_ids, np.int64))]
    counts = [len(a) + len(b) for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    lines = torch.from_numpy(np.repeat([i for i, _, _ in edited], counts)).to(logits.device)
    columns = torch.from_numpy(np.concatenate(tokens)).to(logits.device)
    penalty = torch.from_numpy(np.repeat([edits.repetition for _, _, edits in edited], counts)).to(logits)
    picked = logits[lines, columns]
    # A token that is there twice is written twice with the same value.
    logits[lines, columns] = torch.where(picked < 0, picked * penalty, picked / penalty)


def _add(logits: Tensor, lines: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> None:
    """Add values to single logits; several at one place add up."""
    where = (torch.from_numpy(lines).to(logits.device), torch.from_numpy(tokens).to(logits.device))
    logits.index_put_(where, torch.from_numpy(values).to(logits), accumulate=True)
