"""Requests and their rows: what the engine knows about work in progress, and what it hands back.

Owns: the state of a request from arrival to result.
Does not know: torch, pages, when a row runs.

A *request* is a prompt with parameters. It runs as one *row* while its prompt is prefilled, and as several afterwards
if several completions were asked for (the others are forks of the first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from allocator import SeqId
from paged_kv.engine.crops import CropPlan
from paged_kv.engine.params import SamplingParams

#: Tokens of an output without a limit.
_ENDLESS = 1 << 30


class Logprob(float):
    """A log probability: a number that also has vLLM's fields.

    Attributes:
        rank: How many tokens were at least as likely, itself included; 1 is the likeliest. None if it was not counted.
    """

    __slots__ = ("_decode", "_token", "rank")
    _decode: Callable[[int], str] | None
    _token: int
    rank: int | None

    def __new__(
        cls, value: float, rank: int | None = None, token: int = -1, decode: Callable[[int], str] | None = None
    ) -> Logprob:
        """A number with its rank; its token is turned into text when it is asked for."""
        self = super().__new__(cls, value)
        self.rank, self._token, self._decode = rank, token, decode
        return self

    @property
    def logprob(self) -> float:
        """The plain number."""
        return float(self)

    @property
    def decoded_token(self) -> str | None:
        """The token as text, None without a tokenizer."""
        return None if self._decode is None else self._decode(self._token)

    def __repr__(self) -> str:
        return f"Logprob(logprob={float(self)!r}, rank={self.rank!r}, decoded_token={self.decoded_token!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        text = self.decoded_token
        return _logprob_of, (float(self), self.rank, self._token, text)


def _logprob_of(value: float, rank: int | None, token: int, text: str | None) -> Logprob:
    """A log probability from another process, which brings its text."""
    return Logprob(value, rank, token, None if text is None else _Always(text))


@dataclass(frozen=True, slots=True)
class _Always:
    """A decoder of one token."""

    text: str

    def __call__(self, token: int) -> str:
        return self.text


#: Token id to log probability at one position, as far as asked for.
Logprobs = dict[int, Logprob]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        request_id: The caller's name for it.
        prompt_ids: Token ids of the prompt.
        params: How to continue.
        arrival: Order of arrival, unique.
        priority: Smaller runs earlier; equal priorities are first come, first served.
        scope: Salt of the prefix cache: prefixes are shared within a scope only.
        prompt: The prompt's text, if text was given.
        max_len: Tokens after which every row ends (prompt and output).
        logits_from: Prompt positions from here on need their logits too (prompt log probabilities), None for none.
        crops: When its rows are cropped and to what, None for never.
        rows: Rows that are not finished, waiting or running.
        done: Finished rows.
        forked: Whether the rows of the other completions exist.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival: int
    priority: int = 0
    scope: bytes = b""
    prompt: str | None = None
    max_len: int = 1 << 62
    logits_from: int | None = None
    crops: CropPlan | None = None
    rows: list[Row] = field(default_factory=list)
    done: list[Row] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    error: str | None = None
    beam: Any = None
    forked: bool = False
    streams: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            self.rows.append(Row(self, 0, list(self.prompt_ids)))

    @property
    def key(self) -> tuple[int, int]:
        """Sorts requests in the order in which they are served."""
        return (self.priority, self.arrival)

    @property
    def most_cached(self) -> int | None:
        """Tokens that may come from the prefix cache at most, None for any number."""
        if self.crops is None:
            return self.logits_from
        reusable = self.crops.reusable(len(self.prompt_ids))
        return reusable if self.logits_from is None else min(reusable, self.logits_from)

    @property
    def lockstep(self) -> bool:
        """Whether the rows take each step together (beam search)."""
        return self.params.beam_width is not None

    @property
    def seats(self) -> int:
        """Rows that this request may come to run."""
        return len(self.rows) if self.forked else self.params.width

    @property
    def finished(self) -> bool:
        """Whether no row is left to run."""
        return not self.rows


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of tokens being continued.

    Attributes:
        request: Whose it is.
        index: Which of the request's completions.
        tokens: Prompt and output so far.
        seq: Its pages, None while it waits.
        num_computed: Tokens whose keys and values are in the pages (seen tokens).
        num_live: Tokens that the longest of its cropped layers holds.
        constraint: Where its output is in the grammar that was asked for, None without one.
        draft: Guessed next tokens, which the next step verifies; while that step's results are taken, the tokens that
            it found, all but the last of them computed already.
        num_told: Output tokens that results have reported.
        len_told: Characters of its text that results have reported.
        end_told: Whether a result has reported its end.
    """

    request: Request
    index: int
    tokens: list[int]
    seq: SeqId | None = None
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str | None = None
    block_keys: list[int] | None = None
    queued: bool = False
    detokenizer: Any = None
    sampler: Any = None
    constraint: Any = None
    guesser: Any = None
    num_cropped: int = 0
    num_live: int = 0
    crop_pending: bool = False
    num_told: int = 0
    len_told: int = 0
    end_told: bool = False

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def to_hold(self) -> int:
        """Tokens that its longest layer may come to hold before its next output, beside those it holds now."""
        crops = self.request.crops
        if crops is None:
            return self.num_todo
        return min(self.num_todo, max(1, crops.most_live(self.num_prompt, len(self.tokens)) - self.num_live))

    @property
    def to_come(self) -> int:
        """Tokens that its longest layer may come to hold beside those it holds now, as far as crops bound it.

        Output that nothing crops is not counted beyond the next token: it may end any time.
        """
        crops, most = self.request.crops, self.request.params.max_tokens
        if crops is None or not crops.bounds_output:
            return self.to_hold
        length = self.num_prompt + (_ENDLESS if most is None else most)
        has_prompt = self.num_computed >= self.num_prompt
        peak = (crops.most_live_after if has_prompt else crops.most_live)(self.num_prompt, length)
        return max(self.to_hold, min(length - self.num_computed, peak - self.num_live))

    @property
    def floor(self) -> int | None:
        """Tokens that pressure leaves in each of its layers, None if it must leave all."""
        return None if self.request.crops is None else self.request.crops.floor

    @property
    def least_live(self) -> int:
        """Tokens that its longest layer holds at least once its prompt is computed, whatever pressure does."""
        if self.floor is None:
            return self.num_live + self.to_hold
        # Every crop costs time: each should free more than the page that the next token takes.
        return self.floor + max(1, self.floor // 8)

    @property
    def publishes(self) -> bool:
        """Whether its full blocks may be shared: it was never cropped, and its prompt is not cropped piece by piece."""
        crops = self.request.crops
        return not self.num_cropped and (crops is None or crops.chunk is None)

    @property
    def num_todo(self) -> int:
        """Known tokens that are not in the pages yet: 1 for a row that decodes."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request got how far, in seconds on the engine's clock; None for what did not happen. Names as in vLLM."""

    arrival_time: float | None
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of a request.

    Attributes:
        outputs: The completions, best first where they were ranked. Empty only if the request was refused.
        finished: False for a partial result of a stream.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        timings: Seconds on the engine's clock: `arrival`, `first_scheduled`, `first_token`, `finished`.
        error: Why the request failed, if its finish reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool = True
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """The timings under vLLM's names."""
        times = (self.timings.get(name) for name in ("arrival", "first_scheduled", "first_token", "finished"))
        return RequestMetrics(*times)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the first completion."""
        return self.outputs[0].token_ids if self.outputs else ()

    @property
    def finish_reason(self) -> str | None:
        """Of the first completion: "stop", "length", "abort" or "error"; "error" if the request was refused."""
        if self.error is not None:
            return "error"
        return self.outputs[0].finish_reason if self.outputs else None
