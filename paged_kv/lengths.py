"""How long a cache and its layers are, for positions, for masks and for attention that reads no pages.

Owns: the three lengths (seen, live, columns of a mask) and the dense tensors that fit a mask.
Does not know: how tokens get into pages, cropping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from allocator import KVError
from paged_kv import _compat
from paged_kv.batch import PagedBatch
from paged_kv.forward import ATTENTION, Forward, MaskLength, remember_for_mask, uncompiled
from paged_kv.layers import PagedLayer


class NoNewTokens(KVError, ValueError):
    """Raised by a forward over no tokens. Do: give `generate` an input longer than what the cache holds."""


class LengthsCache(DynamicCache):
    """The part of `PagedCache` that answers for lengths."""

    _config: Any
    _batch: PagedBatch | None
    _forward: Forward | None
    #: What a library left to be done to the tokens once the forward was over, if anything.
    _unsettled: Callable[[], None] | None = None

    def _catch_up(self) -> None:
        """Do what was left to be done; it stays, for more may come until the next forward."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        try:
            unsettled()
        finally:
            self._unsettled = unsettled

    @uncompiled
    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen so far (columns, padding included); with a layer, the live tokens of its longest row.

        Positions follow the first, memory the second. They are equal until something is cropped.
        """
        self._catch_up()
        forward, batch = self._forward, self._batch
        if layer_idx is not None:
            if layer_idx >= len(self.layers):
                return 0  # a layer that no forward has reached yet
            layer = self.layers[layer_idx]
            if not isinstance(layer, PagedLayer):
                return int(layer.get_seq_length()) if _compat.is_attention(layer) else self.get_seq_length()
            if batch is not None and layer_idx in batch.cropped:
                return int(batch.live_lens(layer_idx).max(initial=0)) - self._coming(layer_idx)
            if forward is not None and layer_idx in forward.assigned:
                return forward.assigned[layer_idx][0].shape[2]
            return self._seen_by(layer_idx) if self.has_layer(layer_idx) else 0
        if batch is not None:
            return batch.rows.num_columns
        if forward is not None:
            return forward.rows.num_columns
        natives = (layer for layer in self._native_layers() if _compat.is_attention(layer))
        return next((int(layer.get_seq_length()) for layer in natives), 0)

    def _coming(self, layer_idx: int) -> int:
        """Columns that the forward has begun to add, and that a layer has not been given yet."""
        forward = self._forward
        return 0 if forward is None or layer_idx in forward.done else forward.num_columns

    def _seen_by(self, layer_idx: int) -> int:
        """Tokens seen so far, without those of a forward that has not reached the layer yet."""
        if layer_idx >= len(self.layers):
            return 0
        seen = self.get_seq_length()
        is_paged = isinstance(self.layers[layer_idx], PagedLayer)
        return max(0, seen - self._coming(layer_idx)) if is_paged else seen

    @uncompiled
    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the next query stands: tokens seen so far, whatever the layer still holds."""
        return self._seen_by(layer_idx)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the columns that a mask for this layer must cover.

        Args:
            query_length: Number of queries (5.2 passes their positions instead).
            layer_idx: Model layer index.

        Raises:
            NoNewTokens: The forward would compute nothing.
        """
        compiling = torch.compiler.is_compiling()
        length, offset = self._mask_sizes(query_length, layer_idx, compiling)
        # A compiler cannot follow a number that carries an object: there the mask function asks `cache_of_mask`.
        return (length if compiling else MaskLength(length, self)), offset

    @uncompiled
    def _mask_sizes(self, query_length: int | Tensor, layer_idx: int, compiling: bool) -> tuple[int, int]:
        num_queries = _compat.query_length(query_length)
        seen = self._seen_by(layer_idx)
        if num_queries == 0 and seen > 0:
            raise NoNewTokens(
                f"a forward over no tokens: the cache holds {seen}, and `generate` feeds what its input has beyond "
                "them; pass the whole text so far and more, or reset() the cache for another text or batch"
            )
        offset = 0
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if layer is not None and not isinstance(layer, PagedLayer) and _compat.is_attention(layer):
            sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
            return sizes
        if not self._is_paged():
            offset = self._dense_offset(layer_idx, seen)
        if compiling:
            remember_for_mask(self)
        return seen - offset + num_queries, offset

    def _dense_offset(self, layer_idx: int, seen: int) -> int:
        """The first column that stock attention is given of a layer, with `seen` columns before the new ones."""
        batch = self._batch
        if batch is not None and batch.cropped:
            return seen - min(seen, batch.longest_live() - self._coming(layer_idx))
        return self._window_offset(layer_idx, seen)

    def _window_offset(self, layer_idx: int, seen: int) -> int:
        """The first column that a windowed layer still needs when `seen` columns lie before the new ones."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        window = getattr(layer, "sliding_window", None)
        return 0 if window is None else max(0, seen - window + 1)

    def _dense(self, layer_idx: int, num_new: int) -> tuple[Tensor, Tensor]:
        """Dense K and V for stock attention, shaped as the mask of `get_mask_sizes` was.

        Raises:
            KVError: Rows or layers of different lengths, which only the attention "paged_kv" can read.
        """
        batch = self._batch
        assert batch is not None
        if not batch.cropped or (self._is_paged() and layer_idx not in batch.cropped):
            offset = 0 if self._is_paged() else self._dense_offset(layer_idx, batch.rows.num_columns - num_new)
            return batch.in_columns(layer_idx, offset)
        live = batch.live_lens(layer_idx)
        if not self._is_paged() and (live.min() != live.max() or self._needs_mask(layer_idx, num_new)):
            longest = batch.longest_live()
            if live.max() != longest or live.min() != longest:
                raise KVError(
                    f"layer {layer_idx} holds {live.min()} to {live.max()} tokens and the longest layer {longest}: "
                    f"only the attention {ATTENTION!r} reads cropped layers of different lengths; call "
                    f"model.set_attn_implementation({ATTENTION!r})"
                )
        return batch.compact(layer_idx)

    def _needs_mask(self, layer_idx: int, num_new: int) -> bool:
        """Whether stock attention masks keys of a layer: all but SDPA with a single query and nothing to hide."""
        batch = self._batch
        assert batch is not None
        window = self.layers[layer_idx].sliding_window
        name = None if self._config is None else _compat.attention_of(self._config)
        return num_new > 1 or name != "sdpa" or window is not None or not batch.rows.is_dense

    def has_layer(self, layer_idx: int) -> bool:
        """Whether a paged layer holds anything, in pages or while its shape is being learnt."""
        if self._forward is not None and layer_idx in self._forward.stash:
            return True
        return self._batch is not None and layer_idx in self._batch.memory.layers

    def _native_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]

    def _reads_pages(self) -> bool:
        """Whether the attention that runs now reads pages by handle; else it needs dense tensors."""
        return self._is_paged() and not _compat.needs_dense_keys(self._config)

    def _is_paged(self) -> bool:
        """Whether the model's attention is ours."""
        return self._config is not None and _compat.attention_of(self._config) == ATTENTION

    def _paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]
