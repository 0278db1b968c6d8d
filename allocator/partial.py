"""`PartialBlocks`: finds a published block that starts with given tokens, so that a part of it can be copied.

Owns the tokens of published blocks and, for each chain position, the blocks that follow it. Optional: without it only
whole blocks are reused.
"""

from __future__ import annotations

import numpy as np

from allocator.hashing import BlockHash
from allocator.types import Int32

__all__ = ["PartialBlocks"]

_MOST_TRIED = 16


class PartialBlocks:
    """Children of each chain position as a doubly linked list, newest first.

    Args:
        capacity: highest block id.
        page_size: tokens a block.
    """

    def __init__(self, capacity: int, page_size: int) -> None:
        self.tokens = np.zeros((capacity + 1, page_size), np.int32)
        self.newer = np.zeros(capacity + 1, np.int32)
        self.older = np.zeros(capacity + 1, np.int32)
        self.newest: dict[BlockHash, int] = {}
        self.parents: dict[int, BlockHash] = {}

    def resize(self, capacity: int) -> None:
        """Makes room for more blocks. O(blocks)."""
        for name in ("tokens", "newer", "older"):
            array = getattr(self, name)
            grown = np.zeros((capacity + 1, *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)

    def add(self, block: int, parent: BlockHash, tokens: Int32) -> None:
        """Files a block under its parent. O(page_size)."""
        head = self.newest.get(parent, 0)
        self.tokens[block] = tokens
        self.newer[block], self.older[block] = 0, head
        if head:
            self.newer[head] = block
        self.newest[parent] = block
        self.parents[block] = parent

    def load(self, parents: dict[int, BlockHash]) -> None:
        """Rebuilds the heads of the lists after the arrays were replaced by those of a snapshot. O(blocks)."""
        self.parents = parents
        self.newest = {parent: block for block, parent in parents.items() if not self.newer[block]}

    def remove(self, block: int) -> None:
        """Forgets a block. O(1)."""
        parent = self.parents.pop(block)
        newer, older = int(self.newer[block]), int(self.older[block])
        if older:
            self.newer[older] = newer
        if newer:
            self.older[newer] = older
        elif older:
            self.newest[parent] = older
        else:
            del self.newest[parent]

    def best(self, parent: BlockHash, tokens: Int32) -> tuple[int, int]:
        """The block after `parent` that shares most first tokens, and how many; (0, 0) if none does.

        Tries the newest 16 only, so that a popular parent costs no more than others. O(16 * page_size).
        """
        best, most = 0, 0
        block = self.newest.get(parent, 0)
        for _ in range(_MOST_TRIED):
            if not block:
                break
            differs = self.tokens[block, : len(tokens)] != tokens
            same = int(differs.argmax()) if differs.any() else len(tokens)
            if same > most:
                best, most = block, same
            block = int(self.older[block])
        return best, most
