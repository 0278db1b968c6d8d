"""Measurements of what an engine calls: decode steps, prefill, crops, eviction, hashing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator import BlockAllocator, SeqId
from allocator.hashing import block_hashes, scope_hash, state_after
from allocator.types import Keep
from bench.allocator.baselines import LinkedCache, LinkedPool, ListCache, ListPool, naive_crop, naive_decode_step
from bench.allocator.timing import Figures, Row, measure

__all__ = ["crop", "decode", "evict", "hashing", "long_context", "prefill"]

MS, US, NS = 1e3, 1e6, 1e9
PAGE = 16
NAIVE: dict[str, Callable[[int], Any]] = {"linked objects": LinkedPool, "list": ListPool}
CACHES: dict[str, Callable[[int, int], Any]] = {
    "linked objects": lambda cached, rows: LinkedCache(LinkedPool(cached * rows + 1), cached, rows),
    "list": lambda cached, rows: ListCache(ListPool(cached * rows + 1), cached, rows),
}


def _decoding(num_layers: int, lanes: int, num_seqs: int, *, diverged: bool) -> tuple[BlockAllocator, list[SeqId]]:
    rng = np.random.default_rng(0)
    rows = num_layers * lanes
    allocator = BlockAllocator(rows * num_seqs * 64, page_size=PAGE, num_layers=num_layers, lanes=lanes)
    seqs = [allocator.open().seq for _ in range(num_seqs)]
    allocator.append(seqs, rng.integers(200, 400, num_seqs))
    if diverged:
        for seq in seqs:
            live = rng.integers(100, allocator.seen_len(seq), rows)
            allocator.crop(seq, {divmod(row, lanes): np.arange(live[row]) for row in range(rows)})
    return allocator, seqs


def decode(quick: bool) -> Iterator[Row]:
    """One token for every sequence: the append, and the arrays that a kernel needs."""
    repeat = 100 if quick else 500
    for num_layers, lanes, num_seqs in ((64, 1, 256), (64, 8, 32)):
        shape = f"64 layers x {lanes} lanes x {num_seqs} sequences" if lanes > 1 else "64 layers x 256 sequences"
        for diverged in (True, False):
            allocator, seqs = _decoding(num_layers, lanes, num_seqs, diverged=diverged)
            case = f"{shape}, {'diverged' if diverged else 'lock-step'}"
            times = measure(lambda a=allocator, s=seqs: a.append(s, 1), repeat=repeat)  # type: ignore[misc]
            yield Row("decode step: append", case, "allocator", "ms", times.times(MS), target=0.2)
            if diverged:
                yield from _exports(allocator, seqs, case)
                yield from _naive_steps(num_layers * lanes, num_seqs, case)


def _exports(allocator: BlockAllocator, seqs: list[SeqId], case: str) -> Iterator[Row]:
    calls = {
        "slot_mapping": lambda: allocator.slot_mapping(seqs, 1),
        "block_tables": lambda: allocator.block_tables(seqs),
        "append + drain_deltas": lambda: (allocator.append(seqs, 1), allocator.drain_deltas()),
    }
    for name, call in calls.items():
        yield Row(f"decode step: {name}", case, "allocator", "ms", measure(call, repeat=30).times(MS))


def _naive_steps(rows: int, num_seqs: int, case: str) -> Iterator[Row]:
    for name, make in NAIVE.items():
        rng = np.random.default_rng(0)
        pool = make(rows * num_seqs * 64)
        lens: list[list[int]] = rng.integers(100, 400, (num_seqs, rows)).tolist()
        tables = [[pool.take(-(-length // PAGE)) for length in row] for row in lens]
        times = measure(partial(naive_decode_step, pool, lens, tables, PAGE), repeat=30)
        yield Row("decode step: append", case, name, "ms", times.times(MS))


def prefill(quick: bool) -> Iterator[Row]:
    """Pages for one long prompt."""
    tokens, rows = 8192, 64
    pages = tokens // PAGE * rows
    case = f"{tokens} tokens x {rows} layers"
    allocator = BlockAllocator(pages * 4, page_size=PAGE, num_layers=rows)
    held: list[SeqId] = []
    times = measure(
        lambda: allocator.append(held, tokens),
        before=lambda: held.append(allocator.open().seq),
        after=lambda: allocator.close(held.pop()),
        repeat=20 if quick else 100,
        pieces=pages,
    )
    yield Row("prefill", case, "allocator", "ns/page", times.times(NS), target=10)
    for name, make in NAIVE.items():
        naive = _NaiveSequence(make(pages * 4), tokens, rows)
        times = measure(naive.fill, after=naive.close, repeat=10, pieces=pages)
        yield Row("prefill", case, name, "ns/page", times.times(NS))


class _NaiveSequence:
    """One sequence over a pool of lists or objects."""

    def __init__(self, pool: Any, tokens: int, rows: int) -> None:
        self.pool, self.tokens, self.rows = pool, tokens, rows
        self.tables: list[list[Any]] = []

    def fill(self) -> None:
        self.tables = [self.pool.take(self.tokens // PAGE) for _ in range(self.rows)]

    def crop(self, keep: dict[int, list[int]]) -> None:
        naive_crop(self.pool, self.tables, keep, PAGE)

    def close(self) -> None:
        for table in self.tables:
            self.pool.release(table)


def crop(quick: bool) -> Iterator[Row]:
    """Every layer of a sequence loses tokens in one call; per page held before."""
    rows = 64
    for tokens in (2048, 8192):
        pages = tokens // PAGE * rows
        allocator = BlockAllocator(pages * 4, page_size=PAGE, num_layers=rows)
        held: list[SeqId] = []

        def fill(allocator: BlockAllocator = allocator, held: list[SeqId] = held, tokens: int = tokens) -> None:
            held.append(allocator.open().seq)
            allocator.append(held, tokens)

        for name, keep in _keeps(tokens, rows).items():
            case = f"{tokens} tokens x {rows} layers, {name}"
            figures = measure(
                partial(_crop_first, allocator, held, keep),
                before=fill,
                after=lambda allocator=allocator, held=held: allocator.close(held.pop()),  # type: ignore[misc]
                repeat=15 if quick else 60,
                pieces=pages,
            )
            yield Row("crop every row", case, "allocator", "ns/page", figures.times(NS), target=50)
            if tokens == 2048:
                yield from _naive_crops(tokens, rows, keep, case)


def _keeps(tokens: int, rows: int) -> dict[str, dict[int, npt.NDArray[np.int64]]]:
    rng = np.random.default_rng(0)
    return {
        "random half": {row: np.sort(rng.permutation(tokens)[: tokens // 2]) for row in range(rows)},
        "newest half (whole pages)": {row: np.arange(tokens // 2, tokens) for row in range(rows)},
        "4 sinks + newest 508": dict.fromkeys(range(rows), np.array([*range(4), *range(tokens - 508, tokens)])),
        "random tenth": {row: np.sort(rng.permutation(tokens)[: tokens // 10]) for row in range(rows)},
    }


def _naive_crops(tokens: int, rows: int, keep: dict[int, npt.NDArray[np.int64]], case: str) -> Iterator[Row]:
    lists = {row: indices.tolist() for row, indices in keep.items()}
    for name, make in NAIVE.items():
        naive = _NaiveSequence(make(tokens // PAGE * rows * 4), tokens, rows)
        times = measure(
            partial(naive.crop, lists), before=naive.fill, after=naive.close, repeat=5, pieces=tokens // PAGE * rows
        )
        yield Row("crop every row", case, name, "ns/page", times.times(NS))


def _crop_first(allocator: BlockAllocator, held: list[SeqId], keep: Keep) -> None:
    allocator.crop(held[0], keep)


def evict(quick: bool) -> Iterator[Row]:
    """Cached blocks forgotten when pages run out: the price must not depend on how many there are."""
    rows, needed = 8, 64
    for cached in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
        allocator = BlockAllocator(cached * rows + 1, page_size=PAGE, num_layers=rows, enable_prefix_caching=True)
        seq = allocator.open().seq
        tokens = np.arange(cached * PAGE)
        allocator.append([seq], len(tokens))
        allocator.commit(seq, tokens)
        allocator.close(seq)
        repeat = min(50, cached // needed - 2)
        times = measure(partial(allocator._core.take, needed * rows), repeat=repeat, pieces=needed)
        case = f"{needed} of {cached} cached blocks of {rows} pages"
        yield Row("evict", case, "allocator", "us/block", times.times(US))
        for name, make in CACHES.items():
            times = measure(partial(make(cached, rows).evict, needed), repeat=repeat, pieces=needed)
            yield Row("evict", case, name, "us/block", times.times(US))


def hashing(quick: bool) -> Iterator[Row]:
    """The hash of a block of 16 tokens, chained."""
    blocks = 1000
    tokens = np.arange(blocks * PAGE, dtype=np.int32)
    root, none = scope_hash(b"", PAGE), tokens[:0]
    repeat = 20 if quick else 100
    times = measure(lambda: list(block_hashes(state_after(root, none), tokens, PAGE)), repeat=repeat, pieces=blocks)
    yield Row("hash a block", f"{PAGE} tokens", "allocator", "us/block", times.times(US), target=0.5)
    rows = tokens.reshape(-1, PAGE).tolist()

    def pickled() -> None:
        digest = b""
        for row in rows:
            digest = sha256(pickle.dumps((digest, tuple(row), None))).digest()

    times = measure(pickled, repeat=repeat, pieces=blocks)
    yield Row("hash a block", f"{PAGE} tokens", "pickle + SHA-256", "us/block", times.times(US))


def long_context() -> Iterator[Row]:
    """Memory of the tables when one of 256 sequences is 128k tokens long."""
    allocator = BlockAllocator(64 * (8192 + 256 * 4), page_size=PAGE, num_layers=64)
    seqs = [allocator.open().seq for _ in range(256)]
    allocator.append(seqs, [131072, *[40] * 255])
    mib = allocator.stats().table_bytes / 2**20
    case = "64 layers, 255 sequences of 40 tokens and one of 131072"
    yield Row("memory of page tables", case, "allocator", "MiB", Figures.exactly(mib))
    yield Row("memory of page tables", case, "dense table", "MiB", Figures.exactly(64 * 256 * 8192 * 4 / 2**20))
