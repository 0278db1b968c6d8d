"""Keeping outputs to a grammar, token by token, with llguidance (optional).

Owns: compiled grammars, where each row is in its own, the masks of all rows of a step at once.
Does not know: sampling, what a user asked for beyond `StructuredOutputsParams`.

Source of the masks: llguidance (https://github.com/guidance-ai/llguidance), a derivative-based parser over the
tokenizer's trie. It fills one bit per token and row, rows in parallel; here the bits become one boolean mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allocator import KVError
from paged_kv.engine.structured import StructuredOutputsParams


class GrammarError(KVError, ValueError):
    """Raised when a grammar cannot be followed any further. Do: simplify it; the message has the library's reason."""


class Constraint:
    """Where one row is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def advance(self, token: int) -> bool:
        """Go on by a token; returns whether the output is complete and could not go on.

        Raises:
            GrammarError: The grammar does not allow the token, or became too large to follow.
        """
        if not self.matcher.consume_token(token):
            reason = " ".join(self.matcher.get_error().partition("<state>")[0].split()) or "it has ended"
            raise GrammarError(f"the grammar cannot go on with token {token}: {reason}")
        return bool(self.matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer, and masks logits by them."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Nothing is imported or built before the first grammar is asked for."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._library: Any = None
        self._words: Any = None
        self._executor: Any = None
        self._compiled: dict[StructuredOutputsParams, Any] = {}

    def compile(self, asked: StructuredOutputsParams) -> Any:
        """A matcher at the start of a grammar, to be copied for each row by `begin`.

        Raises:
            ValueError: llguidance is not installed, the tokenizer is missing or unfit, or the grammar is wrong.
        """
        if asked not in self._compiled:
            self._load()
            grammar = self._source(asked)
            is_wrong, messages = self._library.LLMatcher.validate_grammar_with_warnings(grammar, self._words)
            if is_wrong:
                raise ValueError(f"structured_outputs.{asked.kind}: {' '.join(str(messages[0]).split())}")
            if len(self._compiled) >= 1024:
                self._compiled.clear()
            self._compiled[asked] = self._library.LLMatcher(self._words, grammar, log_level=0)
        return self._compiled[asked]

    @staticmethod
    def begin(compiled: Any) -> Constraint:
        """A row's place at the start of a compiled grammar."""
        return Constraint(compiled.deep_copy())

    def mask(self, logits: Tensor, lines: Sequence[int], constraints: Sequence[Constraint]) -> None:
        """Ban what the grammars do not allow next, in place.

        Args:
            logits: `[rows, vocab]`.
            lines: Rows that have a grammar.
            constraints: Theirs.
        """
        words = self._words.vocab_size
        bits = np.zeros((len(lines), (words + 31) // 32), np.int32)
        matchers = [(constraint.matcher, line) for line, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * 4, len(lines))
        allowed = np.zeros((len(lines), logits.shape[-1]), np.bool_)
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=min(words, logits.shape[-1]))
        allowed[:, : unpacked.shape[1]] = unpacked
        banned = ~torch.from_numpy(allowed).to(logits.device)
        if len(lines) == len(logits):
            logits.masked_fill_(banned, -torch.inf)
        else:
            logits[lines] = logits[lines].masked_fill_(banned, -torch.inf)

    def _load(self) -> None:
        if self._words is not None:
            return
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise ValueError("structured_outputs needs llguidance: pip install 'paged-kv[structured]'") from None
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer; this engine has none")
        size = max(self._vocab_size, len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else 0)
        try:
            words = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_ids or None)
        except Exception as error:
            name = type(self._tokenizer).__name__
            raise ValueError(f"llguidance cannot read this tokenizer ({name}): {error}") from error
        self._library, self._executor = llguidance, llguidance.LLExecutor()
        self._words = words

    def _source(self, asked: StructuredOutputsParams) -> str:
        if asked.kind in ("json", "json_object"):
            options: dict[str, Any] = {"whitespace_flexible": not asked.disable_any_whitespace}
            if asked.whitespace_pattern is not None:
                options["whitespace_pattern"] = asked.whitespace_pattern
            schema = asked.json if asked.kind == "json" else '{"type": "object"}'
            return str(self._library.LLMatcher.grammar_from_json_schema(schema, options))
        value: Any = getattr(asked, asked.kind)
        return str(self._library.grammar_from(asked.kind, value))
