"""Measurements of the pool alone: building it, taking and giving back pages, fresh and after churn."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allocator import PagePool
from bench.allocator.baselines import LinkedPool, ListPool
from bench.allocator.timing import Figures, Row, measure

__all__ = ["build", "take_and_release"]

NS = 1e9
POOLS: dict[str, Callable[[int], Any]] = {"allocator": PagePool, "linked objects": LinkedPool, "list": ListPool}


def build(num_pages: int, quick: bool) -> Iterator[Row]:
    """Time and memory of a new pool."""
    for name, make in POOLS.items():
        ours = name == "allocator"
        times = measure(lambda make=make: make(num_pages), repeat=10 if ours else 1 if quick else 2)  # type: ignore[misc]
        yield Row("build a pool", f"{num_pages} pages", name, "ms", times.times(1e3), target=5 if ours else None)
        tracemalloc.start()
        pool = make(num_pages)
        mib = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        del pool
        yield Row(
            "memory of a pool", f"{num_pages} pages", name, "MiB", Figures.exactly(mib), target=32 if ours else None
        )


def _churn(pool: Any, num_pages: int) -> None:
    """Takes nearly all pages and gives them back in random order, a few at a time."""
    rng = np.random.default_rng(0)
    taken: Any = pool.take(num_pages * 9 // 10)
    order = rng.permutation(len(taken))
    shuffled: Any = taken[order] if isinstance(taken, np.ndarray) else [taken[i] for i in order]
    for start in range(0, len(order), 512):
        pool.release(shuffled[start : start + 512])


def take_and_release(sizes: list[int], counts: list[int], quick: bool) -> Iterator[Row]:
    """Pages taken and given back at once, with the check for double frees."""
    for num_pages in sizes:
        for name, make in POOLS.items():
            pool = make(num_pages)
            for state in ("fresh", "after churn"):
                if state == "after churn":
                    _churn(pool, num_pages)
                for n in counts:
                    if n < num_pages:
                        yield _cycle(pool, name, f"{n} of {num_pages} pages, {state}", n, quick)


def _cycle(pool: Any, name: str, case: str, n: int, quick: bool) -> Row:
    ours = name == "allocator"
    loops = max(1, 256 // n)

    def one() -> None:
        for _ in range(loops):
            pool.release_one(pool.take_one())

    def many() -> None:
        for _ in range(loops):
            pool.release(pool.take(n))

    call = one if ours and n == 1 else many
    times = measure(call, repeat=40 if quick else 200, pieces=n * loops)
    target = {1: 600.0, 8192: 10.0}.get(n) if ours else None
    return Row("take + checked release", case, name, "ns/page", times.times(NS), target=target)
