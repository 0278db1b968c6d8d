"""What happened in the prefix index, for routers that send a request where its prefix is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from allocator.hashing import BlockHash

__all__ = ["BlockRemoved", "BlockStored", "BlocksCleared", "Event"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block was published.

    Attributes:
        block: its hash.
        parent: hash of the block before it, or of the scope.
    """

    block: BlockHash
    parent: BlockHash


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was evicted."""

    block: BlockHash


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Every block was forgotten at once."""


Event: TypeAlias = BlockStored | BlockRemoved | BlocksCleared
