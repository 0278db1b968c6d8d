"""`PrefixIndex`: which published block holds which tokens, and which blocks go when pages run short.

Owns blocks (ids 1 .. capacity, 0 is none), their hashes, their pages and the order of eviction. Knows nothing of
sequences. A block has one page in every row. It is *evictable* while at least one of its pages is unreferenced;
evicting forgets the whole block: its unreferenced pages become free, the others simply unpublished. Forgetting is
always legal.

Kept by every method: a block is in the LRU lists exactly if ``idle[block] > 0``, and ``idle`` is the number of its
pages with no reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from allocator.events import BlockRemoved, BlocksCleared, BlockStored, Event
from allocator.hashing import DIGEST_BYTES, BlockHash
from allocator.lru import LruLists
from allocator.partial import PartialBlocks
from allocator.placement import FreeStack
from allocator.pool import PagePool
from allocator.types import Int32

__all__ = ["NUM_PRIORITIES", "NewBlock", "PrefixIndex"]

NUM_PRIORITIES = 4


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block about to be published.

    Attributes:
        digest, parent: its hash, and that of the block before it (or of the scope).
        depth: its place in the chain, 0 first.
        tokens: int32 [page_size].
    """

    digest: BlockHash
    parent: BlockHash
    depth: int
    tokens: Int32


class PrefixIndex:
    """Published blocks of one pool.

    Args:
        pool: the pages.
        num_rows: pages a block.
        partial: index of the tokens of blocks, for reuse of parts of them; None leaves that out.
        record_events: keep events for `drain_events`.

    Attributes:
        pages: int32 [capacity + 1, num_rows], pages of each block.
        idle: int32 [capacity + 1], its unreferenced pages.
        depth: int32 [capacity + 1], its place in its chain, 0 first.
        level: int8 [capacity + 1], its priority.
        hashes: uint8 [capacity + 1, 32].
        by_hash: block of a hash; inverse of `hashes` over the published blocks.
        events: what happened since the last drain, or None.
    """

    def __init__(
        self, pool: PagePool, num_rows: int, *, partial: PartialBlocks | None = None, record_events: bool = False
    ) -> None:
        self.pool, self.num_rows, self.partial = pool, num_rows, partial
        capacity = self.capacity_for(pool.num_pages)
        self.pages = np.zeros((capacity + 1, num_rows), np.int32)
        self.idle = np.zeros(capacity + 1, np.int32)
        self.depth = np.zeros(capacity + 1, np.int32)
        self.level = np.zeros(capacity + 1, np.int8)
        self.hashes = np.zeros((capacity + 1, DIGEST_BYTES), np.uint8)
        self.by_hash: dict[BlockHash, int] = {}
        self.lru = LruLists(capacity, NUM_PRIORITIES)
        self.free_blocks = FreeStack(capacity + 1)
        self.events: list[Event] | None = [] if record_events else None

    def capacity_for(self, num_pages: int) -> int:
        """Blocks that a pool can hold at most."""
        return (num_pages - 1) // self.num_rows

    def match(self, hashes: Iterable[BlockHash]) -> tuple[list[int], list[BlockHash]]:
        """Published blocks of a chain up to the first miss, and their hashes. Changes nothing. O(hits)."""
        blocks: list[int] = []
        found: list[BlockHash] = []
        for digest in hashes:
            block = self.by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
            found.append(digest)
        return blocks, found

    def acquire(self, blocks: list[int]) -> Int32:
        """References every page of distinct `blocks`, which protects them from eviction. O(pages).

        Returns:
            Their pages, int32 [len(blocks), num_rows].
        """
        pages: Int32 = self.pages[blocks]
        self.pool.retain(pages.ravel())
        for block in blocks:
            self.lru.remove(block)
        self.idle[blocks] = 0
        return pages

    def rest(self, pages: Int32) -> None:
        """Learns of published pages that just lost their last reference. O(n log n).

        Their blocks count as used last; of one chain, the deepest goes first, because it is of no use without the rest.
        """
        blocks, counts = np.unique(self.pool.block_of[pages], return_counts=True)
        self.idle[blocks] += counts.astype(np.int32)
        for block in blocks[np.argsort(-self.depth[blocks], kind="stable")].tolist():
            self.lru.remove(block)
            self.lru.push(block, int(self.level[block]))

    def publish(self, new: list[NewBlock], columns: Int32, level: int) -> None:
        """Adds blocks that the index lacks; `columns` (int32 [n, num_rows]) are their referenced pages. O(pages)."""
        blocks = self.free_blocks.take(len(new))
        self.pages[blocks] = columns
        self.depth[blocks], self.level[blocks] = [block.depth for block in new], level
        joined = b"".join(block.digest for block in new)
        self.hashes[blocks] = np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)
        self.pool.publish(columns, blocks[:, None])
        for block, record in zip(blocks.tolist(), new, strict=True):
            self.by_hash[record.digest] = block
            if self.partial is not None:
                self.partial.add(block, record.parent, record.tokens)
            if self.events is not None:
                self.events.append(BlockStored(record.digest, record.parent))

    def evict(self, needed: int) -> int:
        """Forgets the blocks used longest ago until `needed` pages became free. O(evicted). Returns how many blocks."""
        victims = []
        for block in self.lru:
            if needed <= 0:
                break
            needed -= int(self.idle[block])
            victims.append(block)
        self._forget(victims)
        return len(victims)

    def clear(self) -> int:
        """Forgets every block. O(blocks). Returns how many."""
        blocks = list(self.by_hash.values())
        events, self.events = self.events, None
        self._forget(blocks)
        self.events = events
        if events is not None:
            events.append(BlocksCleared())
        return len(blocks)

    def _forget(self, blocks: list[int]) -> None:
        if not blocks:
            return
        for block in blocks:
            digest = self.hash_of(block)
            del self.by_hash[digest]
            self.lru.remove(block)
            if self.partial is not None:
                self.partial.remove(block)
            if self.events is not None:
                self.events.append(BlockRemoved(digest))
        self.idle[blocks] = 0
        self.pool.unpublish(self.pages[blocks].ravel())
        self.pages[blocks] = 0
        self.free_blocks.put(np.array(blocks, np.int32))

    def resize(self) -> None:
        """Follows the pool to a larger size; a smaller one needs nothing. O(blocks)."""
        capacity, old = self.capacity_for(self.pool.num_pages), len(self.idle) - 1
        if capacity <= old:
            return
        for name in ("pages", "idle", "depth", "level", "hashes"):
            array = getattr(self, name)
            grown = np.zeros((capacity + 1, *array.shape[1:]), array.dtype)
            grown[: old + 1] = array
            setattr(self, name, grown)
        order = list(self.lru)
        self.lru = LruLists(capacity, NUM_PRIORITIES)
        for block in order:
            self.lru.push(block, int(self.level[block]))
        self.free_blocks.resize(capacity + 1)
        if self.partial is not None:
            self.partial.resize(capacity)

    def load(self, before: Int32, after: Int32, free_blocks: Int32, blocks: list[int]) -> None:
        """Rebuilds what depends on the arrays after they were replaced by those of a snapshot. O(blocks)."""
        self.lru = LruLists(len(self.idle) - 1, NUM_PRIORITIES)
        self.lru.load(before, after)
        self.free_blocks = FreeStack(len(self.idle))
        self.free_blocks.load(free_blocks)
        self.by_hash = {self.hash_of(block): block for block in blocks}

    def hash_of(self, block: int) -> BlockHash:
        """The hash of a published block."""
        return BlockHash(self.hashes[block].tobytes())
