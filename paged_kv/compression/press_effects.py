"""What a press leaves behind, turned into crops of a paged cache.

Owns: dropping pairs of single heads, finding the newest token that a layer holds, turning keys on.
Does not know: where a press leaves it, hooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paged_kv.cache import PagedCache
from paged_kv.compression.errors import UnsupportedMethod
from paged_kv.compression.rotary import Rotary


def forget(cache: PagedCache, layer: int, masked: Sequence[Tensor], *, in_columns: bool = False) -> int:
    """Drop pairs of single heads; returns the pages freed.

    Args:
        cache: A cache with `lanes="head"`.
        layer: Model layer index.
        masked: Rows, KV heads and indices of the pairs, int64 of one length each.
        in_columns: Whether the indices are columns; by default they are among the live tokens once a layer was cropped.

    Raises:
        UnsupportedMethod: The cache has one page table for all heads of a layer.
    """
    rows, heads, places = (np.asarray(part.cpu()) for part in masked)
    if not len(rows):
        return 0
    spec = cache.memory.place(layer)[0].spec
    columns = cache.live_columns(layer).cpu().numpy()
    if columns.shape[1] == 1 and spec.num_kv_heads > 1:
        raise UnsupportedMethod(
            f"the press drops tokens of single heads in layer {layer}, and the cache has one page table for all heads: "
            'make it with lanes="head"'
        )
    live = (columns >= 0).sum(axis=2)
    by_index = not in_columns and live.min() == live.max() < cache.get_seq_length()
    freed = 0
    for row in np.unique(rows):
        keep = []
        for head in range(columns.shape[1]):
            held = np.arange(live[row, head]) if by_index else columns[row, head, : live[row, head]]
            gone = places[(rows == row) & (heads == head)]
            keep.append(np.flatnonzero(~np.isin(held, gone)))
        freed += cache.crop_heads(layer, keep, row=int(row))
    return freed


def newest_column(cache: PagedCache, layer: int) -> int:
    """The column of a layer's newest live token, -1 if it holds none."""
    columns = cache.live_columns(layer)
    return int(columns.max()) if columns.numel() else -1


def turn_on(cache: PagedCache, rotary: Rotary) -> None:
    """Turn keys that stand at positions from zero on to the newest positions, in layers that were cropped."""
    seen = cache.get_seq_length()
    for layer in cache.memory.layers:
        live = cache.get_seq_length(layer)
        if live < seen:
            keys, values = cache.layers[layer].keys, cache.layers[layer].values
            cache.layers[layer].keys = rotary.turn(keys, torch.full((live,), seen - live))
            cache.layers[layer].values = values
