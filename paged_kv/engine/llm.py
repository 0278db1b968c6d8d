"""The offline front: prompts in, one result per prompt out, in order.

Owns: loading a model by path, turning bad prompts into results, bounded streams, chat templates, scoring, the bar.
Does not know: how requests are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from allocator import KVError
from paged_kv.engine import output
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import InvalidRequest, Prompt
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import RequestOutput


class ModelNotFound(KVError):
    """Raised when no model can be loaded from a path. Do: check the path; it is named with what was wrong."""


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


class LLM:
    """A model with an engine, for batches of prompts.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    >>> with LLM(LlamaForCausalLM(config), num_pages=64) as llm:
    ...     [result] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    >>> len(result.token_ids), result.finish_reason
    (4, 'length')
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, dtype: Any = None, **options: Any) -> None:
        """Open an engine on a loaded model, or on one loaded from a path.

        Args:
            model: A transformers decoder, or the path of a folder that holds one.
            tokenizer: Its tokenizer; read from the path if a path is given.
            dtype: Element type to load with; the saved one by default. A loaded model stays as it is.
            **options: The fields of `EngineOptions`.

        Raises:
            ModelNotFound: The path holds no model.
            TypeError: An unknown option.
            ValueError: An option out of range.
        """
        settings = EngineOptions(**options)
        if isinstance(model, (str, Path)):
            model, loaded = _load(model, dtype)
            tokenizer = tokenizer or loaded
        elif dtype is not None and dtype != model.dtype:
            raise ValueError(f"the model is loaded in {model.dtype}; convert it, dtype={dtype} is for paths")
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, settings)
        self._ids = itertools.count()

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one result per prompt, in their order.

        A prompt that cannot be run gives a result with finish reason "error"; the others are not touched by it.

        Args:
            prompts: One prompt or many.
            params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr.
            priority: One number per prompt, smaller first.

        Raises:
            ValueError: As many parameters or priorities as prompts were expected, and were not given.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = _one_each("params", params or SamplingParams(), len(many))
        ranks = _one_each("priority", 0 if priority is None else priority, len(many))
        results: list[RequestOutput | None] = [None] * len(many)
        work = zip(many, each, ranks, strict=True)
        with tqdm(total=len(many), disable=not use_tqdm, unit="row", dynamic_ncols=True) as bar:
            for index, result in self._run(work, len(many) or 1):
                results[index] = result
                bar.update()
        return [result for result in results if result is not None]

    def stream(
        self,
        prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]],
        params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete a stream of prompts, which may be endless; memory is bounded by `max_in_flight`.

        Args:
            prompts: Prompts, or pairs of a prompt and its parameters. Read only as room becomes free.
            params: For prompts that bring none.
            max_in_flight: Most prompts read ahead; twice `max_num_seqs` by default.

        Yields:
            The prompt's number in the stream and its result, as they end.
        """
        bound = max_in_flight or 2 * self.engine.options.max_num_seqs
        default = params or SamplingParams()
        pairs = (
            (*item, 0) if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams) else
            (item, default, 0)
            for item in prompts
        )  # fmt: skip
        yield from self._run(pairs, bound)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or many, through the tokenizer's chat template.

        Args:
            messages: One conversation (messages with `role` and `content`) or a list of them.
            params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr.
            **template: Further arguments of `apply_chat_template`.
        """
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(each, **template) for each in many], params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> dict[str, Any]:
        """The prompt that a conversation stands for.

        Raises:
            InvalidRequest: There is no tokenizer, or it has no chat template, or the template refuses the messages.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise InvalidRequest("messages need a tokenizer with a chat template: give a prompt instead")
        arguments = {"add_generation_prompt": True, "tokenize": False, **template}
        try:
            text = self.tokenizer.apply_chat_template(list(messages), **arguments)
        except Exception as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"prompt": text, "prompt_token_ids": list(ids)}

    def score(
        self, prompt: str | Sequence[int], continuations: Sequence[str | Sequence[int]], *, use_tqdm: bool = False
    ) -> list[Score]:
        """How likely each continuation is after the prompt. The prompt's pages are shared.

        Raises:
            InvalidRequest: An empty continuation, or one that cannot be run.
        """
        return self.score_tokens([self._split(prompt, each) for each in continuations], use_tqdm=use_tqdm)

    def score_tokens(self, pairs: Sequence[tuple[list[int], int]], *, use_tqdm: bool = False) -> list[Score]:
        """How likely the tokens from a position on are, after those before it.

        Args:
            pairs: Token ids, and where the scored ones begin, at least 1.
            use_tqdm: Show a progress bar on stderr.

        Raises:
            InvalidRequest: Tokens that cannot be run.
        """
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1)
        work = [({"prompt_token_ids": ids, "logits_from": start - 1}, params, 0) for ids, start in pairs]
        scores: list[Score | None] = [None] * len(pairs)
        with tqdm(total=len(pairs), disable=not use_tqdm, unit="row") as bar:
            for index, result in self._run(work, len(work) or 1):
                if result.error is not None:
                    raise InvalidRequest(f"continuation {index}: {result.error}")
                scores[index] = _score(result, pairs[index][1])
                bar.update()
        return [score for score in scores if score is not None]

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pages back and leave the model as it was found; closing twice does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _run(
        self, work: Iterable[tuple[Prompt, SamplingParams, int]], bound: int
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Keep at most `bound` requests in the engine; yields results as they end. Leaving early aborts the rest."""
        source = enumerate(work)
        pending: dict[str, int] = {}
        exhausted = False
        try:
            while pending or not exhausted:
                while not exhausted and len(pending) < bound:
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                        break
                    index, (prompt, params, priority) = item
                    request_id = f"row-{next(self._ids)}"
                    refusal = self._submit(request_id, prompt, params, priority)
                    if refusal is None:
                        pending[request_id] = index
                    else:
                        yield index, refusal
                for result in self.engine.step():
                    if result.finished and result.request_id in pending:
                        yield pending.pop(result.request_id), result
        finally:
            for request_id in pending:
                self.engine.abort(request_id)

    def _submit(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> RequestOutput | None:
        """Give a prompt to the engine; returns its result at once if it is refused."""
        try:
            self.engine.add_request(request_id, prompt, params, priority=priority)
        except InvalidRequest as error:
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            return output.refused(request_id, text if isinstance(text, str) else None, str(error))
        return None

    def _split(self, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> tuple[list[int], int]:
        """Token ids of prompt and continuation together, and where the continuation begins."""
        if isinstance(prompt, str) != isinstance(continuation, str):
            raise InvalidRequest("prompt and continuation must both be text or both be token ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("text needs a tokenizer; this engine has none: give token ids")
            head = list(self.tokenizer(prompt)["input_ids"])
            whole = list(self.tokenizer(prompt + str(continuation))["input_ids"])
            start = min(len(head), len(whole) - 1)
        else:
            head, whole = list(prompt), [*prompt, *continuation]
            start = len(head)
        if start < 1 or start >= len(whole) or not continuation:
            raise InvalidRequest("prompt and continuation must both have tokens")
        return whole, start


def _score(result: RequestOutput, start: int) -> Score:
    logprobs = result.prompt_logprobs or ()
    chosen: list[float] = []
    greedy = True
    for position in range(start, len(result.prompt_token_ids)):
        here = logprobs[position] or {}
        value = here[result.prompt_token_ids[position]]
        chosen.append(value)
        greedy = greedy and value >= max(here.values())
    return Score(sum(chosen), len(chosen), greedy, tuple(chosen))


def _is_one(prompts: Any) -> bool:
    """Whether this is a prompt and not a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return bool(prompts) and all(isinstance(token, int) for token in prompts)


def _one_each(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{number} prompts, but {len(value)} {name}")
    return list(value)


def _load(path: str | Path, dtype: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer (None if it has none) from a folder or a name in the local hub cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), **({} if dtype is None else {"dtype": dtype}))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"no model could be loaded from {str(path)!r}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError):
        tokenizer = None
    return model, tokenizer
