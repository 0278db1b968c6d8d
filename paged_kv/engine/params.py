"""What a user asks of one request, checked when it is written down.

Owns: the sampling parameters, their ranges and conflicts.
Does not know: torch, tokenizers, how a token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from numbers import Integral
from typing import Any, TypeGuard

from allocator import KVError
from paged_kv.engine.compress import Compression
from paged_kv.engine.structured import StructuredOutputsParams

#: A custom processor: `(input_ids [1, len], scores [1, vocab]) -> scores`, as `transformers.LogitsProcessor`.
Processor = Callable[[Any, Any], Any]


class InvalidParams(KVError, ValueError):
    """Raised when a sampling value is out of range, unknown or in conflict. Do: correct the value that is named."""


class RequestOutputKind(Enum):
    """Which results a request gives while it runs, and what they hold. Names as in vLLM."""

    #: Each result holds everything so far.
    CUMULATIVE = 0
    #: Each result holds what is new since the one before; joined they are the whole output.
    DELTA = 1
    #: There is one result, at the end.
    FINAL_ONLY = 2


#: Parameters that are on or off.
_SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "spaces_between_special_tokens",
    "skip_special_tokens",
)
#: Parameters that beam search would pass over: it draws nothing, and compares beams by their log probabilities.
_NOT_FOR_BEAMS = (
    "compression",
    "structured_outputs",
    "logits_processors",
    "stop",
    "logprobs",
    "top_k",
    "top_p",
    "min_p",
)
#: Parameters that no file holds: objects of Python's, and what concerns who reads the results.
_NOT_IN_FILES = frozenset({"logits_processors", "compression", "extra_args", "output_kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and defaults as in vLLM, so that code moves over.

    Attributes:
        n: Completions returned.
        best_of: Completions generated, of which the `n` most likely are returned; `n` by default.
        beam_width: Beam search with so many beams instead of sampling; returns the `n` best.
        length_penalty: Beam search divides a beam's log probability by `length ** length_penalty`.
        temperature: 0 is greedy.
        top_k: Only the `top_k` likeliest tokens; 0 or -1 for all.
        top_p: Only the smallest set of likeliest tokens whose probability reaches `top_p`.
        min_p: Only tokens at least `min_p` times as likely as the likeliest.
        repetition_penalty: Divides positive logits of tokens in prompt or output (multiplies negative ones); 1 is off.
        presence_penalty: Subtracted once from the logit of each token in the output.
        frequency_penalty: Subtracted from a token's logit as often as it is in the output.
        logit_bias: Token id to a value added to its logit.
        bad_words: Strings that the output must not contain.
        max_tokens: Most tokens of the output; None for as many as the model's positions allow.
        min_tokens: No eos or stop token before so many.
        stop: Strings that end the output; the output ends before them.
        stop_token_ids: Tokens that end the output.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Go on after the model's end-of-sequence token.
        seed: Draws depend on this, the completion's index and the token's index alone; None or -1: the engine's seed.
        logprobs: Log probabilities of the chosen token and of so many likeliest ones (-1: all), at each output token.
        prompt_logprobs: The same for the prompt's tokens, from the second on.
        detokenize: Whether results have text.
        truncate_prompt_tokens: Only so many of the prompt's newest tokens; -1 for as many as the model takes.
        allowed_token_ids: Only these tokens are drawn.
        spaces_between_special_tokens: Taken for vLLM's sake; the tokenizers here decide by themselves.
        skip_special_tokens: Leave special tokens out of the text.
        logits_processors: Custom `transformers` processors, called for this request alone.
        compression: A policy with a budget, such as `SnapKV(budget=256)`, crops the prompt; a
            `paged_kv.engine.compress.Compression` says besides when to crop. None keeps all tokens.
        structured_outputs: What the output must look like, see `StructuredOutputsParams`; needs llguidance.
        output_kind: Results while the request runs, a `RequestOutputKind`. None leaves it to the call: everything so
            far where results are streamed, else one result at the end.
        extra_args: Free for the caller.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    spaces_between_special_tokens: bool = True
    skip_special_tokens: bool = True
    logits_processors: tuple[Processor, ...] = ()
    compression: Any = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        for name in ("stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, _several(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _several("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidParams("allowed_token_ids is empty: None allows all tokens")
        for name, meaning in (("logit_bias", "maps token ids to numbers"), ("extra_args", "is a mapping")):
            if not isinstance(getattr(self, name), (Mapping, type(None))):
                raise InvalidParams(f"{name} {meaning}, got {getattr(self, name)!r}")
        if self.compression is not None:
            object.__setattr__(self, "compression", _compression(self.compression))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        if is_integer(self.seed):
            object.__setattr__(self, "seed", None if self.seed == -1 else int(self.seed))  # vLLM's -1 is no seed
        self._check_integers()
        self._check_others()
        self._check_numbers()
        self._check_conflicts()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def width(self) -> int:
        """Sequences that a request of these parameters runs side by side."""
        return self.beam_width or self.best_of or self.n

    def clone(self) -> SamplingParams:
        """A copy; parameters are frozen, `dataclasses.replace` changes one."""
        return replace(self)

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], *, base: SamplingParams | None = None, beside: Sequence[str] = ()
    ) -> SamplingParams:
        """Parameters from JSON-like values, on top of `base`; `beside` are names that stand beside them.

        Raises:
            InvalidParams: An unknown name (named, with the known ones), or a value of the wrong kind or range.
        """
        known = {f.name for f in fields(cls)} - _NOT_IN_FILES
        if unknown := sorted(set(values) - known):
            names = ", ".join([*beside, *sorted(known)])
            raise InvalidParams(
                f"unknown {'field' if beside else 'sampling parameter'} {unknown[0]!r}; known are {names}"
            )
        given = dict(values)
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {_token(key): value for key, value in bias.items()}
        return replace(base, **given) if base is not None else cls(**given)

    def _check_integers(self) -> None:
        least = {"beam_width": 1, "n": 1, "best_of": 1, "top_k": -1, "max_tokens": 0, "min_tokens": 0}
        least |= {"logprobs": -1, "prompt_logprobs": -1, "truncate_prompt_tokens": -1}
        optional = {"best_of", "beam_width", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not is_integer(value) or value < low:
                raise InvalidParams(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.seed is not None and not is_integer(self.seed):
            raise InvalidParams(f"seed must be an integer, got {self.seed!r}")
        if self.truncate_prompt_tokens == 0:
            raise InvalidParams("truncate_prompt_tokens must be at least 1, or -1, got 0")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not is_integer(token) or token < 0:
                    raise InvalidParams(f"{name} must name token ids, got {token!r}")

    def _check_others(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParams(f"{name} must be True or False, got {getattr(self, name)!r}")
        for processor in self.logits_processors:
            if not callable(processor):
                raise InvalidParams(f"logits_processors must be callable, got {processor!r}")

    def _check_numbers(self) -> None:
        ranges = {
            "temperature": (0.0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, math.inf),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "length_penalty": (-math.inf, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value):
                raise InvalidParams(f"{name} must be a finite number, got {value!r}")
            if not low <= value <= high:
                raise InvalidParams(f"{name} must be between {low} and {high}, got {value!r}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InvalidParams(f"{name} must be above 0, got {getattr(self, name)!r}")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_number(bias) or math.isnan(bias):
                raise InvalidParams(f"logit_bias of token {token} must be a number, got {bias!r}")

    def _check_conflicts(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParams(f"best_of must be at least n={self.n}, got {self.best_of}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidParams("stop strings are looked for in the text: detokenize=False leaves none")
        if self.greedy and self.width > 1 and self.beam_width is None:
            raise InvalidParams(f"greedy sampling gives one completion, not {self.width}: raise the temperature")
        if self.output_kind not in (None, *RequestOutputKind):
            raise InvalidParams(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if self.output_kind is RequestOutputKind.DELTA and (self.width > self.n or self.beam_width is not None):
            raise InvalidParams("which completions are the best is known at the end: output_kind cannot be DELTA")
        if self.beam_width is not None:
            self._check_beam(self.beam_width)

    def _check_beam(self, width: int) -> None:
        if self.n > width:
            raise InvalidParams(f"n={self.n} is above beam_width={width}")
        if self.best_of is not None:
            raise InvalidParams("best_of and beam_width are two ways of searching: give one")
        defaults = {each.name: each.default for each in fields(self)}
        for name in _NOT_FOR_BEAMS:
            if getattr(self, name) != defaults[name]:
                raise InvalidParams(f"beam search takes no {name}")


def _compression(asked: Any) -> Compression:
    try:
        return Compression.of(asked)
    except ValueError as error:
        raise InvalidParams(f"compression: {error}") from error


def _structured(asked: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of(asked)
    except ValueError as error:
        raise InvalidParams(str(error)) from None


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, numpy's included, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else _several(name, value)
    for string in strings:
        if not _is_text(string):
            raise InvalidParams(f"{name} must hold non-empty strings, got {string!r}")
    return strings


def _several(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError:
        raise InvalidParams(f"{name} must be a list, got {value!r}") from None


def _token(key: Any) -> Any:
    """A token id from a key of JSON's, which are strings."""
    return int(key) if isinstance(key, str) and key.strip().isdecimal() else key
