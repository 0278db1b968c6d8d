"""How likely given tokens are: from log probabilities of a prompt to scores.

Owns: where a continuation begins, summing up.
Does not know: how the log probabilities are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.engine.intake import InvalidRequest
from paged_kv.engine.request import RequestOutput


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after a prompt.

    Attributes:
        logprob: Summed log probability of its tokens.
        num_tokens: How many they are.
        is_greedy: Whether each is the likeliest after those before it.
        token_logprobs: One by one.
    """

    logprob: float
    num_tokens: int
    is_greedy: bool
    token_logprobs: tuple[float, ...]


def split(tokenizer: Any, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[list[int], int]:
    """Token ids of prompt and continuation together, and where the continuation begins.

    Raises:
        InvalidRequest: One of them has no token, they are of two kinds, or text has no tokenizer.
    """
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise InvalidRequest("prompt and continuation must both be text or both be token ids")
    if not continuation:
        raise InvalidRequest("the continuation is empty: there is nothing to score")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("text needs a tokenizer; this engine has none: give token ids")
        head = list(tokenizer(prompt)["input_ids"])
        whole = list(tokenizer(prompt + str(continuation))["input_ids"])
        start = min(len(head), len(whole) - 1)
    else:
        head, whole = list(prompt), [*prompt, *continuation]
        start = len(head)
    if start < 1:
        raise InvalidRequest("the prompt is empty: a continuation is scored after at least one token")
    if start >= len(whole):
        raise InvalidRequest(f"the continuation {continuation!r} has no tokens")
    return whole, start


def score(result: RequestOutput, start: int) -> Score:
    """Sum up a result with log probabilities of its prompt, from token `start` on."""
    logprobs = result.prompt_logprobs or ()
    chosen: list[float] = []
    greedy = True
    for position in range(start, len(result.prompt_token_ids)):
        here = logprobs[position] or {}
        value = float(here[result.prompt_token_ids[position]])
        chosen.append(value)
        greedy = greedy and value >= max(here.values())
    return Score(sum(chosen), len(chosen), greedy, tuple(chosen))
