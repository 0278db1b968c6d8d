"""Identities and small values that cross the allocator's boundary.

Owns no state. A `SeqId` carries a generation, so that a handle used after `close` is an error and never another
sequence's pages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.plan import EMPTY_PLAN, Plan

__all__ = [
    "Admission",
    "Bool",
    "Counts",
    "Int32",
    "Int64",
    "Keep",
    "LayerKind",
    "Opened",
    "PinId",
    "Placement",
    "SeqId",
    "Seqs",
    "Tokens",
    "Verdict",
]

Bool: TypeAlias = npt.NDArray[np.bool_]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

SeqId = NewType("SeqId", int)
"""Handle of an open sequence: ``generation << 32 | index``. Equal calls give equal ids in any two allocators."""

PinId = NewType("PinId", int)
"""Handle of pages that an asynchronous transfer reads."""

Seqs: TypeAlias = Sequence[SeqId] | Int64
Counts: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
Keep: TypeAlias = Mapping[int, Indices] | Mapping[tuple[int, int], Indices] | Mapping[int | tuple[int, int], Indices]
Placement: TypeAlias = Literal["lifo", "runs"]


class LayerKind(enum.Enum):
    """How the tables of a layer grow."""

    ATTENTION = "attention"
    """One slot a token in every lane."""
    CROSS = "cross"
    """Written once, by `write_cross`; `append` leaves it alone."""
    STATE = "state"
    """Recurrent state: one page from the first append on, written by every append."""


class Verdict(enum.Enum):
    """Answer of `can_append`."""

    OK = "ok"
    LATER = "later"
    """Not now: pages that others hold would have to come back first."""
    NEVER = "never"
    """Not even with the whole pool to itself."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether an append would succeed, and by how much it would not.

    Attributes:
        verdict: OK, LATER or NEVER.
        needed: pages that the append would take.
        available: pages it may take now.
        total: usable pages of the pool.
    """

    verdict: Verdict
    needed: int
    available: int
    total: int

    @property
    def shortfall(self) -> int:
        """Pages that are missing now; 0 when the verdict is OK."""
        return max(0, self.needed - self.available)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new sequence, and how many tokens of its prompt are already in its pages.

    Attributes:
        seq: the handle.
        num_cached_tokens: tokens that count as seen; the model need not compute them.
        plan: page copies of a partly reused block (empty unless `partial_reuse` is on).
    """

    seq: SeqId
    num_cached_tokens: int
    plan: Plan = field(default=EMPTY_PLAN)
