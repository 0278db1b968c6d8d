"""The offline front: prompts in, one result per prompt out, in order.

Owns: turning bad prompts into results, bounded streams, threads that share one engine, the bar.
Does not know: how requests are run, loaded, templated or scored.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from paged_kv.engine import output
from paged_kv.engine.chat import chat_prompt
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import InvalidRequest, Prompt
from paged_kv.engine.loading import default_params, dtype_of, load_model, load_tokenizer
from paged_kv.engine.options import options_of
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import RequestOutput
from paged_kv.engine.scoring import Score, score, split
from paged_kv.engine.turns import Turns, interrupts_wait


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
            tokenizer: Its tokenizer, or the path of one; read from the model's path if that is given.
            dtype: Element type to load with, by torch's object or name; the saved one by default. A loaded model stays
                as it is.
            **options: The fields of `EngineOptions`, also under vLLM's names; `trust_remote_code` and `revision` as
                `from_pretrained` takes them.

        Raises:
            ModelNotFound: The path holds no model.
            ModelInUse: Another engine runs on this model.
            TypeError: An unknown option.
            ValueError: An option out of range, or one of vLLM's that asks for what is not here.
        """
        settings, how = options_of(options)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer, **how)
        if isinstance(model, (str, Path)):
            tokenizer = tokenizer or load_tokenizer(model, **how)
            model = load_model(model, dtype, **how)
        elif dtype_of(dtype) not in (None, model.dtype):
            raise ValueError(f"the model is loaded in {model.dtype}; convert it, dtype={dtype} is for paths")
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, settings)
        self._ids = itertools.count()
        self._turns = Turns()
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._unwanted: deque[str] = deque()

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one result per prompt, in their order.

        A prompt that cannot be run gives a result with finish reason "error"; the others are not touched by it.

        Args:
            prompts: One prompt or many.
            sampling_params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr.
            priority: One number per prompt, smaller first.

        Raises:
            ValueError: As many parameters or priorities as prompts were expected, and were not given.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = self._params_of(sampling_params, len(many))
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
        sampling_params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete a stream of prompts, which may be endless; memory is bounded by `max_in_flight`.

        Args:
            prompts: Prompts, or pairs of a prompt and its parameters. Read only as room becomes free.
            sampling_params: For prompts that bring none.
            max_in_flight: Most prompts read ahead; twice `max_num_seqs` by default.

        Yields:
            The prompt's number in the stream and its result, as they end.
        """
        bound = max_in_flight or 2 * self.engine.options.max_num_seqs
        [default] = self._params_of(sampling_params, 1)
        pairs = (
            (*item, 0) if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams) else
            (item, default, 0)
            for item in prompts
        )  # fmt: skip
        yield from self._run(pairs, bound)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or many, through the tokenizer's chat template.

        Args:
            messages: One conversation (messages with `role` and `content`) or a list of them.
            sampling_params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr.
            **template: Further arguments of `apply_chat_template`.
        """
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(each, **template) for each in many], sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> dict[str, Any]:
        """The prompt that a conversation stands for.

        Raises:
            InvalidRequest: There is no tokenizer, or it has no chat template, or the template refuses the messages.
        """
        return chat_prompt(self.tokenizer, messages, **template)

    def score(
        self, prompt: str | Sequence[int], continuations: Sequence[str | Sequence[int]], *, use_tqdm: bool = False
    ) -> list[Score]:
        """How likely each continuation is after the prompt. The prompt's pages are shared.

        Raises:
            InvalidRequest: An empty continuation, or one that cannot be run.
        """
        if isinstance(continuations, str):
            raise InvalidRequest("continuations is a list: score(prompt, [continuation, ...])")
        pairs = []
        for index, each in enumerate(continuations):
            try:
                pairs.append(split(self.tokenizer, prompt, each))
            except InvalidRequest as error:
                raise InvalidRequest(f"continuation {index}: {error}") from None
        return self.score_tokens(pairs, use_tqdm=use_tqdm)

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
                scores[index] = score(result, pairs[index][1])
                bar.update()
        return [score for score in scores if score is not None]

    # -- as vLLM has them --------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The tokenizer, None if there is none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for where it samples; used where no parameters are given."""
        return default_params(self.model)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pages back and leave the model as it was found; closing twice does nothing.

        What other threads are waiting for ends with `EngineClosed`.
        """
        with self._turns:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _run(
        self, work: Iterable[tuple[Prompt, SamplingParams, int]], bound: int
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Keep at most `bound` requests in the engine; yields results as they end. Leaving early aborts the rest.

        Threads, and calls within the loop over a stream, take turns at stepping; a step serves all of them.
        """
        source = enumerate(work)
        pending: dict[str, int] = {}
        inbox: deque[RequestOutput] = deque()
        exhausted = False
        try:
            while pending or not exhausted:
                fresh = [] if exhausted else list(itertools.islice(source, bound - len(pending)))
                exhausted = exhausted or len(fresh) < bound - len(pending)
                refusals = []
                with interrupts_wait(), self._turns:
                    self._abort_unwanted()
                    for index, (prompt, params, priority) in fresh:
                        request_id = f"row-{next(self._ids)}"
                        refusal = self._submit(request_id, prompt, params, priority)
                        if refusal is None:
                            pending[request_id] = index
                            self._inboxes[request_id] = inbox
                        else:
                            refusals.append((index, refusal))
                    if pending and not inbox:
                        self._step()
                yield from refusals
                while inbox:
                    result = inbox.popleft()
                    yield pending.pop(result.request_id), result
        finally:
            self._unwanted.extend(pending)
            if pending and not self._turns.mine:
                with self._turns:
                    self._abort_unwanted()

    def _step(self) -> None:
        """One step of the engine; every result goes to whoever asked for it."""
        for result in self.engine.step():
            inbox = self._inboxes.pop(result.request_id, None) if result.finished else None
            if inbox is not None:
                inbox.append(result)

    def _abort_unwanted(self) -> None:
        """End the requests of runs that were left early."""
        while self._unwanted:
            request_id = self._unwanted.popleft()
            self._inboxes.pop(request_id, None)
            self.engine.abort(request_id)

    def _params_of(self, value: Any, number: int) -> list[SamplingParams]:
        """Sampling parameters for each of so many prompts.

        Raises:
            TypeError: Something else was given.
            ValueError: Not as many as prompts.
        """
        many = _one_each("sampling_params", self.get_default_sampling_params() if value is None else value, number)
        for each in many if isinstance(value, Sequence) else many[:1]:
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params is a SamplingParams or a list of them, got {each!r}")
        return many

    def _submit(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int) -> RequestOutput | None:
        """Give a prompt to the engine; returns its result at once if it is refused."""
        try:
            self.engine.add_request(request_id, prompt, params, priority=priority)
        except InvalidRequest as error:
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            return output.refused(request_id, text if isinstance(text, str) else None, str(error))
        return None


def _is_one(prompts: Any) -> bool:
    """Whether this is a prompt and not a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if getattr(prompts, "ndim", None) is not None:
        return bool(prompts.ndim == 1)
    return bool(prompts) and all(isinstance(token, int) for token in prompts)


def _one_each(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{number} prompts, but {len(value)} {name}")
    return list(value)
