"""The engine: requests in, one forward a step, results out.

Owns: the order of a step (plan, append, forward, sample, finish) and the life of requests and of the model's state.
Does not know: how any of these is done; each has a file of its own.

A step goes one way: `Scheduler.plan` -> `PagedMemory.append` -> `batch.build` -> `Runner.forward` -> sample -> finish.
An exception in the forward pass rolls the pages back to where the step began and is raised again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from allocator import Admission
from paged_kv.attention.select import pick_backend
from paged_kv.engine import output
from paged_kv.engine.batch import build
from paged_kv.engine.cropper import Cropper
from paged_kv.engine.draft import propose
from paged_kv.engine.grammar import Grammars
from paged_kv.engine.intake import (
    EngineClosed,
    Intake,
    InvalidRequest,
    Prompt,
    decoder_of,
    encoder_of,
    eos_ids_of,
    max_len_of,
    vocab_size_of,
)
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import RequestOutputKind, SamplingParams
from paged_kv.engine.plan import Limits, StepPlan
from paged_kv.engine.request import Request, RequestOutput, Row
from paged_kv.engine.runner import Runner
from paged_kv.engine.sampling import Sampler
from paged_kv.engine.scheduler import Scheduler
from paged_kv.engine.search import Searcher
from paged_kv.engine.stats import EngineStats, Meter
from paged_kv.engine.stopping import watch
from paged_kv.group import Budget
from paged_kv.memory import PagedMemory
from paged_kv.spec import KVSpec


class Engine:
    """Runs requests on one model, many at a time; not thread-safe.

    The model is switched over while the engine is open (attention, evaluation mode, packed weights) and given back as
    it was by `close`, or at the end of a `with` block.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take pages and switch the model over.

        Raises:
            UnsupportedModel: The model's layers cannot be paged.
            UnsupportedByEngine: The model cannot run packed.
            ModelInUse: Another engine runs on it.
            ValueError: An option is out of range.
        """
        self.options = options or EngineOptions()
        self.tokenizer = tokenizer
        self._clock = clock
        self.max_len = max_len_of(model, self.options.max_model_len)
        self._intake = Intake(tokenizer, vocab_size=vocab_size_of(model), max_len=self.max_len)
        self._eos_ids = eos_ids_of(model)
        specs = KVSpec.from_model(model, page_size=self.options.page_size, lanes=self.options.lanes)
        budget = Budget.of(
            specs,
            num_pages=self.options.num_pages,
            kv_cache_bytes=self.options.kv_cache_bytes,
            memory_fraction=self.options.memory_fraction,
        )
        caching = self.options.enable_prefix_caching and len(specs) == 1
        self.memory = PagedMemory(specs, budget, enable_prefix_caching=caching)
        self._slides = any(window is not None for spec in specs for window in spec.windows)
        self._cropper = Cropper(self.memory, clock)
        self._scheduler = Scheduler(self.memory, self._limits(caching), self._cropper)
        self._sampler = Sampler(
            eos_ids=sorted(self._eos_ids),
            encode=encoder_of(tokenizer),
            decode=decoder_of(tokenizer),
            grammars=Grammars(tokenizer, vocab_size=vocab_size_of(model), eos_ids=sorted(self._eos_ids)),
        )
        backend = pick_backend(specs[0].device, name=self.options.backend)
        self._runner = Runner(model, self.memory, backend, optimize=self.options.optimize)
        self._searcher = Searcher(self.memory, self._scheduler, self._sampler, self._eos_ids, tokenizer)
        self._requests: dict[str, Request] = {}
        self._finished: list[RequestOutput] = []
        self._arrivals = 0
        self._closed = False
        self._stepping: int | None = None
        self._meter = Meter()

    def _limits(self, caching: bool) -> Limits:
        options, groups = self.options, self.memory.groups
        total = self.memory.stats()[0].total_pages
        return Limits(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            page_size=options.page_size,
            watermark=int(total * options.watermark),
            prefix_caching=caching,
            num_tables=sum(len(group.spec.layers) * group.spec.lanes for group in groups) if len(groups) == 1 else 0,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        scope: bytes | str = b"",
        stream: bool | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: A name that no unfinished request has.
            prompt: Text, token ids, or a mapping with `prompt_token_ids`, and if wanted `prompt` (their text) and
                `logits_from` (report log probabilities of the prompt from the token after this position on).
            params: How to continue.
            priority: Smaller runs earlier.
            scope: Prefixes are shared only between requests of equal scope.
            stream: Whether `step` also returns this request's partial results; by default if `params.output_kind` asks
                for them.

        Raises:
            InvalidRequest: The prompt is empty, too long, holds unknown tokens, or the id is taken.
            TypeError: The parameters are no `SamplingParams`.
            EngineClosed: After `close`.
        """
        self._check_open()
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use")
        if type(priority) is not int:
            raise InvalidRequest(f"priority is an integer, got {priority!r}")
        scope = scope.encode() if isinstance(scope, str) else scope
        if not isinstance(scope, bytes):
            raise InvalidRequest(f"scope is bytes or text, got {scope!r}")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is a SamplingParams, got {params!r}")
        text, ids, logits_from = self._intake(prompt, params)
        if params.prompt_logprobs is not None and logits_from is None:
            logits_from = 0
        request = Request(
            request_id,
            ids,
            params,
            arrival=self._arrivals,
            priority=priority,
            scope=scope,
            prompt=text,
            max_len=self.max_len,
            logits_from=logits_from,
        )
        try:
            seed = params.seed if params.seed is not None else self.options.seed * 1_000_003 + self._arrivals
            if params.compression is not None:
                shares = self._scheduler.limits.prefix_caching
                request.crops = params.compression.for_layers(self.memory.layers, shares=shares)
            row = request.rows[0]
            row.sampler = self._sampler.prepare(params, seed)
            kind = params.output_kind
            request.streams = kind is not RequestOutputKind.FINAL_ONLY and (
                kind is not None if stream is None else stream
            )
            watch(row, self.tokenizer, streams=request.streams)
            self._scheduler.add(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        request.timings["arrival"] = self._clock()
        self._arrivals += 1
        self._requests[request_id] = request
        self._meter.num_prompt_tokens += len(ids)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and give its pages back; returns what it had, None if it is not running (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._check_open()
        self._end(request, "abort")
        return self._finished.pop()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running, or finished but not returned by `step` yet."""
        return bool(self._requests) or bool(self._finished)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns the requests that ended, and news of those that stream.

        Raises:
            Exception: Whatever the model raised; pages are as before the step, and the requests go on at the next one.
            EngineClosed: After `close`.
            RuntimeError: Another thread is in a step of this engine.
        """
        self._check_open()
        self._stepping = threading.get_ident()
        try:
            return self._step()
        finally:
            self._stepping = None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed
        if self._stepping not in (None, threading.get_ident()):
            raise RuntimeError("another thread is in a step of this engine: use LLM or AsyncEngine from many threads")

    def _step(self) -> list[RequestOutput]:
        if not self._scheduler.num_waiting:
            propose(self._scheduler.running, self.options.num_draft_tokens)
        plan = self._scheduler.plan()
        for row, answer in plan.unfit:
            self._unfit(row, answer)
        for request in self._compute(plan) if plan.rows else ():
            if request.finished:
                self._finish(request)
            elif request.streams and (news := output.so_far(request, self.tokenizer)) is not None:
                self._finished.append(news)
        finished, self._finished = self._finished, []
        return finished

    def _compute(self, plan: StepPlan) -> set[Request]:
        """The forward pass of a plan and what follows from its logits; returns the requests that got on."""
        self._cropper.begin(plan.rows)
        batch = build(plan, self._runner.device)
        seqs = plan.seqs
        now = self._clock()
        for row in plan.rows:
            row.request.timings.setdefault("first_scheduled", now)
        self.memory.append(seqs, plan.counts)
        try:
            logits = self._runner.forward(batch, self.memory.step(seqs, plan.counts))
        except BaseException:
            self.memory.truncate(seqs, plan.counts)
            raise
        self._scheduler.advance(plan)
        self._meter.note(plan.counts, self.memory, self._scheduler.running)
        self._searcher.verify(batch, logits)
        self._publish(plan)
        if self._cropper.crop_due(plan.rows):
            self._scheduler.pages_freed()
        failed = self._cropper.take_failed()
        for request, message in failed.items():
            self._searcher.fail(request, message)
        return set(failed) | self._searcher.take(batch, logits, self._clock())

    def _publish(self, plan: StepPlan) -> None:
        """Share full blocks, and free pages behind windows, for the rows that crossed a page border."""
        size = self.options.page_size
        crossed = [
            row
            for row, count in zip(plan.rows, plan.counts, strict=True)
            if row.num_computed // size > (row.num_computed - count) // size
        ]
        if self._scheduler.limits.prefix_caching:
            for row in crossed:
                if row.seq is not None and row.publishes:
                    self.memory.commit(row.seq, (row.tokens + row.draft)[: row.num_computed])
        if self._slides and crossed:
            self.memory.slide([row.seq for row in crossed if row.seq is not None])

    # -- ends --------------------------------------------------------------------------------------------------------

    def _unfit(self, row: Row, answer: Admission) -> None:
        """A row that the pool cannot hold although it is alone: what it has is its result."""
        request = row.request
        if row.finish_reason is not None:
            return
        if row.num_output == 0 or request.lockstep:
            request.error = (
                f"{len(row.tokens)} tokens need {answer.needed} pages and the pool has {answer.total} "
                f"({answer.available} available)"
            )
            self._end(request, "error")
            return
        self._searcher.end(row, "length")
        if request.finished:
            self._finish(request)

    def _end(self, request: Request, reason: str) -> None:
        for row in list(request.rows):
            self._scheduler.finish(row, reason)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        request.timings["finished"] = self._clock()
        self._meter.num_cached_tokens += request.num_cached_tokens
        self._finished.append(output.of_request(request, self.tokenizer))
        del self._requests[request.request_id]

    # -- state -------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts since the engine was opened and the state now."""
        return self._meter.snapshot(self.memory, self._scheduler, self._searcher, self._cropper)

    def check(self) -> None:
        """Assert the invariants of pages and scheduler.

        Raises:
            AssertionError: One is broken.
        """
        self.memory.check()
        self._scheduler.check()

    def close(self) -> None:
        """End what runs, give all pages back and leave the model as it was; closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        for request in list(self._requests.values()):
            self._end(request, "abort")
        self._finished.clear()
        self._runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
