"""One layer of a `PagedCache`, as transformers sees it.

Owns: the layer half of transformers' cache contract: readable and settable `keys` and `values`, lengths, flags.
Does not know: pages; every question goes to the cache, because all layers of a sequence move together.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PagedLayer(DynamicLayer):
    """A layer whose keys and values lie in the pages of its cache."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: Any, index: int, window: int | None = None) -> None:
        """Stand for layer `index` of the `PagedCache` `cache`; `window` is its sliding window in tokens."""
        self._cache = cache
        self._index = index
        self.is_sliding = window is not None
        self.sliding_window = window
        self.record_past = False
        if window is not None:
            self._sliding_window_tensor = torch.tensor(window, dtype=torch.long)
        super().__init__()

    # `CacheLayerMixin.__init__` assigns None to all three; dense tensors are made on demand.

    @property
    def keys(self) -> Tensor | None:
        """Dense keys `[rows, kv_heads, tokens, key_width]`: a private copy, None before the first update."""
        dense = self._cache.dense_layer(self._index)
        return None if dense is None else dense[0]

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        if keys is not None:
            self._cache.assign_layer(self._index, keys=keys)

    @property
    def values(self) -> Tensor | None:
        """Dense values `[rows, kv_heads, tokens, value_width]`: a private copy, None before the first update."""
        dense = self._cache.dense_layer(self._index)
        return None if dense is None else dense[1]

    @values.setter
    def values(self, values: Tensor | None) -> None:
        if values is not None:
            self._cache.assign_layer(self._index, values=values)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has been updated since it was made or reset."""
        return self._cache.has_layer(self._index)

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        pass

    @property
    def device(self) -> torch.device:
        """Where the layer's pages are."""
        return self._cache.memory.place(self._index)[0].spec.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages are taken on the first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to this layer; see `PagedCache.update`."""
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        """Live tokens of the layer (columns, while nothing was cropped)."""
        return self._cache.get_seq_length(self._index)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask's columns for this layer."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_max_length(self) -> int:
        """The window, or -1: no maximum."""
        return self.sliding_window or -1

    def get_max_cache_shape(self) -> int:
        """The window, or -1: no maximum (name until 5.2)."""
        return self.get_max_length()

    def activate_past_recording(self) -> None:
        """Keep the tokens behind the window until the next `crop`, so that drafts can be rolled back."""
        self.record_past = True

    def reset(self) -> None:
        """Drop all tokens of the cache: its layers are reset together."""
        self._cache.reset()

    def crop(self, *args: Any) -> NoReturn:
        """Not for one layer: see `PagedCache.crop` (rollback) and `PagedCache.crop_layer`."""
        raise NotImplementedError("all layers of a PagedCache move together: call this method on the cache")

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop

    def offload(self) -> None:
        """Not supported: pages stay on their device."""
        raise NotImplementedError("a PagedCache does not offload its layers")

    prefetch = offload
