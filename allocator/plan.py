"""Frozen plans: what a store must do so that its bytes agree with the page tables.

Owns the records, knows nothing of pools or tables. A plan is applied before the next mutating call, and **all
sources are read before any destination is written** (page copies and slot moves together).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["EMPTY_PLAN", "CopyPages", "MoveSlots", "Plan"]


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Whole-page copies.

    Attributes:
        src: int32 [n], page ids to read.
        dst: int32 [n], page ids to write; distinct.
    """

    src: npt.NDArray[np.int32]
    dst: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class MoveSlots:
    """Moves of single tokens.

    Attributes:
        src: int32 [m] (int64 where a pool has more slots than that counts), slots to read.
        dst: [m] alike, slots to write; distinct.
    """

    src: npt.NDArray[np.signedinteger]
    dst: npt.NDArray[np.signedinteger]

    def __len__(self) -> int:
        return len(self.src)


_NO_COPIES = CopyPages(np.empty(0, np.int32), np.empty(0, np.int32))
_NO_MOVES = MoveSlots(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one mutating call decided.

    Attributes:
        copies: pages to copy.
        moves: slots to move.
        allocated: pages that went from available to referenced.
        freed: pages that nobody references any more: free, or cached if they are published.
    """

    copies: CopyPages = _NO_COPIES
    moves: MoveSlots = _NO_MOVES
    allocated: int = 0
    freed: int = 0

    @property
    def moves_bytes(self) -> bool:
        """True if a store has anything to do."""
        return len(self.copies) > 0 or len(self.moves) > 0


EMPTY_PLAN = Plan()
