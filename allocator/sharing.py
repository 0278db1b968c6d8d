"""Open with a prefix, peek, and commit: how sequences come to read the same pages.

A sequence's *chain* is the hash of its scope followed by the hashes of its blocks that were matched or published; its
hash state, where it has one, stands at the chain's end (otherwise `commit` makes one from the tokens). Only
whole blocks of sequences in lock-step are published, and a match never covers the last token, so that the model always
has something to compute.
"""

from __future__ import annotations

import numpy as np

from allocator.core import Core
from allocator.errors import InvalidArgument, OutOfPages
from allocator.hashing import DIGEST_BYTES, BlockHash, HashState, block_hashes, scope_hash, state_after
from allocator.plan import EMPTY_PLAN, CopyPages, Plan
from allocator.prefix import NewBlock, PrefixIndex
from allocator.types import Int32, Opened

__all__ = ["acquire_prefix", "commit", "forget_blocks_from", "open_prefix", "peek"]


def _match(index: PrefixIndex, tokens: Int32, scope: BlockHash, most: int, page_size: int) -> tuple[list[int], bytes]:
    """Published blocks of the first `most` tokens, and the chain through them."""
    whole = most // page_size * page_size
    blocks, found = index.match(block_hashes(state_after(scope, tokens[:0]), tokens[:whole], page_size))
    return blocks, b"".join([scope, *found])


def _most_cached(tokens: Int32, limit: int | None) -> int:
    most = max(0, len(tokens) - 1)
    return most if limit is None else min(most, limit)


def peek(core: Core, tokens: Int32, scope: bytes, limit: int | None) -> int:
    """Tokens that `open_prefix` would find in whole blocks. Changes nothing. O(hits)."""
    if core.prefix is None:
        return 0
    root = scope_hash(scope, core.page_size)
    blocks, _ = _match(core.prefix, tokens, root, _most_cached(tokens, limit), core.page_size)
    return len(blocks) * core.page_size


def open_prefix(core: Core, tokens: Int32, scope: bytes, limit: int | None) -> Opened:
    """Opens a sequence on the published blocks of its tokens; see `BlockAllocator.open`."""
    tables, index = core.tables, core.prefix
    slot = core.open_slot()
    if index is None:
        return Opened(tables.handle(slot), 0)
    most = _most_cached(tokens, limit)
    blocks, chain = _match(index, tokens, scope_hash(scope, core.page_size), most, core.page_size)
    if core.total_reserved:
        blocks = blocks[: _num_unreserved(core, index, blocks)]
        chain = chain[: (len(blocks) + 1) * DIGEST_BYTES]
    core.chains[slot] = bytearray(chain)
    cached = len(blocks) * core.page_size
    if blocks:
        tables.ensure_width(slot, len(blocks))
        tables.view(slot)[:, : len(blocks)] = index.acquire(blocks).T
        core.counters.table_entries += len(blocks) * core.num_rows
    plan, partial = EMPTY_PLAN, 0
    if index.partial is not None:
        parent = BlockHash(chain[-DIGEST_BYTES:])
        block, partial = index.partial.best(parent, tokens[cached : min(most, cached + core.page_size)])
        if partial and core.available - core.total_reserved >= core.num_rows + int(index.idle[block]):
            plan = _copy_block(core, slot, len(blocks), block)
        else:
            partial = 0
    tables.seen[slot] = cached + partial
    if cached or partial:
        core.log_rewrite(slot)
    core.counters.live_tokens += (cached + partial) * core.num_rows
    core.counters.prefix_queries += len(tokens)
    core.counters.prefix_hits += cached + partial
    return Opened(tables.handle(slot), cached + partial, plan)


def _num_unreserved(core: Core, index: PrefixIndex, blocks: list[int]) -> int:
    """How many leading blocks can be referenced without touching pages that are set aside for others."""
    cost = index.idle[blocks].cumsum()
    return int(np.searchsorted(cost, core.available - core.total_reserved, side="right"))


