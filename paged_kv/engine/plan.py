"""The records at the scheduler's borders: what it asks of the pages, its bounds, and what it decides.

Owns: `Memory`, `Relief`, `Limits`, `StepPlan`.
Does not know: torch, how a plan is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from allocator import Admission, SeqId
from paged_kv.engine.request import Row


class Memory(Protocol):
    """What the scheduler asks of the pages; `paged_kv.memory.PagedMemory` is one."""

    def open(
        self, tokens: Sequence[int] | None = None, *, scope: bytes = b"", limit: int | None = None
    ) -> tuple[SeqId, int]:
        """Open a sequence; returns its id and how many of its tokens are there already."""
        ...

    def can_append(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> Admission:
        """Whether so many new tokens of each sequence fit."""
        ...

    def close(self, seq: SeqId) -> object:
        """Give a sequence's pages back."""
        ...

    def preempt(self, seq: SeqId) -> object:
        """Give a sequence's pages back, to be recomputed."""
        ...


class Relief(Protocol):
    """Who can free pages of running rows without taking them all."""

    def reserve(self, rows: Iterable[Row]) -> int:
        """Pages that it needs free to begin with."""
        ...

    def relieve(self, rows: Sequence[Row]) -> bool:
        """Free pages of one row; False if none can give any."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step.

    Attributes:
        max_num_seqs: Most rows that run at once.
        max_num_batched_tokens: Most tokens that one forward computes.
        page_size: Tokens of a block of the prefix cache.
        watermark: Pages that admission leaves free for the rows that already run.
        prefix_caching: Whether prompts may share pages.
        num_tables: Page tables of a sequence, if all its pages are from one pool; 0 if not.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    page_size: int = 16
    watermark: int = 0
    prefix_caching: bool = True
    num_tables: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.watermark < 0:
            raise ValueError(f"watermark must be at least 0, got {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running row decodes one token a step"
            )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        rows: Rows that take part, those that decode first.
        counts: Tokens that each computes: those after its `num_computed`, then its draft.
        preempted: Rows that gave their pages back and wait again.
        unfit: Rows that the pool cannot hold even alone, with the answer; they are still here, `finish` them.
    """

    rows: tuple[Row, ...] = ()
    counts: tuple[int, ...] = ()
    preempted: tuple[Row, ...] = ()
    unfit: tuple[tuple[Row, Admission], ...] = ()

    @property
    def seqs(self) -> list[SeqId]:
        """The rows' sequences."""
        return [row.seq for row in self.rows if row.seq is not None]
