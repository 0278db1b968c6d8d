"""The structures that are compared: an object per block in a linked list, and a Python list.

Written here, for measuring only. Both count references and refuse a double free, as ours does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["LinkedPool", "ListPool", "naive_decode_step"]


class Block:
    """One page as an object in a doubly linked list: the structure that vLLM's free queue has."""

    __slots__ = ("following", "page", "previous", "refs")

    def __init__(self, page: int) -> None:
        self.page, self.refs = page, 0
        self.previous: Block | None = None
        self.following: Block | None = None


class LinkedPool:
    """Free pages as a linked list of objects, taken at the head, given back at the tail."""

    def __init__(self, num_pages: int) -> None:
        self.head, self.tail = Block(-1), Block(-1)
        self.blocks = [Block(page) for page in range(num_pages)]
        chain = [self.head, *self.blocks[1:], self.tail]
        for one, other in pairwise(chain):
            one.following, other.previous = other, one

    def take(self, n: int) -> list[Block]:
        """Unlinks the first `n` blocks."""
        taken = []
        block = self.head.following
        for _ in range(n):
            assert block is not None
            block.refs = 1
            taken.append(block)
            block = block.following
        assert block is not None
        self.head.following, block.previous = block, self.head
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Links unreferenced blocks in at the tail."""
        last = self.tail.previous
        for block in blocks:
            if block.refs < 1:
                raise ValueError(f"double free of {block.page}")
            block.refs -= 1
            if block.refs == 0:
                assert last is not None
                last.following, block.previous = block, last
                last = block
        assert last is not None
        last.following, self.tail.previous = self.tail, last


class ListPool:
    """Free pages as a Python list of numbers, reference counts as another."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, 0, -1))
        self.refs = [0] * num_pages

    def take(self, n: int) -> list[int]:
        """Pops `n` pages."""
        taken, self.free[-n:] = self.free[-n:], []
        for page in taken:
            self.refs[page] = 1
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Pushes unreferenced pages."""
        for page in pages:
            if self.refs[page] < 1:
                raise ValueError(f"double free of {page}")
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.free.append(page)


def naive_decode_step(pool: ListPool, lens: list[list[int]], tables: list[list[list[int]]], page_size: int) -> None:
    """One token in every row, with a loop over sequences and layers."""
    for row_lens, rows in zip(lens, tables, strict=True):
        for row, length in enumerate(row_lens):
            if length % page_size == 0:
                rows[row].extend(pool.take(1))
            row_lens[row] = length + 1
