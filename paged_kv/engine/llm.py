"""The offline front: prompts in, one result per prompt out, in order.

Owns: one result per prompt in order, bounded streams, the bar.
Does not know: how requests are run, shared among threads, loaded, templated or scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from paged_kv.engine.beams import BeamSearchOutput, BeamSearchParams, output_of
from paged_kv.engine.chat import chat_prompt
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import InvalidRequest, Prompt
from paged_kv.engine.loading import default_params, dtype_of, load_model, load_tokenizer
from paged_kv.engine.options import options_of
from paged_kv.engine.params import SamplingParams, is_integer
from paged_kv.engine.request import RequestOutput
from paged_kv.engine.runs import Runs, Work
from paged_kv.engine.scoring import Score, score, split

#: What makes a progress bar.
Bar = Callable[..., Any]

#: Methods of vLLM's that a script may ask for, and what is to be said.
_NOT_HERE = {
    **dict.fromkeys(("encode", "embed", "classify", "reward"), "this engine generates text, it pools nothing"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "there is one process, the model is LLM.model"),
    **dict.fromkeys(("sleep", "wake_up"), "LLM.close gives all memory back"),
    "llm_engine": "it is LLM.engine",
    "get_metrics": "it is LLM.engine.stats()",
    "set_tokenizer": "give LLM(..., tokenizer=...)",
}


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

    def __init__(
        self, model: Any, *, tokenizer: Any = None, dtype: Any = None, skip_tokenizer_init: bool = False, **options: Any
    ) -> None:
        """Open an engine on a loaded model, or on one loaded from a path.

        Args:
            model: A transformers decoder, or the path of a folder that holds one.
            tokenizer: Its tokenizer, or the path of one; read from the model's path if that is given.
            dtype: Element type to load with, by torch's object or name; the saved one by default. A loaded model stays
                as it is.
            skip_tokenizer_init: Load none: prompts are token ids, and results have no text.
            **options: The fields of `EngineOptions`, also under vLLM's names; `trust_remote_code`, `revision`,
                `hf_token` and `download_dir` for `from_pretrained`.

        Raises:
            ModelNotFound: The path holds no model.
            ModelInUse: Another engine runs on this model.
            TypeError: An unknown option, or something of the wrong kind.
            ValueError: An option out of range, or one of vLLM's that asks for what is not here.
        """
        settings, how = options_of(options)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer, needed=True, **how)
        elif tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise TypeError(f"tokenizer is a transformers tokenizer or its path, got {tokenizer!r}")
        if isinstance(model, (str, Path)):
            if tokenizer is None and not skip_tokenizer_init:
                tokenizer = load_tokenizer(model, **how)
            model = load_model(model, dtype, **how)
        elif not hasattr(model, "config") or not hasattr(model, "dtype"):
            raise TypeError(f"model is a loaded transformers model, or the path of one, got {type(model).__name__}")
        elif dtype_of(dtype) not in (None, model.dtype):
            raise ValueError(f"the model is loaded in {model.dtype}; convert it, dtype={dtype} is for paths")
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, settings)
        self._runs = Runs(self.engine)

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Bar = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one result per prompt, in their order.

        A prompt that cannot be run gives a result with finish reason "error"; the others are not touched by it.

        Args:
            prompts: One prompt or many.
            sampling_params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr; or what makes one, called as `tqdm` is.
            priority: One number per prompt, smaller first.

        Raises:
            ValueError: As many parameters or priorities as prompts were expected, and were not given.
        """
        many = _many(prompts)
        each = self._params_of(sampling_params, len(many))
        ranks = _one_each("priority", 0 if priority is None else priority, len(many))
        return self._results(zip(many, each, ranks, strict=True), len(many), use_tqdm)

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
            The prompt's number in the stream and its result, as they end; partial results too of a prompt whose
            `output_kind` asks for them.
        """
        if isinstance(prompts, (str, bytes, Mapping)):
            raise TypeError(f"stream takes an iterable of prompts, got one prompt: {prompts!r}")
        bound = _bound("max_in_flight", max_in_flight, 2 * self.engine.options.max_num_seqs)
        [default] = self._params_of(sampling_params, 1)
        pairs = (
            (*item, 0) if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams) else
            (item, default, 0)
            for item in prompts
        )  # fmt: skip
        yield from self._runs.run(pairs, bound, in_pieces=None)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Bar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of prompts by beam search, as `generate(num_beams=...)` of transformers finds them.

        Args:
            prompts: One prompt or many.
            params: Beams, lengths and length penalty.
            use_tqdm: As for `generate`.
            concurrency_limit: Most prompts that are searched at once.

        Returns:
            One output per prompt, in order; a prompt that cannot be run gives one with an error.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"beam_search takes BeamSearchParams(beam_width, max_tokens, ...), got {params!r}")
        many = _many(prompts)
        work = ((prompt, params.sampling(), 0) for prompt in many)
        bound = _bound("concurrency_limit", concurrency_limit, max(1, len(many)))
        results = self._results(work, len(many), use_tqdm, bound=bound)
        return [output_of(result, params, self.tokenizer) for result in results]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Bar = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or many, through the tokenizer's chat template.

        Args:
            messages: One conversation (messages with `role` and `content`) or a list of them. One that cannot be run
                gives a result with an error.
            sampling_params: For all of them, or one each.
            use_tqdm: Show a progress bar on stderr; or what makes one.
            **template: Further arguments of `apply_chat_template`, also together as `chat_template_kwargs`.
        """
        many: Any = messages
        if not isinstance(many, Sequence) or isinstance(many, str):
            raise TypeError(
                f"chat takes a list of messages with role and content, or many such lists, got {messages!r}"
            )
        if many and isinstance(many[0], Mapping):
            many = [many]
        each = self._params_of(sampling_params, len(many))
        work = [(self._templated(one, template), params, 0) for one, params in zip(many, each, strict=True)]
        return self._results(work, len(work), use_tqdm)

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
        results = self._results(work, len(work), use_tqdm)
        for index, result in enumerate(results):
            if result.error is not None:
                raise InvalidRequest(f"continuation {index}: {result.error}")
        return [score(result, start) for result, (_, start) in zip(results, pairs, strict=True)]

    # -- as vLLM has them --------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The tokenizer, None if there is none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for where it samples; used where no parameters are given."""
        return default_params(self.model)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(f"there is no LLM.{name} here: {_NOT_HERE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pages back and leave the model as it was found; closing twice does nothing.

        What other threads are waiting for ends with `EngineClosed`.
        """
        self._runs.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _templated(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> Prompt | InvalidRequest:
        try:
            return self.chat_prompt(messages, **template)
        except InvalidRequest as error:
            return error

    def _results(
        self,
        work: Iterable[Work],
        number: int,
        use_tqdm: bool | Bar,
        *,
        bound: int | None = None,
    ) -> list[RequestOutput]:
        """The results of so many prompts, in order, with a bar."""
        results: list[RequestOutput | None] = [None] * number
        make_bar: Bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=number, disable=not use_tqdm, unit="row", dynamic_ncols=True) as bar:
            for index, result in self._runs.run(work, bound or number or 1):
                results[index] = result
                bar.update()
        return [result for result in results if result is not None]

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


def _many(prompts: Any) -> list[Any]:
    """Prompts as a list, also if there is but one."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is a prompt (text, token ids, a mapping) or a list of prompts, got {prompts!r}")
    many: list[Any] = list(prompts)
    if getattr(prompts, "ndim", None) is not None:
        return [prompts] if prompts.ndim == 1 else many  # type: ignore[attr-defined]
    return [many] if many and all(isinstance(token, Integral) for token in many) else many


def _bound(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def _one_each(name: str, value: Any, number: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValueError(f"{number} prompts, but {len(value)} {name}")
    return list(value)
