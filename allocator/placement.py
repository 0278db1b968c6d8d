"""Which free page is given out next: a LIFO stack, or runs of neighbours.

Owns the free list alone; knows nothing of references.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from allocator.arena import ragged
from allocator.types import Bool, Int32, Int64, Placement

__all__ = ["FreePages", "FreeRuns", "FreeStack", "make_free_pages"]


class FreePages(Protocol):
    """A set of free pages with an order of giving out."""

    def __len__(self) -> int: ...

    def take(self, n: int, after: Int32 | None, lengths: Int64 | None) -> Int32:
        """Removes `n` pages; see `PagePool.take` for the hints."""

    def put(self, pages: Int32) -> None:
        """Adds distinct pages that are not in the set."""

    def pages(self) -> Int32:
        """All pages, next one last. A copy."""

    def resize(self, num_pages: int) -> None:
        """Adds the new pages, or removes those that vanish."""

    def load(self, pages: Int32) -> None:
        """Replaces the set, in the order of `pages`."""


class FreeStack:
    """Last in, first out: the page freed last is the one most likely still in a processor's cache. O(n) per call.

    Attributes:
        top: how many pages are on the stack.
        scalar: the stack's memory, for access to single entries.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.top = num_pages - 1  # page 1 is given out first; the null page at the end is never reached
        self.scalar = self._stack.data

    def __len__(self) -> int:
        return self.top

    def take(self, n: int, after: Int32 | None = None, lengths: Int64 | None = None) -> Int32:
        """Pops `n` pages; the order is that in which they were pushed together."""
        top = self.top - n
        pages: Int32 = self._stack[top : self.top][::-1].copy()
        self.top = top
        return pages

    def put(self, pages: Int32) -> None:
        """Pushes pages so that popping as many gives them back in the same order: runs stay runs."""
        top = self.top + len(pages)
        self._stack[self.top : top] = pages[::-1]
        self.top = top

    def pages(self) -> Int32:
        """The stack, top last."""
        return self._stack[: self.top].copy()

    def resize(self, num_pages: int) -> None:
        """New pages go under the old ones, so that they are used last."""
        old_total, held = len(self._stack), self._stack[: self.top]
        fresh = np.arange(num_pages - 1, old_total - 1, -1, dtype=np.int32)
        kept = held[held < num_pages]
        stack = np.zeros(num_pages, np.int32)
        self.top = len(fresh) + len(kept)
        stack[: len(fresh)], stack[len(fresh) : self.top] = fresh, kept
        self._stack, self.scalar = stack, stack.data

    def load(self, pages: Int32) -> None:
        """Replaces the stack."""
        self.top = len(pages)
        self._stack[: self.top] = pages


class FreeRuns:
    """Pages next to each other for rows that grow, so that kernels and transfers can read several at once.

    Free pages are flags. A row goes on with the page after its last one while that is free. Where it cannot, it starts
    a chunk of 8 pages of its own (aligned, wholly free) and leaves the rest of the chunk for its next pages; only when
    no chunk is left it takes any free page, lowest address first. O(n) to go on, plus a scan of one byte a page of the
    pool for a call that starts chunks.
    """

    _CHUNK = 8  # flags of one chunk fill one 64-bit word
    _ALL_FREE = np.uint64(0x0101010101010101)

    def __init__(self, num_pages: int) -> None:
        self._free: Bool = np.zeros(num_pages, np.bool_)
        self.load(np.arange(1, num_pages, dtype=np.int32))

    def __len__(self) -> int:
        return self._count

    def take(self, n: int, after: Int32 | None = None, lengths: Int64 | None = None) -> Int32:
        """Removes `n` pages as runs of `lengths` pages (default 1 each), each after page `after` if that is free."""
        lengths = np.ones(n, np.int64) if lengths is None else lengths
        pages = np.zeros(n, np.int32)
        start = lengths.cumsum() - lengths
        done = np.zeros_like(lengths) if after is None else self._go_on(pages, start, lengths, after)
        short = np.flatnonzero(done < lengths)
        if len(short):
            self._start_chunks(pages, start[short] + done[short], lengths[short] - done[short])
        self._count -= n
        return pages

    def _go_on(self, pages: Int32, start: Int64, lengths: Int64, after: Int32) -> Int64:
        """Extends runs page by page while the next one is free; returns how many pages each got."""
        done = np.zeros_like(lengths)
        growing = np.flatnonzero((after > 0) & (lengths > 0))
        following = after[growing] + 1
        while len(growing):
            inside = following < len(self._free)
            growing, following = growing[inside], following[inside]
            following, first = np.unique(following, return_index=True)
            growing = growing[first]
            free = self._free[following]
            growing, following = growing[free], following[free]
            self._free[following] = False
            pages[start[growing] + done[growing]] = following
            done[growing] += 1
            more = done[growing] < lengths[growing]
            growing, following = growing[more], following[more] + 1
        return done

    def _start_chunks(self, pages: Int32, start: Int64, lengths: Int64) -> None:
        """Fills the runs of `lengths` entries at `start` of `pages` from whole chunks, then from whatever is free."""
        size = self._CHUNK
        whole = len(self._free) // size * size
        chunks = np.flatnonzero(self._free[:whole].view(np.uint64) == self._ALL_FREE)
        wanted = (lengths + size - 1) // size
        first = wanted.cumsum() - wanted
        lucky = first + wanted <= len(chunks)
        offsets = ragged(np.zeros_like(lengths[lucky]), lengths[lucky])
        at = np.repeat(first[lucky], lengths[lucky]) + offsets // size
        chosen = chunks[at] * size + offsets % size
        pages[ragged(start[lucky], lengths[lucky])] = chosen
        self._free[chosen] = False
        missing = ragged(start[~lucky], lengths[~lucky])
        if len(missing):
            rest = np.flatnonzero(self._free)[: len(missing)]
            pages[missing] = rest
            self._free[rest] = False

    def put(self, pages: Int32) -> None:
        """Adds pages."""
        self._free[pages] = True
        self._count += len(pages)

    def pages(self) -> Int32:
        """The free pages, ascending."""
        return np.flatnonzero(self._free).astype(np.int32)

    def resize(self, num_pages: int) -> None:
        """Adds or removes pages at the end."""
        old, flags = len(self._free), self._free
        self._free = np.ones(num_pages, np.bool_)
        self._free[:old] = flags[:num_pages]
        self._count = int(self._free.sum())

    def load(self, pages: Int32) -> None:
        """Replaces the set."""
        self._free[:] = False
        self._free[pages] = True
        self._count = len(pages)


def make_free_pages(placement: Placement, num_pages: int) -> FreePages:
    """The free list for a placement policy with all pages but the null page on it."""
    return FreeRuns(num_pages) if placement == "runs" else FreeStack(num_pages)
