"""The structures that are compared: an object per block in a linked list, and a Python list.

Written here, for measuring only. Both count references and refuse a double free, as ours does. Page tables over them
are lists of pages (objects or numbers), walked by loops; published blocks are kept in order of use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["LinkedCache", "LinkedPool", "ListCache", "ListPool", "naive_crop", "naive_decode_step"]


class Block:
    """One page as an object in a doubly linked list: the structure that vLLM's free queue has."""

    __slots__ = ("digest", "following", "page", "previous", "refs")

    def __init__(self, page: int) -> None:
        self.page, self.refs = page, 0
        self.digest: bytes | None = None
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


class LinkedCache:
    """Published blocks that wait in the free queue, used longest ago first: eviction is taking their pages."""

    def __init__(self, pool: LinkedPool, num_blocks: int, rows: int) -> None:
        self.pool, self.rows = pool, rows
        self.by_hash: dict[bytes, list[Block]] = {}
        pages = pool.take(num_blocks * rows)
        for at in range(num_blocks):
            digest = at.to_bytes(32, "little")
            self.by_hash[digest] = pages[at * rows : (at + 1) * rows]
            for block in self.by_hash[digest]:
                block.digest = digest
        pool.release(pages)

    def evict(self, num_blocks: int) -> None:
        """Takes the pages of the blocks used longest ago and forgets these."""
        for block in self.pool.take(num_blocks * self.rows):
            if block.digest is not None:
                self.by_hash.pop(block.digest, None)
                block.digest = None


class ListCache:
    """Published blocks in a list, used longest ago first."""

    def __init__(self, pool: ListPool, num_blocks: int, rows: int) -> None:
        self.pool, self.rows = pool, rows
        self.order = [at.to_bytes(32, "little") for at in range(num_blocks)]
        self.by_hash = {digest: pool.take(rows) for digest in self.order}

    def evict(self, num_blocks: int) -> None:
        """Forgets the blocks used longest ago and takes their pages."""
        for digest in self.order[:num_blocks]:
            self.pool.release(self.by_hash.pop(digest))
        del self.order[:num_blocks]
        self.pool.take(num_blocks * self.rows)


def naive_decode_step(pool: Any, lens: list[list[int]], tables: list[list[list[Any]]], page_size: int) -> None:
    """One token in every row, with a loop over sequences and layers."""
    for row_lens, rows in zip(lens, tables, strict=True):
        for row, length in enumerate(row_lens):
            if length % page_size == 0:
                rows[row].extend(pool.take(1))
            row_lens[row] = length + 1


def naive_crop(
    pool: Any, tables: list[list[Any]], keep: Mapping[int, list[int]], page_size: int
) -> list[tuple[Any, int, Any, int]]:
    """Keeps some tokens of every row, with a loop over rows and tokens.

    Returns:
        (page, offset) to (page, offset) of every token that moves: none where whole pages at the start go.
    """
    moves: list[tuple[Any, int, Any, int]] = []
    for row, kept in keep.items():
        pages, needed = tables[row], -(-len(kept) // page_size)
        if kept and kept[0] % page_size == 0 and kept[-1] - kept[0] == len(kept) - 1:
            first = kept[0] // page_size
            gone = pages[:first] + pages[first + needed :]
            tables[row] = pages[first : first + needed]
        else:
            moves += [
                (pages[old // page_size], old % page_size, pages[new // page_size], new % page_size)
                for new, old in enumerate(kept)
                if new != old
            ]
            gone = pages[needed:]
            del pages[needed:]
        pool.release(gone)
    return moves
