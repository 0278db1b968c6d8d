"""Chained block hashes.

The hash of a block is SHA-256 over the hash of the block before it and the raw int32 bytes of its tokens; the chain
starts at a hash of the scope (model, adapter, tenant salt), so that equal tokens of different scopes never meet. Bytes
are hashed as they are, never pickled, and a cryptographic hash leaves a tenant no way to make another's block match.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import NewType

from allocator.types import Int32

__all__ = ["DIGEST_BYTES", "BlockHash", "block_hashes", "scope_hash"]

BlockHash = NewType("BlockHash", bytes)
"""Identity of a block: its tokens, all tokens before them, and the scope. 32 bytes."""

DIGEST_BYTES = 32


def scope_hash(scope: bytes, page_size: int) -> BlockHash:
    """Where the chain of a scope starts."""
    return BlockHash(sha256(b"paged-kv block chain 1\0%d\0" % page_size + scope).digest())


def block_hashes(parent: BlockHash, tokens: Int32, page_size: int) -> Iterator[BlockHash]:
    """Hashes of the whole blocks of `tokens` that follow `parent`, one by one. O(page_size) each."""
    raw = tokens.tobytes()
    step = page_size * tokens.itemsize
    digest: bytes = parent
    for start in range(0, len(raw) - step + 1, step):
        digest = sha256(digest + raw[start : start + step]).digest()
        yield BlockHash(digest)
