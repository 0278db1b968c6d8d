"""What an allocator should do, written the slow and obvious way: lists of tokens, and a memory with one content a slot.

A content is a number that stands for the K and V of one token in one row. In a sequence that was never cropped it is a
function of scope, row, and all tokens up to this one, so that equal prefixes have equal contents; after a crop every
new token gets a content of its own. Freed slots hold 0.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from allocator import BlockAllocator, LayerKind, Plan


@dataclass
class Config:
    num_pages: int = 24
    page_size: int = 2
    num_layers: int = 2
    lanes: int = 1
    windows: list[int | None] | None = None
    kinds: list[LayerKind] | None = None
    prefix: bool = False
    partial: bool = False
    placement: str = "lifo"
    watermark: int = 0
    long_run: int = 32  # thresholds between paths of the implementation, low ones included
    few: int = 16

    @property
    def num_rows(self) -> int:
        return self.num_layers * self.lanes

    def row_kinds(self) -> list[LayerKind]:
        kinds = self.kinds or [LayerKind.ATTENTION] * self.num_layers
        return [kind for kind in kinds for _ in range(self.lanes)]

    def row_windows(self) -> list[int | None]:
        return [window for window in self.windows or [None] * self.num_layers for _ in range(self.lanes)]

    def build(self, num_pages: int | None = None) -> BlockAllocator:
        return BlockAllocator(
            num_pages or self.num_pages,
            page_size=self.page_size,
            num_layers=self.num_layers,
            lanes=self.lanes,
            windows=self.windows,
            kinds=self.kinds,
            enable_prefix_caching=self.prefix,
            partial_reuse=self.partial,
            record_events=self.prefix,
            placement=self.placement,  # type: ignore[arg-type]
            watermark=self.watermark,
        )


class Contents:
    """Numbers for contents, equal for equal meanings."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, *meaning: Any) -> int:
        return self.numbers.setdefault(meaning, len(self.numbers) + 1)

    def unique(self) -> int:
        return self.of("unique", len(self.numbers))


class Memory:
    """One content a slot. Applies plans as a store must: all sources are read before anything is written."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages = np.zeros((num_pages, page_size), np.int64)

    def apply(self, plan: Plan) -> None:
        slots = self.pages.reshape(-1)
        assert len(np.unique(plan.copies.dst)) == len(plan.copies.dst)
        assert len(np.unique(plan.moves.dst)) == len(plan.moves.dst)
        copied, moved = self.pages[plan.copies.src].copy(), slots[plan.moves.src].copy()
        self.pages[plan.copies.dst] = copied
        slots[plan.moves.dst] = moved

    def resize(self, num_pages: int) -> None:
        old = self.pages
        self.pages = np.zeros((num_pages, old.shape[1]), np.int64)
        kept = min(num_pages, len(old))
        self.pages[:kept] = old[:kept]


@dataclass
class Sequence:
    """One sequence of the model; `rows` hold (position, content) of every live token."""

    scope: bytes
    rows: list[list[tuple[int, int]]]
    tokens: list[int] = field(default_factory=list)
    diverged: bool = False
    committed: int = 0
    reserved: int = 0
    cross_written: bool = False
    appended: bool = False

    def clone(self) -> Sequence:
        twin = copy.deepcopy(self)
        twin.reserved = 0
        return twin


def chain(scope: bytes, tokens: list[int], page_size: int) -> list[bytes]:
    """Hashes of the whole blocks of `tokens`, the scope's first."""
    root = sha256(b"paged-kv blocks 2\0%d\0" % page_size + scope).digest()
    ends = range(page_size, len(tokens) + 1, page_size)
    hashes = [root, *(sha256(root + np.array(tokens[:end], np.int32).tobytes()).digest() for end in ends)]
    return hashes


def tables_of(allocator: BlockAllocator, seq: Any) -> list[list[int]]:
    """Pages of each row, read through the public interface."""
    table, lens = allocator.block_tables([seq])[:, 0], allocator.num_pages_of(seq)
    return [table[row, : lens[row]].tolist() for row in range(len(lens))]


def owners(allocator: BlockAllocator, seqs: list[Any], pins: list[list[int]]) -> Counter[int]:
    """How many tables and pins each page is in."""
    count: Counter[int] = Counter()
    for seq in seqs:
        for pages in tables_of(allocator, seq):
            count.update(pages)
    for pages in pins:
        count.update(pages)
    return count


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
