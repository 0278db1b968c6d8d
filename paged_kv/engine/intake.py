"""What comes in: a prompt in any of its forms to token ids, checked against the model.

Owns: the forms of a prompt, what a model can take (vocabulary, positions, end-of-sequence tokens).
Does not know: scheduling, pages, what becomes of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from allocator import KVError
from paged_kv._compat import text_config
from paged_kv.engine.params import SamplingParams, is_integer

#: Text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]


#: Fields of a prompt that is a mapping.
_FIELDS = ("prompt", "prompt_token_ids", "logits_from")


class TextPrompt(TypedDict):
    """A prompt as text, as vLLM spells it."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, as vLLM spells it."""

    prompt_token_ids: list[int]


class InvalidRequest(KVError, ValueError):
    """Raised when a request cannot be run as it is. Do: correct the value that is named."""


class EngineClosed(KVError, RuntimeError):
    """Raised when an engine is used after `close`. Do: open another."""

    def __init__(self, message: str = "the engine is closed: open another") -> None:
        super().__init__(message)


class Intake:
    """Turns prompts into token ids that the model can run, or says why it cannot."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_len: int) -> None:
        """Take text through `tokenizer` (None: token ids only), ids below `vocab_size`, `max_len` tokens at most."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_len = max_len

    def __call__(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int], int | None]:
        """A prompt's text (if known), token ids and the first position whose logits are wanted.

        Raises:
            InvalidRequest: It is empty, too long, of no known form, or holds unknown tokens.
        """
        text, ids, logits_from = self._parse(prompt)
        if (most := params.truncate_prompt_tokens) is not None:
            ids = ids[-(self._max_len - 1 if most < 0 else most) :]
        self._check(ids, params)
        return text, ids, logits_from

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int], int | None]:
        if isinstance(prompt, str):
            return prompt, self._tokens(prompt), None
        if not isinstance(prompt, Mapping):
            return None, self._tokens(prompt), None
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        for name, value in prompt.items():
            if name not in _FIELDS and value:
                raise InvalidRequest(f"unknown field {name!r} of a prompt; known are {', '.join(_FIELDS)}")
        if isinstance(ids, str):
            raise InvalidRequest(f"prompt_token_ids is a list of token ids, got text {ids[:80]!r}: that is a prompt")
        if ids is None and text is None:
            raise InvalidRequest("a prompt mapping needs prompt or prompt_token_ids")
        tokens = self._tokens(prompt["prompt"] if ids is None else ids)
        logits_from = prompt.get("logits_from")
        if logits_from is not None and (type(logits_from) is not int or not 0 <= logits_from < len(tokens)):
            raise InvalidRequest(f"logits_from is a position of the prompt's {len(tokens)} tokens, got {logits_from!r}")
        return text if isinstance(text, str) else None, tokens, logits_from

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest("a text prompt needs a tokenizer; this engine has none: give token ids")
            try:
                return list(self._tokenizer(prompt)["input_ids"])
            except (TypeError, UnicodeError) as error:
                raise InvalidRequest(f"the tokenizer refused the prompt (a lone surrogate?): {error}") from error
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # an array or a tensor
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise InvalidRequest(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
        ids: list[Any] = [int(token) if is_integer(token) else token for token in prompt]
        for token in ids:
            if type(token) is not int or token < 0:
                raise InvalidRequest(f"a prompt is text or a list of token ids, got {token!r} in it")
        return ids

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise InvalidRequest("the prompt is empty")
        highest = max(*ids, *params.stop_token_ids, *(params.logit_bias or {}), *(params.allowed_token_ids or ()), 0)
        if highest >= self._vocab_size:
            raise InvalidRequest(f"token id {highest} is outside the model's vocabulary of {self._vocab_size}")
        room = self._max_len - (params.max_tokens != 0)
        if len(ids) > room:
            raise InvalidRequest(f"the prompt has {len(ids)} tokens, the model takes at most {room}")
        if params.stop and self._tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; this engine has none: use stop_token_ids")


def vocab_size_of(model: Any) -> int:
    """Token ids that a model has an embedding for."""
    return int(model.get_input_embeddings().num_embeddings)


def max_len_of(model: Any, limit: int | None) -> int:
    """Most tokens of a sequence: the model's positions, or the given limit if that is lower.

    Raises:
        ValueError: The limit is above the model's positions.
    """
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if limit is None:
        return int(positions) if positions else 1 << 30
    if positions and limit > positions:
        raise ValueError(f"max_model_len={limit} is above the model's {positions} positions")
    return limit


def eos_ids_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the generation config or else the config."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [int(eos)])
    return frozenset()


def decoder_of(tokenizer: Any) -> Callable[[int], str] | None:
    """How one token is written."""
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def encoder_of(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """How a piece of text becomes tokens, without the special ones around it."""
    if tokenizer is None:
        return None
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
