"""The engine for asyncio: one generator per request.

Owns: the thread that steps the engine, handing results to their generators, back-pressure, cancellation.
Does not know: how a step works.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import EngineClosed, InvalidRequest, Prompt
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.request import RequestOutput
from paged_kv.engine.stats import EngineStats

_Item = RequestOutput | BaseException


class AsyncEngine:
    """Runs an engine in a thread of its own.

    All calls into the engine happen in that thread, between two steps. At most `max_waiting` requests are taken at
    once; further callers of `generate` wait for their turn. Leaving a generator early (a `break`, a cancelled task)
    aborts its request and gives its pages back.

    >>> async def ask(engine):
    ...     async for result in engine.generate([1, 2, 3], SamplingParams(max_tokens=8)):
    ...         pass
    ...     return result
    """

    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        """Take over an engine; `close` closes it.

        Args:
            engine: Not to be used by anybody else from now on.
            max_waiting: Most requests in the engine; four times `max_num_seqs` by default.
        """
        self._engine = engine
        self._seats = asyncio.Semaphore(max_waiting or 4 * engine.options.max_num_seqs)
        self._commands: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[_Item]]] = {}
        self._ids = itertools.count()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="paged-kv engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        scope: bytes = b"",
    ) -> AsyncIterator[RequestOutput]:
        """Partial results of a prompt as its tokens come, and at last the finished one.

        What a partial result holds is `sampling_params.output_kind`: everything so far, or what is new.

        Raises:
            InvalidRequest: The request cannot be run.
            EngineClosed: After `close`.
            Exception: What the model raised in a step; all requests end with it.
        """
        name = request_id or f"async-{next(self._ids)}"
        async with self._seats:
            queue: asyncio.Queue[_Item] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            options: dict[str, Any] = {"priority": priority, "scope": scope, "stream": True}
            self._send(lambda: self._add(name, (loop, queue), prompt, sampling_params, options))
            finished = False
            try:
                while not finished:
                    item = await queue.get()
                    if isinstance(item, BaseException):
                        finished = True
                        raise item
                    finished = item.finished
                    yield item
            finally:
                if not finished:
                    self._send(lambda: self._abort(name, queue))

    async def stats(self) -> EngineStats:
        """The engine's statistics, taken between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[EngineStats] = loop.create_future()
        self._send(lambda: _resolve(loop, answer, self._engine.stats()))
        return await answer

    async def close(self) -> None:
        """End all requests, stop the thread and close the engine."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- in the engine's thread --------------------------------------------------------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        """Have a command run in the engine's thread, before its next step."""
        with self._changed:
            if self._closing:
                raise EngineClosed
            if self._failure is not None:
                raise self._failure
            self._commands.append(command)
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._next():
                for result in self._engine.step():
                    self._deliver(result.request_id, result, last=result.finished)
        except BaseException as error:  # noqa: BLE001 - handed to every request that waits; the thread ends here
            self._failure = error
        finally:
            for name in list(self._queues):
                self._deliver(name, self._failure or EngineClosed(), last=True)
            self._engine.close()

    def _next(self) -> bool:
        """Run commands until there is a step to take; False to end."""
        while True:
            with self._changed:
                while not (self._commands or self._closing or self._engine.has_unfinished):
                    self._changed.wait()
                if self._closing:
                    return False
                commands, self._commands = self._commands, []
            for command in commands:
                command()
            if self._engine.has_unfinished:
                return True

    def _add(self, name: str, receiver: Any, prompt: Prompt, params: SamplingParams | None, options: Any) -> None:
        if name in self._queues:
            _put(receiver, InvalidRequest(f"request id {name!r} is in use"))
            return
        self._queues[name] = receiver
        try:
            self._engine.add_request(name, prompt, params, **options)
        except InvalidRequest as error:
            self._deliver(name, error, last=True)

    def _abort(self, name: str, queue: Any) -> None:
        if name in self._queues and self._queues[name][1] is queue:
            del self._queues[name]
            self._engine.abort(name)

    def _deliver(self, name: str, item: _Item, *, last: bool) -> None:
        receiver = self._queues.get(name)
        if receiver is None:
            return
        if last:
            del self._queues[name]
        _put(receiver, item)


def _put(receiver: tuple[asyncio.AbstractEventLoop, asyncio.Queue[_Item]], item: _Item) -> None:
    """Hand an item to a generator's queue, from another thread; a loop that is gone needs nothing any more."""
    loop, queue = receiver
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[EngineStats], stats: EngineStats) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(stats))
