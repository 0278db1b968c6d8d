"""Two ways to share one allocator: `LockedAllocator` for threads, `AsyncAllocator` for tasks that wait for pages.

The core has no lock and no callback; both live here alone.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from allocator.block_allocator import BlockAllocator
from allocator.errors import OutOfPages
from allocator.lifecycle import PoolLifecycle
from allocator.plan import Plan
from allocator.queries import TableQueries
from allocator.types import Counts, Keep, PinId, SeqId, Seqs, Verdict

__all__ = ["AsyncAllocator", "LockedAllocator"]

Method = TypeVar("Method", bound=Callable[..., Any])


class LockedAllocator(BlockAllocator):
    """A `BlockAllocator` whose every call holds one lock.

    A plan must be applied before the next mutating call of *any* thread, so use `exclusive` around both::

        with allocator.exclusive():
            store.apply(allocator.append(seqs, 1))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()
        super().__init__(*args, **kwargs)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock over several calls. Reentrant."""
        with self._lock:
            yield


def _locked(method: Method) -> Method:
    @functools.wraps(method)
    def call(self: LockedAllocator, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # same signature: that is what wraps is for


for _owner in (TableQueries, PoolLifecycle, BlockAllocator):
    for _name, _member in vars(_owner).items():
        if callable(_member) and not _name.startswith("_"):
            setattr(LockedAllocator, _name, _locked(_member))


class AsyncAllocator:
    """Appends that wait, first come first served, until their pages are there. For one event loop.

    Calls that give pages back must go through this object, so that waiters hear of them. A plan must be applied before
    the task that got it awaits anything else. Whoever waits for pages that only waiters hold waits for ever: preempt.

    Args:
        allocator: the allocator; its queries may be used directly.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._waiters: deque[asyncio.Event] = deque()

    @property
    def num_waiting(self) -> int:
        """Appends that wait."""
        return len(self._waiters)

    async def append(self, seqs: Seqs, counts: Counts) -> Plan:
        """`BlockAllocator.append` as soon as `can_append` says OK and every earlier append went through.

        Raises:
            OutOfPages: it could never fit; nothing changed.
            StaleHandle, InvalidArgument: nothing changed.
        """
        turn = asyncio.Event()
        self._waiters.append(turn)
        if self._waiters[0] is turn:
            turn.set()
        try:
            while True:
                await turn.wait()
                answer = self.allocator.can_append(seqs, counts)
                if answer.verdict is Verdict.OK:
                    return self.allocator.append(seqs, counts)
                if answer.verdict is Verdict.NEVER:
                    raise OutOfPages(answer.needed, answer.available, answer.total)
                turn.clear()
        finally:
            self._waiters.remove(turn)
            self._wake()

    def _wake(self) -> None:
        """Lets the first waiter look again; it runs only after the current task gave up control."""
        if self._waiters:
            self._waiters[0].set()

    def close(self, seq: SeqId) -> Plan:
        """`BlockAllocator.close`."""
        return self._release(self.allocator.close(seq))

    def preempt(self, seq: SeqId) -> Plan:
        """`BlockAllocator.preempt`."""
        return self._release(self.allocator.preempt(seq))

    def crop(self, seq: SeqId, keep: Keep) -> Plan:
        """`BlockAllocator.crop`."""
        return self._release(self.allocator.crop(seq, keep))

    def truncate(self, seqs: Seqs, counts: Counts) -> Plan:
        """`BlockAllocator.truncate`."""
        return self._release(self.allocator.truncate(seqs, counts))

    def slide(self, seqs: Seqs, *, margin: int = 0) -> Plan:
        """`BlockAllocator.slide`."""
        return self._release(self.allocator.slide(seqs, margin=margin))

    def unpin(self, pin: PinId) -> Plan:
        """`PoolLifecycle.unpin`."""
        return self._release(self.allocator.unpin(pin))

    def grow(self, n: int) -> None:
        """`PoolLifecycle.grow`."""
        self.allocator.grow(n)
        self._wake()

    def _release(self, plan: Plan) -> Plan:
        self._wake()
        return plan
