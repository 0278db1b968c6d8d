"""What the logits of a step lead to: new tokens, forks, beams, ends.

Owns: applying draws to rows, verifying guessed tokens, forking completions, moving beams.
Does not know: how the step was planned or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.engine.batch import Batch, Span
from paged_kv.engine.beam import BeamSearch
from paged_kv.engine.drawing import likeliest
from paged_kv.engine.grammar import GrammarError
from paged_kv.engine.request import Request, Row
from paged_kv.engine.sampling import Draw, NoTokenLeft, Sampler, tops_of
from paged_kv.engine.scheduler import Scheduler
from paged_kv.engine.stopping import take, watch
from paged_kv.memory import PagedMemory


class Searcher:
    """Takes a step's logits and leaves every row with its next token, or ended."""

    def __init__(
        self,
        memory: PagedMemory,
        scheduler: Scheduler,
        sampler: Sampler,
        eos_ids: frozenset[int],
        tokenizer: Any,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._sampler = sampler
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer
        self.live_sums = np.zeros(len(memory.layers), np.int64)
        self.num_ended = 0
        self.num_tokens = 0

    @torch.inference_mode()
    def take(self, batch: Batch, logits: Tensor, now: float) -> set[Request]:
        """Go on with every row that has logits; returns their requests.

        Args:
            batch: The step.
            logits: `[lines, vocab]`.
            now: The time, for the first tokens.
        """
        rows: list[Row] = []
        lines: list[int] = []
        beams: dict[Request, list[Span]] = {}
        for span in batch.spans:
            request = span.row.request
            if request.logits_from is not None:
                self._score(span, logits)
            if not span.samples or span.row.finish_reason is not None:
                continue
            request.timings.setdefault("first_token", now)
            if request.params.max_tokens == 0:
                self.end(span.row, "length")
            elif span.row.draft:
                self._take_draft(span.row)
            elif request.lockstep:
                beams.setdefault(request, []).append(span)
            else:
                group = self._with_forks(span.row)
                rows += group
                lines += [span.first + span.count - 1] * len(group)
        if rows:
            self._sample(rows, logits if lines == [*range(len(logits))] else logits[lines])
        for request, spans in beams.items():
            self._move_beams(request, spans, logits)
        return {span.row.request for span in batch.spans}

    def end(self, row: Row, reason: str) -> None:
        """End a row, and note how many tokens its layers held."""
        if row.seq is not None:
            live = [int(self._memory.live_lens([row.seq], layer).max()) for layer in self._memory.layers]
            self.live_sums += live
            self.num_ended += 1
        self._scheduler.finish(row, reason)

    # -- sampling ----------------------------------------------------------------------------------------------------

    def _sample(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Draw a token for each row, line by line."""
        for row, draw in zip(rows, self._sampler(logits, rows), strict=True):
            self.num_tokens += 1
            if isinstance(draw, NoTokenLeft):
                self.fail(row.request, str(draw))
            elif isinstance(draw, Exception):
                self.fail(row.request, f"a logits processor raised {type(draw).__name__}: {draw}")
            elif row.finish_reason is None:
                try:
                    reason = take(row, draw, self._eos_ids, self._tokenizer)
                except GrammarError as error:
                    self.fail(row.request, str(error))
                    continue
                if reason:
                    self.end(row, reason)

    def _with_forks(self, row: Row) -> list[Row]:
        """The row, and at the end of its prompt the forks for the request's other completions."""
        request = row.request
        if request.forked or request.params.width == 1:
            return [row]
        others = self._fork(row, range(1, request.params.width))
        for other in others:
            watch(other, self._tokenizer, streams=request.streams)
        return [row, *others]

    def _fork(self, row: Row, indices: Sequence[int]) -> list[Row]:
        assert row.seq is not None
        forks = self._memory.fork(row.seq, len(indices))
        others = [
            Row(
                row.request,
                index,
                list(row.tokens),
                seq,
                row.num_computed,
                sampler=row.sampler,
                num_cropped=row.num_cropped,
                num_live=row.num_live,
                crop_pending=row.crop_pending,
            )
            for index, seq in zip(indices, forks, strict=True)
        ]
        self._scheduler.fork(row, others)
        return others

    def fail(self, request: Request, message: str) -> None:
        """End a request with an error; others go on."""
        request.error = message
        for row in list(request.rows):
            self._scheduler.finish(row, "error")

    # -- guessed tokens ----------------------------------------------------------------------------------------------

    def verify(self, batch: Batch, logits: Tensor) -> None:
        """Replace each row's guessed tokens by those that the model gives; the wrong ones give their slots back."""
        spans = [span for span in batch.spans if span.row.draft]
        if not spans:
            return
        given_tokens = likeliest(logits).tolist()
        for span in spans:
            row = span.row
            given = given_tokens[span.first : span.first + span.count]
            guessed = row.draft[: span.count - 1]
            num_right = 0
            while num_right < len(guessed) and guessed[num_right] == given[num_right]:
                num_right += 1
            row.guesser.learn(len(guessed), num_right)
            row.draft = given[: num_right + 1]
            wrong = len(guessed) - num_right
            if wrong and row.seq is not None:
                self._memory.truncate([row.seq], [wrong])
                row.num_computed -= wrong
                row.num_live -= wrong

    def _take_draft(self, row: Row) -> None:
        """Add the tokens that `verify` found, up to the row's end."""
        tokens, row.draft = row.draft, []
        for token in tokens:
            self.num_tokens += 1
            if reason := take(row, Draw(token), self._eos_ids, self._tokenizer):
                self.end(row, reason)
                return

    # -- log probabilities of the prompt -----------------------------------------------------------------------------

    def _score(self, span: Span, logits: Tensor) -> None:
        """Note the log probabilities of the prompt tokens that a span's lines predict."""
        request = span.row.request
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * len(request.prompt_ids)
        known = min(span.count, span.row.num_prompt - 1 - span.position)
        number = request.params.prompt_logprobs or 0
        for start in range(0, known, 64):
            lines = logits[span.first + start : span.first + min(known, start + 64)]
            first = span.position + start + 1
            tokens = request.prompt_ids[first : first + len(lines)]
            logprobs = torch.log_softmax(lines.float(), -1)
            tops = tops_of(tokens, logprobs, [number] * len(tokens), self._sampler.decode)
            request.prompt_logprobs[first : first + len(tokens)] = tops

    # -- beams -------------------------------------------------------------------------------------------------------

    def _move_beams(self, request: Request, spans: Sequence[Span], logits: Tensor) -> None:
        """Replace a request's beams by their best continuations."""
        search = self._search_of(request)
        beams = list(request.rows)
        last_line = {span.row: span.first + span.count - 1 for span in spans}
        logprobs = torch.log_softmax(logits[[last_line[beam] for beam in beams]].float(), -1)
        failed = self._sampler.process(logprobs, beams)
        if len(failed) == len(beams):
            self.fail(request, str(next(iter(failed.values()))))
            return
        children = search.advance(logprobs, [beam.output_ids for beam in beams])
        if not children:
            self._end_beams(request, search)
            return
        first_child: set[int] = set()
        placed: list[tuple[Row, int, float]] = []
        request.forked = True
        for child in children:
            beam = beams[child.parent]
            if child.parent in first_child:
                search.num_rows += 1
                [beam] = self._fork(beam, [search.num_rows])
            first_child.add(child.parent)
            placed.append((beam, child.token, child.score))
        for index, beam in enumerate(beams):
            if index not in first_child:
                self._scheduler.drop(beam)
        self.num_tokens += len(placed)
        for beam, token, score in placed:
            beam.tokens.append(token)
            beam.cumulative_logprob = score
        search.scores = [score for _, _, score in placed]
        request.rows[:] = [beam for beam, _, _ in placed]

    def _search_of(self, request: Request) -> BeamSearch:
        if request.beam is None:
            params = request.params
            stops = (frozenset() if params.ignore_eos else self._eos_ids) | frozenset(params.stop_token_ids)
            room = request.max_len - len(request.prompt_ids)
            longest = room if params.max_tokens is None else min(params.max_tokens, room)
            request.beam = BeamSearch(params.width, params.length_penalty, stops, longest)
        search: BeamSearch = request.beam
        return search

    def _end_beams(self, request: Request, search: BeamSearch) -> None:
        for beam in list(request.rows):
            self._scheduler.drop(beam)
        for index, hypothesis in enumerate(search.finished):
            tokens = [*request.prompt_ids, *hypothesis.tokens]
            request.done.append(
                Row(
                    request,
                    index,
                    tokens,
                    finish_reason=hypothesis.reason,
                    cumulative_logprob=hypothesis.logprob,
                )
            )
