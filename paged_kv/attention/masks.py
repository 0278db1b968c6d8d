"""The mask of a forward pass, built for the longest layer and cropped to each layer's live tokens.

Owns: the mask function that transformers calls under the name "paged_kv", and what it returns.
Does not know: backends, how attention is computed.

Transformers builds one mask per kind of layer before any layer runs, in columns. A paged layer holds some of these
columns. Where the mask is causal, perhaps with a window, it is a range of live tokens and never built at all;
otherwise it is built once by transformers' own function and each layer takes the columns of its live tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kv import _compat
from paged_kv.cache import PagedCache
from paged_kv.forward import cache_of_mask, uncompiled


class LazyMask:
    """A mask not built yet: `[rows, 1, queries, columns]` in columns, on demand.

    Attributes:
        cache: The cache whose live tokens it will be cropped to.
        is_range: Whether it is causal, with `window` or without, over exactly the tokens that the cache holds.
        window: Tokens that a query sees, itself included, if `is_range`; None for all.
    """

    def __init__(self, cache: PagedCache, arguments: dict[str, Any], hides: bool) -> None:
        """Keep what transformers' mask function was called with; `hides` says that it hides a token held."""
        self.cache = cache
        self._arguments = arguments
        self._built: Tensor | None = None
        is_known, self.window = _compat.causal_window(arguments["mask_function"])
        self.is_range = is_known and not hides

    def build(self) -> Tensor:
        """The whole mask: bool `[rows, 1, queries, columns]`, True is seen. Built once."""
        if self._built is None:
            self._built = _compat.build_mask(self._arguments)
        return self._built

    def at_live(self, layer: int) -> Tensor:
        """The mask's columns at a layer's live tokens: bool `[rows, lanes, queries, longest]`."""
        return take_columns(self.build(), self.cache.live_columns(layer))

    def for_keys(self, layer: int, num_keys: int) -> Tensor:
        """The mask for dense keys that the cache handed out for a layer: by column, or by live token once cropped."""
        mask = self.build()
        return mask if mask.shape[-1] == num_keys else self.at_live(layer)

    def __getitem__(self, index: Any) -> Tensor:
        """A part of the built mask, for models that cut it themselves."""
        return self.build()[index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the built mask, for models that ask."""
        return self.build().shape


def take_columns(mask: Tensor, columns: Tensor) -> Tensor:
    """A mask's values at each layer's live tokens.

    Args:
        mask: `[rows, 1, queries, columns]`, bool or additive.
        columns: int64 `[rows, lanes, longest]`, -1 where there is no token.

    Returns:
        `[rows, lanes, queries, longest]`; nothing is seen where there is no token.
    """
    lanes, queries = columns.shape[1], mask.shape[2]
    index = columns.clamp_min(0)[:, :, None].expand(-1, -1, queries, -1)
    taken = mask.expand(columns.shape[0], lanes, -1, -1).gather(-1, index)
    absent = (columns < 0)[:, :, None]
    return taken & ~absent if mask.dtype == torch.bool else taken.masked_fill(absent, torch.finfo(mask.dtype).min)


@uncompiled
def paged_mask(**arguments: Any) -> LazyMask | Tensor | None:
    """The mask function registered as "paged_kv".

    Args:
        arguments: What transformers calls a mask function with.

    Returns:
        A `LazyMask` if the call is for a `PagedCache`, else what SDPA would be given.
    """
    cache = cache_of_mask(arguments["kv_length"])
    if cache is None:
        return _compat.sdpa_mask(**arguments)
    hides = cache.note_padding(arguments.get("attention_mask"))
    return LazyMask(cache, arguments, hides)
