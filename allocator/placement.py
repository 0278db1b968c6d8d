"""Which free page is given out next: a LIFO stack, or runs of neighbours.

Owns the free list alone; knows nothing of references.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from allocator.types import Int32, Int64, Placement

__all__ = ["FreePages", "FreeStack", "make_free_pages"]


class FreePages(Protocol):
    """A set of free pages with an order of giving out."""

    def __len__(self) -> int: ...

    def take(self, n: int, after: Int32 | None, lengths: Int64 | None) -> Int32:
        """Removes `n` pages; see `PagePool.take` for the hints."""

    def take_one(self) -> int:
        """Removes one page."""

    def put(self, pages: Int32) -> None:
        """Adds distinct pages that are not in the set."""

    def put_one(self, page: int) -> None:
        """Adds one page."""

    def pages(self) -> Int32:
        """All pages, next one last. A copy."""

    def resize(self, num_pages: int) -> None:
        """Adds the new pages, or removes those that vanish."""


class FreeStack:
    """Last in, first out: the page freed last is the one most likely still in a processor's cache. O(n) per call."""

    def __init__(self, num_pages: int) -> None:
        self._stack: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages - 1  # page 1 is given out first; the null page at the end is never reached
        self._scalar = self._stack.data

    def __len__(self) -> int:
        return self._top

    def take(self, n: int, after: Int32 | None = None, lengths: Int64 | None = None) -> Int32:
        """Pops `n` pages; the order is that in which they were pushed together."""
        top = self._top - n
        pages: Int32 = self._stack[top : self._top][::-1].copy()
        self._top = top
        return pages

    def take_one(self) -> int:
        """Pops one page."""
        self._top -= 1
        return self._scalar[self._top]

    def put(self, pages: Int32) -> None:
        """Pushes pages so that popping as many gives them back in the same order: runs stay runs."""
        top = self._top + len(pages)
        self._stack[self._top : top] = pages[::-1]
        self._top = top

    def put_one(self, page: int) -> None:
        """Pushes one page."""
        self._scalar[self._top] = page
        self._top += 1

    def pages(self) -> Int32:
        """The stack, top last."""
        return self._stack[: self._top].copy()

    def resize(self, num_pages: int) -> None:
        """New pages go under the old ones, so that they are used last."""
        old_total, held = len(self._stack), self._stack[: self._top]
        fresh = np.arange(num_pages - 1, old_total - 1, -1, dtype=np.int32)
        kept = held[held < num_pages]
        stack = np.zeros(num_pages, np.int32)
        self._top = len(fresh) + len(kept)
        stack[: len(fresh)], stack[len(fresh) : self._top] = fresh, kept
        self._stack, self._scalar = stack, stack.data


def make_free_pages(placement: Placement, num_pages: int) -> FreePages:
    """The free list for a placement policy with all pages but the null page on it."""
    if placement == "runs":
        raise NotImplementedError
    return FreeStack(num_pages)
