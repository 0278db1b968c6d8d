"""The engine as a model of EleutherAI's lm-evaluation-harness (package `lm-eval`, optional).

Owns: the three kinds of requests of the harness.
Does not know: tasks, metrics.

    from lm_eval import simple_evaluate
    simple_evaluate(model=harness_model(LLM("path/to/model")), tasks=["lambada_openai"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_kv.engine.intake import InvalidRequest
from paged_kv.engine.llm import LLM
from paged_kv.engine.params import SamplingParams


def harness_model(llm: LLM) -> Any:
    """An `lm_eval.api.model.LM` that answers through `llm`.

    Raises:
        ImportError: lm-eval is not installed.
    """
    from lm_eval.api.model import LM

    class PagedKVModel(LM):
        """Answers from the engine; the work is done in `Answers`."""

        def __init__(self) -> None:
            super().__init__()
            self._answers = Answers(llm)

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return self._answers.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            return self._answers.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            return self._answers.generate_until([request.args for request in requests])

    return PagedKVModel()


class Answers:
    """What the harness asks, without the harness."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise InvalidRequest("the harness works with text and needs a tokenizer")
        self._llm = llm

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log probability of each continuation after its context, and whether it is the greedy one."""
        split = [self._split(context, continuation) for context, continuation in pairs]
        return [(score.logprob, score.is_greedy) for score in self._llm.score_tokens(split)]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log probability of each text from its first token on, in windows of the model's length."""
        return [sum(score.logprob for score in self._llm.score_tokens(self._windows(text))) for text in texts]

    def generate_until(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """The continuation of each context up to a stop string."""
        prompts = [context for context, _ in requests]
        params = [self._params(arguments) for _, arguments in requests]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        for result in results:
            if result.error is not None:
                raise InvalidRequest(result.error)
        return [result.text for result in results]

    def _split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Token ids of both, and where the continuation begins; trailing spaces of the context go to it."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        whole = self._encode(context + continuation)
        start = len(self._encode(context)) if context else 0
        if start == 0:
            whole, start = [self._first(), *whole], 1
        return whole, min(start, len(whole) - 1)

    def _windows(self, text: str) -> list[tuple[list[int], int]]:
        ids = [self._first(), *self._encode(text)]
        size = self._llm.engine.max_len
        windows, begin = [], 1
        while begin < len(ids):
            end = min(len(ids), begin + size - 1)
            first = max(0, end - size)
            windows.append((ids[first:end], begin - first))
            begin = end
        return windows

    def _encode(self, text: str) -> list[int]:
        return list(self._llm.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _first(self) -> int:
        """A token that the first real one can follow."""
        tokenizer = self._llm.tokenizer
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise InvalidRequest("the tokenizer has neither a first nor a last token to start a text with")

    @staticmethod
    def _params(arguments: dict[str, Any]) -> SamplingParams:
        until = arguments.get("until") or ()
        sampled = bool(arguments.get("do_sample", False))
        return SamplingParams(
            max_tokens=int(arguments.get("max_gen_toks", 256)),
            stop=(until,) if isinstance(until, str) else tuple(until),
            temperature=float(arguments.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(arguments.get("top_p", 1.0)) if sampled else 1.0,
        )
