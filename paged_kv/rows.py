"""Which column of a padded batch holds which token of which sequence.

Transformers counts columns: a rectangle `[rows, columns]` in which short rows are padded. Pages hold tokens only.
`RowMap` translates: position `p` of a row is its `p`-th real token, and stands in column `columns(row)[p]`.

Owns: padding, packing and unpacking of padded tensors.
Does not know: pages, layers, the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class RowMap:
    """Real tokens of each row of a batch, among the columns seen so far. Without padding it costs nothing."""

    def __init__(self, num_rows: int) -> None:
        """Start with `num_rows` rows of no columns."""
        self.num_rows = num_rows
        self.num_columns = 0
        self._real: np.ndarray | None = None  # bool [rows, columns]; None while every column is real in every row

    @property
    def is_dense(self) -> bool:
        """Whether no row has padding, so that columns and positions are the same numbers."""
        return self._real is None

    def append(self, num_columns: int, real: np.ndarray | None = None) -> None:
        """Add columns; `real` is bool `[rows, num_columns]`, None where all are real."""
        if real is not None and real.all():
            real = None
        if self._real is not None or real is not None:
            old = self.real()
            new = np.ones((self.num_rows, num_columns), bool) if real is None else real
            self._real = np.concatenate([old, new], axis=1)
        self.num_columns += num_columns

    def drop(self, num_columns: int) -> list[int]:
        """Remove the newest columns; returns how many real tokens each row loses."""
        counts = self.counts(num_columns)
        self.num_columns -= num_columns
        if self._real is not None:
            self._real = self._real[:, : self.num_columns]
            if self._real.all():
                self._real = None
        return counts

    def select(self, rows: Sequence[int]) -> RowMap:
        """The map of a batch made of some of these rows, repeats allowed."""
        chosen = RowMap(len(rows))
        chosen.num_columns = self.num_columns
        if self._real is not None:
            chosen._real = self._real[list(rows)]
            if chosen._real.all():
                chosen._real = None
        return chosen

    def real(self) -> np.ndarray:
        """Bool `[rows, columns]`: which columns hold a token."""
        if self._real is None:
            return np.ones((self.num_rows, self.num_columns), bool)
        return self._real

    def counts(self, newest: int) -> list[int]:
        """Real tokens of each row among the newest columns."""
        if self._real is None:
            return [newest] * self.num_rows
        counted: list[int] = self._real[:, self.num_columns - newest :].sum(axis=1).tolist()
        return counted

    def columns(self, row: int) -> np.ndarray:
        """int64 `[tokens]`: the column of each position of a row."""
        if self._real is None:
            return np.arange(self.num_columns)
        return np.flatnonzero(self._real[row])

    def hides(self, mask: Tensor) -> bool:
        """Whether a 2-D attention mask `[rows, columns]` hides a token that the rows hold."""
        shown = mask[:, : self.num_columns].cpu().numpy().astype(bool)
        return bool((self.real()[:, : shown.shape[1]] & ~shown).any())

    # -- padded tensors ----------------------------------------------------------------------------------------------

    def packing(self, newest: int, device: torch.device) -> Tensor | None:
        """Flat indices of the real tokens among the newest columns of a `[rows, newest]` rectangle, None for all."""
        if self._real is None:
            return None
        recent = self._real[:, self.num_columns - newest :]
        return None if recent.all() else torch.from_numpy(np.flatnonzero(recent)).to(device)


def pack(states: Tensor, index: Tensor | None) -> Tensor:
    """`[rows, heads, columns, width]` as packed tokens `[tokens, heads, width]`, padding left out."""
    flat = states.transpose(1, 2).flatten(0, 1)
    return flat if index is None else flat[index]


def unpack(packed: Tensor, index: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Packed tokens `[tokens, heads, width]` as a rectangle `[rows, columns, heads, width]`, zeros at padding."""
    if index is None:
        return packed.view(*shape, *packed.shape[1:])
    flat = packed.new_zeros((shape[0] * shape[1], *packed.shape[1:]))
    flat[index] = packed
    return flat.view(*shape, *packed.shape[1:])
