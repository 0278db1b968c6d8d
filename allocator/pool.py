"""`PagePool`: which pages exist, who counts on them, which are free.

Owns page ids, reference counts and the marks of published pages; knows nothing of sequences, tokens or hashes.

A page other than the null page is in exactly one state::

    free    references 0, unpublished, known to the free list
    cached  references 0, published (its block may be evicted)
    active  references > 0

All state is flat numpy arrays (12 bytes a page); no Python object exists per page.
"""

from __future__ import annotations

import numpy as np

from allocator.errors import DoubleFree
from allocator.placement import FreePages, FreeStack, make_free_pages
from allocator.types import Bool, Int32, Int64, Placement

__all__ = ["PagePool"]

_CHUNK = 4096  # temporary arrays of this many pages stay in the processor's cache
_FEW = 16  # up to here scalar access is faster than the fixed cost of array calls
_NO_PAGES = np.empty(0, np.int32)


class PagePool:
    """Page ids 1 .. num_pages - 1 with reference counts; page 0 is the null page and never given out.

    Attributes:
        refs: int32 [num_pages], references to each page: table entries and pins.
        block_of: int32 [num_pages], the published block that a page belongs to, 0 for none.
        num_published: pages that belong to a published block.
        num_cached: pages that are published and unreferenced.
    """

    def __init__(self, num_pages: int, *, placement: Placement = "lifo") -> None:
        self.num_pages = num_pages
        self.placement: Placement = placement
        self.refs: Int32 = np.zeros(num_pages, np.int32)
        self.block_of: Int32 = np.zeros(num_pages, np.int32)
        self.num_published = 0
        self.num_cached = 0
        self._free: FreePages = make_free_pages(placement, num_pages)
        self._stack = self._free if isinstance(self._free, FreeStack) else None
        self._marks: Int32 = np.empty(0, np.int32)
        self._refs_scalar = self.refs.data

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Pages that are referenced."""
        return self.num_pages - 1 - len(self._free) - self.num_cached

    def take(self, n: int, *, after: Int32 | None = None, lengths: Int64 | None = None) -> Int32:
        """Takes `n` free pages, each with one reference. The caller has made sure that they exist. O(n).

        Args:
            n: how many.
            after: int32 [k], hint: the page that each run should follow. Only run-aware placement reads it.
            lengths: int64 [k], pages of each run; sums to `n`.
        """
        pages = self._free.take(n, after, lengths)
        if n <= _FEW:
            for page in pages.tolist():
                self._refs_scalar[page] = 1
            return pages
        for start in range(0, n, _CHUNK):
            self.refs[pages[start : start + _CHUNK].astype(np.intp)] = 1  # intp indexes at twice the speed of int32
        return pages

    def take_one(self) -> int:
        """Scalar path of `take(1)`. O(1)."""
        stack = self._stack
        if stack is None:
            page = int(self._free.take(1, None, None)[0])
        else:  # written out: a call would cost as much as all the rest
            stack.top = top = stack.top - 1
            page = stack.scalar[top]
        self._refs_scalar[page] = 1
        return page

    def release_one(self, page: int) -> None:
        """Scalar path of `release` for one unpublished page. O(1).

        Raises:
            DoubleFree: the page has no reference; nothing changed.
        """
        refs = self._refs_scalar[page] - 1
        if refs < 0:
            raise DoubleFree(page, 0)
        self._refs_scalar[page] = refs
        if refs:
            return
        stack = self._stack
        if stack is None:
            self._free.put(np.array([page], np.int32))
        else:
            stack.scalar[stack.top] = page
            stack.top += 1

    def retain(self, pages: Int32, times: int = 1) -> None:
        """Adds `times` references to each of `pages`, which are distinct. Cached pages become active. O(n)."""
        if self.num_cached:
            self.num_cached -= int(np.count_nonzero(self.refs[pages] == 0))
        self.refs[pages] += np.int32(times)

    def release(self, pages: Int32) -> tuple[int, Int32]:
        """Drops one reference per entry of `pages`; a page may occur several times. O(n), O(n log n) with repeats.

        Returns:
            How many pages became unreferenced, and those of them that are published (they are cached now).

        Raises:
            DoubleFree: an entry has no reference left to drop; nothing changed.
        """
        if len(pages) <= _FEW:
            return self._release_few(pages)
        refs, at = self.refs, pages.astype(np.intp)
        before = refs.take(at, mode="wrap")  # in range anyway; this mode is the fastest
        owned = bool((before == 1).all())
        if not owned and int(before.min()) < 1:
            raise DoubleFree(int(pages[before.argmin()]), 0)
        if self._has_repeats(at, before):
            return self._release_repeated(pages)
        if owned:
            refs[at] = 0
            return self._settle(pages)
        refs[at] = before - 1
        return self._settle(pages[before == 1])

    def _release_few(self, pages: Int32) -> tuple[int, Int32]:
        """`release` with scalars, which are faster for a handful of pages."""
        refs, ids, dead = self._refs_scalar, pages.tolist(), []
        for at, page in enumerate(ids):
            left = refs[page] - 1
            if left < 0:
                for undone in ids[:at]:
                    refs[undone] += 1
                raise DoubleFree(page, refs[page])
            refs[page] = left
            if left == 0:
                dead.append(page)
        if len(dead) == len(ids):
            return self._settle(pages)
        return self._settle(np.array(dead, np.int32)) if dead else (0, _NO_PAGES)

    def _has_repeats(self, at: Int64, before: Int32) -> bool:
        """Whether a page occurs twice. Uses the counts themselves as scratch: n writes, n reads, no sort.

        Leaves the counts scrambled if not (the caller writes them next), as they were if so.
        """
        if len(self._marks) < len(at):
            self._marks = np.arange(2 * len(at), dtype=np.int32)
        marks = self._marks[: len(at)]
        self.refs[at] = marks
        repeated = bool((self.refs.take(at, mode="wrap") != marks).any())
        if repeated:
            self.refs[at] = before  # equal values for equal pages: the order of writes does not matter
        return repeated

    def _release_repeated(self, pages: Int32) -> tuple[int, Int32]:
        distinct, drops = np.unique(pages, return_counts=True)
        left = self.refs[distinct] - drops
        if int(left.min()) < 0:
            worst = int(left.argmin())
            raise DoubleFree(int(distinct[worst]), int(self.refs[distinct[worst]]))
        self.refs[distinct] = left
        return self._settle(distinct[left == 0])

    def _settle(self, dead: Int32) -> tuple[int, Int32]:
        """Files pages that lost their last reference: free, or cached where published."""
        if self.num_published == 0:
            self._free.put(dead)
            return len(dead), _NO_PAGES
        published = self.block_of[dead] != 0
        idle = dead[published]
        self.num_cached += len(idle)
        self._free.put(dead[~published])
        return len(dead), idle

    def publish(self, pages: Int32, blocks: Int32) -> None:
        """Marks referenced, unpublished `pages` as parts of `blocks` (same shape). O(n)."""
        self.block_of[pages] = blocks
        self.num_published += pages.size

    def unpublish(self, pages: Int32) -> int:
        """Takes the mark off published `pages`; cached ones become free. O(n). Returns how many became free."""
        self.block_of[pages] = 0
        self.num_published -= len(pages)
        dead = pages[self.refs[pages] == 0]
        self.num_cached -= len(dead)
        self._free.put(dead)
        return len(dead)

    def frozen(self, pages: Int32) -> Bool:
        """Whether each page must not be written: shared, pinned or published. The one predicate for it. O(n)."""
        at = pages.astype(np.intp)
        frozen: Bool = self.refs.take(at, mode="wrap") > 1
        if self.num_published:
            frozen |= self.block_of.take(at, mode="wrap") != 0
        return frozen

    def free_pages(self) -> Int32:
        """Ids on the free list, next one to be given out last. A copy. O(free)."""
        return self._free.pages()

    def relocate(self, src: Int32, dst: Int32) -> None:
        """Moves counts and marks of pages in use to free ones; the old ones become free. O(num_pages)."""
        for array in (self.refs, self.block_of):
            array[dst], array[src] = array[src], 0
        taken = np.isin(self.free_pages(), dst)
        self._free.load(np.concatenate([self.free_pages()[~taken], src]))

    def load(self, refs: Int32, block_of: Int32, free: Int32) -> None:
        """Replaces counts, marks and free list by those of a snapshot. O(num_pages)."""
        self.refs, self.block_of, self._refs_scalar = refs, block_of, refs.data
        self._free.load(free)

    def resize(self, num_pages: int) -> None:
        """Changes the number of pages. Pages that vanish are free. O(num_pages)."""
        self._free.resize(num_pages)
        kept = min(num_pages, self.num_pages)
        refs, block_of = self.refs, self.block_of
        self.refs, self.block_of = np.zeros(num_pages, np.int32), np.zeros(num_pages, np.int32)
        self.refs[:kept], self.block_of[:kept] = refs[:kept], block_of[:kept]
        self._refs_scalar = self.refs.data
        self.num_pages = num_pages
