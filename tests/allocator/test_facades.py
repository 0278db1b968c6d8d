"""Threads and tasks."""

import asyncio
import inspect
import threading
from typing import Any

import pytest

from allocator import AsyncAllocator, BlockAllocator, LockedAllocator, OutOfPages, StaleHandle


def test_threads_do_not_disturb_each_other() -> None:
    allocator = LockedAllocator(4000, page_size=2, num_layers=3, enable_prefix_caching=True)
    failures: list[BaseException] = []

    def work(scope: bytes) -> None:
        try:
            for round_ in range(30):
                tokens = list(range(round_, round_ + 9))
                opened = allocator.open(tokens, scope=scope)
                with allocator.exclusive():
                    allocator.append([opened.seq], 9 - opened.num_cached_tokens)
                    allocator.commit(opened.seq, tokens)
                [child] = allocator.fork(opened.seq)
                allocator.append([opened.seq, child], 1)
                allocator.close(child)
                allocator.close(opened.seq)
        except BaseException as error:  # noqa: BLE001 - a thread's failure must reach the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(b"%d" % n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    allocator.check()
    assert allocator.stats().active_pages == 0


def test_every_public_call_of_the_locked_facade_holds_the_lock() -> None:
    for name, member in inspect.getmembers(BlockAllocator, inspect.isfunction):
        if not name.startswith("_"):
            assert getattr(LockedAllocator, name) is not member, name
            assert getattr(LockedAllocator, name).__doc__ == member.__doc__


def build(num_pages: int) -> AsyncAllocator:
    return AsyncAllocator(BlockAllocator(num_pages, page_size=1, num_layers=1))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_waiters_are_served_first_come_first_served() -> None:
    async def scenario() -> None:
        facade = build(9)
        seqs = [facade.allocator.open().seq for _ in range(4)]
        await facade.append([seqs[0]], 8)
        order: list[int] = []

        async def wait(at: int, count: int) -> None:
            await facade.append([seqs[at]], count)
            order.append(at)

        tasks = [asyncio.ensure_future(wait(at, count)) for at, count in ((1, 5), (2, 1), (3, 2))]
        await settle()
        assert (order, facade.num_waiting) == ([], 3)
        facade.truncate([seqs[0]], 2)  # two pages: enough for the second, but the first is first
        await settle()
        assert order == []
        facade.truncate([seqs[0]], 3)
        await settle()
        assert order == [1]
        facade.close(seqs[0])
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3]
        assert facade.num_waiting == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["close", "preempt", "crop", "truncate", "slide", "unpin", "grow"])
def test_every_call_that_gives_pages_back_wakes_waiters(how: str) -> None:
    async def scenario() -> None:
        facade = AsyncAllocator(BlockAllocator(9, page_size=1, num_layers=1, windows=[4]))
        allocator = facade.allocator
        holder, waiter = allocator.open().seq, allocator.open().seq
        await facade.append([holder], 8)
        pin, _ = allocator.pin(holder)
        if how == "unpin":
            allocator.close(holder)
        else:
            allocator.unpin(pin)
        task = asyncio.ensure_future(facade.append([waiter], 2))
        await settle()
        assert not task.done()
        calls: dict[str, Any] = {
            "close": lambda: facade.close(holder),
            "preempt": lambda: facade.preempt(holder),
            "crop": lambda: facade.crop(holder, {0: [0, 1]}),
            "truncate": lambda: facade.truncate([holder], 3),
            "slide": lambda: facade.slide([holder], margin=1),
            "unpin": lambda: facade.unpin(pin),
            "grow": lambda: facade.grow(2),
        }
        calls[how]()
        assert (await asyncio.wait_for(task, 5)).allocated == 2

    asyncio.run(scenario())


def test_what_can_never_fit_and_what_was_closed_do_not_wait() -> None:
    async def scenario() -> None:
        facade = build(5)
        seq = facade.allocator.open().seq
        with pytest.raises(OutOfPages):
            await facade.append([seq], 5)
        facade.close(seq)
        with pytest.raises(StaleHandle):
            await facade.append([seq], 1)
        assert facade.num_waiting == 0

    asyncio.run(scenario())


def test_a_cancelled_waiter_makes_room_for_the_next() -> None:
    async def scenario() -> None:
        facade = build(5)
        seqs = [facade.allocator.open().seq for _ in range(3)]
        await facade.append([seqs[0]], 3)
        first = asyncio.ensure_future(facade.append([seqs[1]], 4))
        second = asyncio.ensure_future(facade.append([seqs[2]], 1))
        await settle()
        first.cancel()
        assert (await asyncio.wait_for(second, 5)).allocated == 1
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(scenario())
