"""What the arithmetic of each operation costs on this machine with nothing around it: bare numpy, bare hashlib.

Each floor reads and writes the same amounts of data in the same patterns as the operation, with the array calls that
were fastest here, and leaves out handles, checks of arguments, plans and counters. No implementation in numpy that
touches each element as often can be faster. The ratio to the allocator's own row is what its book-keeping costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from bench.allocator.timing import Row, measure

__all__ = ["floors"]

MS, US, NS = 1e3, 1e6, 1e9
BARE = "bare numpy"


def floors() -> Iterator[Row]:
    """One row for each operation that has a target which depends on the machine."""
    yield from _pages()
    yield _decode()
    yield _prefill()
    yield from _crop()
    yield _hash()


def _pages() -> Iterator[Row]:
    n, size = 8192, 1_000_000
    refs, stack = np.zeros(size, np.int32), np.arange(size, dtype=np.int32)
    marks = np.arange(n, dtype=np.int32)

    def cycle() -> None:
        at = stack[-n:][::-1].astype(np.intp)
        refs[at] = 1
        owned = (refs.take(at, mode="wrap") == 1).all()
        refs[at] = marks  # no page twice
        once = (refs.take(at, mode="wrap") == marks).all()
        refs[at] = 0
        stack[-n:] = at[::-1]
        assert owned
        assert once

    times = measure(cycle, repeat=200, pieces=n)
    yield Row("take + checked release", f"{n} of {size} pages, fresh", BARE, "ns/page", times.times(NS))
    refs_scalar, stack_scalar = refs.data, stack.data

    def one() -> None:
        for _ in range(256):
            page = stack_scalar[-1]
            refs_scalar[page] = 1
            left = refs_scalar[page] - 1
            refs_scalar[page] = left
            stack_scalar[-1] = page

    times = measure(one, repeat=200, pieces=256)
    yield Row("take + checked release", "1 page, in line", "bare memoryview", "ns/page", times.times(NS))


def _decode() -> Row:
    rng = np.random.default_rng(0)
    num_seqs, rows, size = 256, 64, 16
    handles, lens = list(range(num_seqs)), rng.integers(100, 400, (num_seqs, rows)).astype(np.int32)
    refs, stack = np.zeros(1_000_000, np.int32), np.arange(1_000_000, dtype=np.int32)
    tables, starts = np.zeros((num_seqs * rows, 128), np.int32), np.arange(num_seqs * rows) * 128

    def step() -> None:
        slots = np.asarray(handles, np.int64)
        mine = lens.take(slots, axis=0)
        full = ((mine & np.int32(size - 1)) == 0).ravel().nonzero()[0]
        columns = mine.ravel().take(full) // np.int32(size)
        mine += np.int32(1)
        pages = stack[-len(full) :][::-1].copy()
        refs[pages.astype(np.intp)] = 1
        tables.ravel()[starts.take(full) + columns % 128] = pages
        lens[slots] = mine

    times = measure(step, repeat=200)
    return Row("decode step: append", "64 layers x 256 sequences, diverged", BARE, "ms", times.times(MS))


def _prefill() -> Row:
    rows, columns = 64, 512
    n = rows * columns
    refs, stack = np.zeros(4 * n, np.int32), np.arange(4 * n, dtype=np.int32)
    table = np.zeros((rows, columns), np.int32)

    def fill() -> None:
        pages = stack[-n:][::-1].copy()
        refs[pages.astype(np.intp)] = 1
        table[:] = pages.reshape(rows, columns)

    return Row("prefill", "8192 tokens x 64 layers", BARE, "ns/page", measure(fill, repeat=100, pieces=n).times(NS))


class _Crop:
    """The passes over the kept tokens of `rows` rows of `tokens` tokens, half of which stay."""

    def __init__(self, tokens: int, rows: int) -> None:
        rng = np.random.default_rng(0)
        self.kept = tokens // 2
        self.pages = tokens // 16 * rows
        self.lists = [np.sort(rng.permutation(tokens)[: self.kept]) for _ in range(rows)]
        self.flat, self.index = np.empty(rows * self.kept, np.int64), np.empty(rows * self.kept, np.int64)
        self.shift = rng.permutation(self.pages).astype(np.int32)
        self.targets = np.arange(self.pages // 2, dtype=np.int32)
        self.rows, self.count = np.arange(rows, dtype=np.int32), np.arange(rows * self.kept, dtype=np.int32)

    def check(self) -> npt.NDArray[np.int32]:
        """Reads, checks and stores what is kept."""
        np.concatenate(self.lists, out=self.flat)
        assert np.count_nonzero(self.flat[1:] > self.flat[:-1])
        return self.flat.astype(np.int32)

    def moves(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """And finds source and target of every token."""
        src = self.rows.repeat(self.kept)
        src += self.check()
        np.right_shift(src, np.int32(4), out=self.index)
        src += self.shift.take(self.index, mode="wrap")
        dst = self.targets.repeat(16)
        dst += self.count
        moving = src != dst
        return src[moving], dst[moving]


def _crop() -> Iterator[Row]:
    for tokens in (2048, 8192):
        crop = _Crop(tokens, 64)
        for name, call in (("random half", crop.moves), ("newest half (whole pages)", crop.check)):
            times = measure(call, repeat=60, pieces=crop.pages)
            yield Row("crop every row", f"{tokens} tokens x 64 layers, {name}", BARE, "ns/page", times.times(NS))


def _hash() -> Row:
    raw, blocks = np.arange(16_000, dtype=np.int32).tobytes(), 1000
    parts = [raw[start : start + 64] for start in range(0, len(raw), 64)]
    times = measure(partial(_digests, parts), repeat=100, pieces=blocks)
    return Row("hash a block", "16 tokens", "bare hashlib", "us/block", times.times(US))


def _digests(parts: list[bytes]) -> None:
    state = sha256()
    for part in parts:
        state.update(part)
        state.digest()