def _copy_block(core: Core, slot: int, column: int, block: int) -> Plan:
    """Gives a sequence its own copy of a published block. O(num_rows)."""
    assert core.prefix is not None
    tables = core.tables
    source = core.prefix.acquire([block])[0]  # held meanwhile, so that taking pages cannot evict it
    fresh = core.take(core.num_rows)
    tables.ensure_width(slot, column + 1)
    tables.view(slot)[:, column] = fresh
    core.release(source)
    core.counters.table_entries += len(fresh)
    core.counters.copied_pages += len(fresh)
    return Plan(CopyPages(source, fresh), allocated=len(fresh))


def acquire_prefix(core: Core, tokens: Int32, scope: bytes) -> tuple[Int32, int]:
    """References the pages of the published blocks of `tokens`; see `PoolLifecycle.pin_prefix`."""
    index = core.prefix
    if index is None:
        return np.empty(0, np.int32), 0
    blocks, _ = _match(index, tokens, scope_hash(scope, core.page_size), len(tokens), core.page_size)
    idle, unreserved = int(index.idle[blocks].sum()), core.available - core.total_reserved
    if idle > unreserved:
        raise OutOfPages(idle, unreserved, core.usable)
    return index.acquire(blocks).ravel(), len(blocks) * core.page_size


def commit(core: Core, slot: int, tokens: Int32, level: int) -> int:
    """Publishes full blocks; see `BlockAllocator.commit`. O(new full blocks * (page_size + num_rows))."""
    tables, index, size = core.tables, core.prefix, core.page_size
    if index is None or tables.diverged[slot]:
        return 0
    chain = core.chains[slot]
    done, full = len(chain) // DIGEST_BYTES - 1, len(tokens) // size
    if full <= done:
        return 0
    fresh = tokens[done * size : full * size]
    state = core.hash_states[slot] or _state_at(chain, tokens[: done * size])
    hashes = list(block_hashes(state, fresh, size))
    core.hash_states[slot] = state
    columns = tables.view(slot)[:, done:full].T
    unpublished = ~(core.pool.block_of[columns] != 0).any(axis=1)
    new: list[NewBlock] = []
    new_columns: list[int] = []
    for at, digest in enumerate(hashes):
        known = index.by_hash.get(digest)
        if known is not None:
            _deduplicate(core, slot, done + at, known)
        elif unpublished[at]:
            parent = BlockHash(bytes(chain[-DIGEST_BYTES:]))
            new.append(NewBlock(digest, parent, done + at, fresh[at * size : (at + 1) * size]))
            new_columns.append(at)
        chain += digest
    if new:
        index.publish(new, columns[new_columns], level)
    return len(new)


def _state_at(chain: bytearray, tokens: Int32) -> HashState:
    """The hash state at the end of a chain whose blocks hold `tokens`. O(tokens)."""
    state = state_after(bytes(chain[:DIGEST_BYTES]), tokens)
    if len(tokens) and state.digest() != chain[-DIGEST_BYTES:]:
        raise InvalidArgument("tokens", tokens.tolist(), "are not those that the sequence was opened or committed with")
    return state


def _deduplicate(core: Core, slot: int, column: int, block: int) -> None:
    """Lets a sequence read an equal published block instead of its own copy of it. O(num_rows)."""
    assert core.prefix is not None
    mine = core.tables.view(slot)[:, column]
    if (mine == core.prefix.pages[block]).all() or _num_unreserved(core, core.prefix, [block]) == 0:
        return
    own: Int32 = mine.copy()
    mine[:] = core.prefix.acquire([block])[0]
    core.log_rewrite(slot)
    core.release(own)


def forget_blocks_from(core: Core, slot: int, seen: int) -> None:
    """Cuts the chain of a rolled-back sequence to the blocks that are still full. O(1)."""
    chain, kept = core.chains[slot], (seen // core.page_size + 1) * DIGEST_BYTES
    if kept < len(chain):
        del chain[kept:]
        core.hash_states[slot] = None
