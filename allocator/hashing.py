"""Block hashes.

The hash of a block is SHA-256 over a hash of the scope (model, adapter, tenant salt) and the raw int32 bytes of all
tokens up to the block's end. So equal blocks after unequal ones never meet, nor do equal tokens of different scopes.
One running state serves all blocks of a sequence: it takes in the bytes of each block once and is asked for its digest
in between, which costs half of what a new hash for every block costs. Bytes are hashed as they are, never pickled, and
a cryptographic hash leaves a tenant no way to make another's block match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, NewType, TypeAlias, cast

from allocator.types import Int32

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["DIGEST_BYTES", "BlockHash", "HashState", "block_hashes", "scope_hash", "state_after"]

BlockHash = NewType("BlockHash", bytes)
"""Identity of a block: its tokens, all tokens before them, and the scope. 32 bytes."""

HashState: TypeAlias = "_Hash"
"""SHA-256 under way, at the end of some block."""

DIGEST_BYTES = 32


def scope_hash(scope: bytes, page_size: int) -> BlockHash:
    """Where the hashes of a scope start."""
    return BlockHash(sha256(b"paged-kv blocks 2\0%d\0" % page_size + scope).digest())


def state_after(root: bytes, tokens: Int32) -> HashState:
    """The state behind whole blocks of `tokens` of the scope that `root` is the hash of. O(tokens)."""
    state = sha256(root)
    state.update(tokens.data)
    return state


def block_hashes(state: HashState, tokens: Int32, page_size: int) -> Iterator[BlockHash]:
    """Hashes of the whole blocks of `tokens`, one by one; takes `state` forward with each. O(page_size) each."""
    raw, step = tokens.tobytes(), page_size * tokens.itemsize
    update, digest = state.update, cast("Callable[[], BlockHash]", state.digest)
    for start in range(0, len(raw) - step + 1, step):
        update(raw[start : start + step])
        yield digest()
