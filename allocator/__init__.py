"""A paged KV-cache block manager with page tables for every layer and lane, on numpy alone.

It is arithmetic: integers in, frozen plans out. Someone else owns the tensors and applies the plans.

>>> from allocator import BlockAllocator
>>> allocator = BlockAllocator(9, page_size=2, num_layers=2)
>>> seq = allocator.open().seq
>>> allocator.append([seq], 3).allocated
4
>>> allocator.crop(seq, {1: [2]}).freed
1
>>> allocator.block_tables([seq]).tolist()
[[[1, 2]], [[4, 0]]]
"""

from allocator.block_allocator import BlockAllocator
from allocator.deltas import TableDelta
from allocator.errors import (
    AlreadyWritten,
    BrokenInvariant,
    DoubleFree,
    InvalidArgument,
    KVError,
    OutOfPages,
    PagesPinned,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMismatch,
    StaleHandle,
)
from allocator.events import BlockRemoved, BlocksCleared, BlockStored
from allocator.export import CsrTable
from allocator.facades import AsyncAllocator, LockedAllocator
from allocator.hashing import BlockHash
from allocator.plan import EMPTY_PLAN, CopyPages, MoveSlots, Plan
from allocator.pool import PagePool
from allocator.stats import AllocatorStats, Fragmentation
from allocator.types import Admission, LayerKind, Opened, PinId, SeqId, Verdict

__all__ = [
    "EMPTY_PLAN",
    "Admission",
    "AllocatorStats",
    "AlreadyWritten",
    "AsyncAllocator",
    "BlockAllocator",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "BrokenInvariant",
    "CopyPages",
    "CsrTable",
    "DoubleFree",
    "Fragmentation",
    "InvalidArgument",
    "KVError",
    "LayerKind",
    "LockedAllocator",
    "MoveSlots",
    "Opened",
    "OutOfPages",
    "PagePool",
    "PagesPinned",
    "PinId",
    "Plan",
    "SeqId",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotMismatch",
    "StaleHandle",
    "TableDelta",
    "Verdict",
]
