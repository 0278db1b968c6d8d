"""Many callers of one engine: each gives work and takes its own results.

Owns: what is in flight for whom, threads taking turns at stepping, runs that are left early.
Does not know: how requests are run, loaded, templated or scored.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paged_kv.engine import output
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import InvalidRequest, Prompt
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import RequestOutput
from paged_kv.engine.turns import Turns, interrupts_wait

#: A prompt (or why there is none), its parameters and its priority.
Work = tuple[Prompt | InvalidRequest, SamplingParams, int]


class Runs:
    """An engine that several threads, and calls within the loop over a stream, may use."""

    def __init__(self, engine: Engine) -> None:
        """Share an engine."""
        self._engine = engine
        self._ids = itertools.count()
        self._turns = Turns()
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._unwanted: deque[str] = deque()

    def run(
        self, work: Iterable[Work], bound: int, *, in_pieces: bool | None = False
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Run work with at most `bound` requests in the engine. Leaving early aborts the rest.

        Callers take turns at stepping; a step serves all of them.

        Args:
            work: Read as room becomes free.
            bound: At least 1.
            in_pieces: Whether partial results are wanted, see `Engine.add_request`.

        Yields:
            The number of a piece of work and its result, as they end.
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
                        refusal = self._submit(request_id, prompt, params, priority=priority, stream=in_pieces)
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
                    index = pending[result.request_id]
                    if result.finished:
                        del pending[result.request_id]
                    yield index, result
        finally:
            self._unwanted.extend(pending)
            if pending and not self._turns.mine:
                with self._turns:
                    self._abort_unwanted()

    def close(self) -> None:
        """Close the engine between two steps; what others are waiting for ends with `EngineClosed`."""
        with self._turns:
            self._engine.close()

    def _step(self) -> None:
        """One step of the engine; every result goes to whoever asked for it."""
        for result in self._engine.step():
            take = self._inboxes.pop if result.finished else self._inboxes.get
            inbox = take(result.request_id, None)
            if inbox is not None:
                inbox.append(result)

    def _abort_unwanted(self) -> None:
        """End the requests of runs that were left early."""
        while self._unwanted:
            request_id = self._unwanted.popleft()
            self._inboxes.pop(request_id, None)
            self._engine.abort(request_id)

    def _submit(
        self, request_id: str, prompt: Prompt | InvalidRequest, params: SamplingParams, **how: Any
    ) -> RequestOutput | None:
        """Give a prompt to the engine; returns its result at once if it is refused."""
        if isinstance(prompt, InvalidRequest):
            return output.refused(request_id, None, str(prompt))
        try:
            self._engine.add_request(request_id, prompt, params, **how)
        except InvalidRequest as error:
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            return output.refused(request_id, text if isinstance(text, str) else None, str(error))
        return None
