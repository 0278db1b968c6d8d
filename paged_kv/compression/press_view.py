"""A paged cache as a press sees it: transformers' own layers, or columns where heads hold different tokens.

Owns: dense tensors of all columns for a press that goes on counting columns, and reading a crop off what it assigns.
Does not know: hooks, which press it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_kv.assign import survivors
from paged_kv.cache import PagedCache


class CacheOfPress:
    """A paged cache as a press sees it; layers whose heads differ are shown in columns."""

    def __init__(self, cache: PagedCache, in_columns: set[int], num_new: int) -> None:
        self._cache = cache
        self.layers = [
            LayerInColumns(cache, index, num_new) if index in in_columns else layer
            for index, layer in enumerate(cache.layers)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __len__(self) -> int:
        return len(self.layers)


class LayerInColumns:
    """A layer whose heads hold different tokens, as dense tensors of all columns.

    Where a head has no token, its key attracts no attention from the newest queries, and its value is zero.
    """

    def __init__(self, cache: PagedCache, index: int, num_new: int) -> None:
        self._cache, self._index, self._num_new = cache, index, num_new
        self._new_keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache.layers[self._index], name)

    def get_seq_length(self) -> int:
        """Columns."""
        return self._cache.get_seq_length()

    @property
    def keys(self) -> Tensor:
        """`[rows, kv_heads, columns, width]`."""
        keys, holes = self._spread(self._cache.layers[self._index].keys)
        repelling = self._repelling(keys)
        return torch.where(holes[..., None], repelling[:, :, None], keys)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._new_keys = keys

    @property
    def values(self) -> Tensor:
        """`[rows, kv_heads, columns, width]`; assigning them, after the keys, crops."""
        return self._spread(self._cache.layers[self._index].values)[0]

    @values.setter
    def values(self, values: Tensor) -> None:
        keys, self._new_keys = self._new_keys, None
        assert keys is not None
        old_keys, old_values = self.keys, self.values
        if keys.shape == old_keys.shape and torch.equal(keys, old_keys):
            return
        columns = self._cache.live_columns(self._index)
        for row in range(keys.shape[0]):
            keep = []
            for head in range(keys.shape[1]):
                part = slice(head, head + 1)
                kept = survivors((old_keys[row, part], old_values[row, part]), (keys[row, part], values[row, part]))
                held = columns[row, head][columns[row, head] >= 0].cpu().numpy()
                keep.append(np.flatnonzero(np.isin(held, kept.columns[0])))
            self._cache.crop_heads(self._index, keep, row=row)

    def _spread(self, live: Tensor) -> tuple[Tensor, Tensor]:
        """Live states `[rows, heads, longest, width]` at their columns, and which columns are holes."""
        columns = self._cache.live_columns(self._index)
        num_columns = self._cache.get_seq_length()
        target = torch.where(columns < 0, num_columns, columns)
        dense = live.new_zeros((*live.shape[:2], num_columns + 1, live.shape[3]))
        dense.scatter_(2, target[..., None].expand_as(live), live)
        holes = torch.ones(dense.shape[:3], dtype=torch.bool, device=live.device)
        holes.scatter_(2, target, value=False)
        return dense[:, :, :num_columns], holes[:, :, :num_columns]

    def _repelling(self, keys: Tensor) -> Tensor:
        """Per row and head a key that the newest queries give no weight: `[rows, heads, width]`."""
        from kvpress.attention_patch import search_hyperplane

        repelling = keys.new_zeros((keys.shape[0], keys.shape[1], keys.shape[3]))
        for row in range(keys.shape[0]):
            recent = self._cache.live_tokens(self._index, row).queries
            if recent is not None:
                newest = recent.states[:, -self._num_new :]
                repelling[row] = search_hyperplane(newest.reshape(keys.shape[1], -1, keys.shape[3]))
        return repelling
