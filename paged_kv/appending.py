"""How the new tokens of a forward pass get into pages.

Owns: a cache's construction, the life of a forward, learning the layers' shapes from the first one.
Does not know: what is done with the tokens afterwards: see `PagedCache`.

A forward goes through its layers in order. The first one reserves slots for all of them, so a pool that is too small
shows before any byte is written. Where shapes are not known beforehand, the first forward's dense K and V are kept
aside and turned into pages when the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from allocator import KVError
from paged_kv import _compat
from paged_kv.batch import BatchSizeChanged, PagedBatch
from paged_kv.forward import BACKENDS, HANDLE, Forward, LayerHandle, uncompiled, without_graph
from paged_kv.group import Budget
from paged_kv.layers import PagedLayer
from paged_kv.lengths import LengthsCache
from paged_kv.memory import PagedMemory
from paged_kv.rows import RowMap, pack
from paged_kv.spec import KVSpec, Lanes, learn_specs, shape_of

#: Part of a growing pool that stays free when it shrinks; it shrinks once twice as much is free.
TRIM_SLACK = 0.01


class SequenceFedAgain(KVError, ValueError):
    """Raised when a forward brings the tokens that the cache holds once more. Do: use_cache=True, or no cache."""


class AppendingCache(LengthsCache):
    """The half of `PagedCache` that appends: construction, forwards, learning the shapes of layers."""

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: Any = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        *,
        page_size: int = 16,
        lanes: Lanes = "layer",
        backend: str = "auto",
        **budget: Any,
    ) -> None:
        """Make an empty cache; shapes are learnt from the first forward unless `for_model` gave them.

        Args:
            ddp_cache_data: Per layer (keys, values) to copy in, as `DynamicCache` takes it.
            config: The model's config: gives the kinds of layers and their windows.
            offloading: Not supported, must be False.
            offload_only_non_sliding: Only there because `DynamicCache` has it.
            page_size: Tokens of a page.
            lanes: "layer" for a page table per layer, "head" for one per KV head (crop heads apart).
            backend: Attention backend by name, "auto" for the best that works here; see `paged-kv doctor`.
            budget: One of `num_pages`, `kv_cache_bytes`, `memory_fraction`; see `Budget.of`.

        Raises:
            ValueError: Offloading was asked for, or an argument is out of range.
        """
        if hasattr(ddp_cache_data, "get_text_config"):
            raise TypeError("PagedCache takes a model's config by name: PagedCache(config=model.config)")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if offloading:
            raise ValueError("offloading=True is not supported: pages stay on their device; give a smaller budget")
        if unknown := set(budget) - {"num_pages", "kv_cache_bytes", "memory_fraction"}:
            raise TypeError(f"PagedCache got unknown arguments {sorted(unknown)}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        if lanes not in ("layer", "head"):
            raise ValueError(f'lanes must be "layer" or "head", got {lanes!r}')
        self._config = None if config is None else _compat.text_config(config)
        self._page_size, self._lanes, self._backend, self._budget = page_size, lanes, backend, budget
        self._specs: tuple[KVSpec, ...] | None = None
        self._memory: PagedMemory | None = None
        self._batch: PagedBatch | None = None
        self._forward: Forward | None = None
        self._padding: np.ndarray | None = None
        self._assigned: dict[str, Any] = {}
        natives = [] if config is None else _compat.native_layers(config)
        Cache.__init__(self, layers=[self._layer_like(index, native) for index, native in enumerate(natives)])
        self._copy_in(list(ddp_cache_data or ()), config is None)

    def _copy_in(self, data: list[tuple[Tensor | None, ...]], adds_layers: bool) -> None:
        """Take over another cache's layers: keys, values and perhaps a window each."""
        longest = max((keys.shape[2] for keys, *_ in data if keys is not None), default=0)
        for index, (keys, values, *window) in enumerate(data):
            if adds_layers:
                self.layers.append(PagedLayer(self, index, _compat.window_of(window)))
            if keys is None or values is None:
                continue
            if getattr(self.layers[index], "sliding_window", None) is not None:
                # A window holds the newest tokens only; what slid out of it is never read.
                gone = (0, 0, longest - keys.shape[2], 0)
                keys, values = pad(keys, gone), pad(values, gone)
            self.update(keys, values, index)

    def _layer_like(self, index: int, native: Any) -> Any:
        if not _compat.is_pageable(native):
            return native
        return PagedLayer(self, index, getattr(native, "sliding_window", None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._catch_up()
        # The copy serves the same model: it must see the attention that the model's config names now, not then.
        memo[id(self._config)] = self._config
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            setattr(twin, name, None if name == "_unsettled" else deepcopy(value, memo))
        return twin

    # -- a forward pass ----------------------------------------------------------------------------------------------

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens to a layer and return what its attention should read.

        Args:
            key_states: `[rows, kv_heads, columns, key_width]`.
            value_states: `[rows, kv_heads, columns, value_width]`.
            layer_idx: Model layer index.
            args: What some releases pass besides; not used.
            kwargs: As `args`.

        Returns:
            With "paged_kv" attention the new tokens alone, with a handle to the pages; else dense K and V.

        Raises:
            OutOfPages: The first layer of a forward reserves for all of them, so nothing was written yet.
            BatchSizeChanged: Other rows than the cache holds.
            SequenceFedAgain: The tokens that the cache holds are fed once more, as with `use_cache=False`.
            KVError: Stock attention cannot read layers of these lengths. After any of these the cache is as before.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(PagedLayer(self, len(self.layers)))
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        forward = self._forward
        if forward is None or layer_idx in forward.done:
            self._require_new_tokens(key_states, args, kwargs)
            forward = self._begin(key_states)
        if key_states.shape[2] != forward.num_columns:
            return self._set_apart(layer_idx).update(key_states, value_states)
        try:
            return self._append(forward, layer_idx, key_states, value_states)
        except (KVError, ValueError):
            self._abandon(forward)
            raise

    def _append(self, forward: Forward, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's new tokens into the slots that the forward has reserved for them."""
        if forward.step is not None and not self._fits(layer_idx, keys, values):
            self._unlearn(forward, layer_idx, keys, values)
        forward.done.add(layer_idx)
        if forward.step is None:
            forward.stash[layer_idx] = (keys, values)
            return keys, values
        forward.step.write(layer_idx, pack(keys.detach(), forward.packing), pack(values.detach(), forward.packing))
        if not self._reads_pages():
            dense = self._dense(layer_idx, forward.num_columns)
            return without_graph(dense[0], keys), without_graph(dense[1], values)
        assert self._batch is not None
        setattr(keys, HANDLE, LayerHandle(layer_idx, forward, self._batch))
        return keys, values

    def _require_new_tokens(self, keys: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a forward that brings again what the cache holds, before anything is reserved for it.

        Raises:
            SequenceFedAgain: It was told not to use the cache, or counts its positions from 0.
        """
        seen = self.get_seq_length()
        if _compat.restarts(args, kwargs, keys.shape[2], seen):
            raise SequenceFedAgain(
                f"a cache that holds {seen} tokens was given a sequence of {keys.shape[2]} from its beginning, as "
                "generating with use_cache=False does: the tokens would be appended again; pass use_cache=True, or "
                "reset() the cache"
            )

    def _abandon(self, forward: Forward) -> None:
        """Take back what a forward that failed has reserved, so that the cache is as it was before it."""
        batch, self._forward = self._batch, None
        if batch is None or forward.step is None:
            return
        batch.drop(forward.num_columns)
        if batch.rows.num_columns == 0:
            batch.close()
            self._batch = None

    def _begin(self, key_states: Tensor) -> Forward:
        """Start a forward: settle the last one, then reserve slots for the new columns in all layers."""
        num_rows, _, num_columns, _ = key_states.shape
        self._settle()
        padding, self._padding = self._padding, None
        step, rows = None, RowMap(num_rows)
        if self._batch is None and self._specs is None:
            rows.append(num_columns, padding)
        else:
            fresh = self._batch is None
            batch = PagedBatch(self._pages(), num_rows) if self._batch is None else self._batch
            if num_rows != len(batch.seqs):
                raise BatchSizeChanged(len(batch.seqs), num_rows)
            if not fresh and any(layer.sliding_window and not layer.record_past for layer in self._paged_layers()):
                batch.memory.slide(batch.seqs)
            if not fresh:
                self._trim(batch)
            try:
                step = batch.append(num_columns, padding)
            except KVError:
                if fresh:
                    batch.close()
                raise
            self._batch, rows = batch, batch.rows
        packing = rows.packing(num_columns, key_states.device)
        self._forward = Forward(rows, num_columns, step, packing, self._backend)
        return self._forward

    def _trim(self, batch: PagedBatch) -> None:
        """Let a growing pool shrink if many of its pages are free, unless a forward still uses the tables."""
        if self._forward is None or len(self._forward.done) >= len(batch.memory.layers):
            batch.memory.trim(slack=TRIM_SLACK)

    def _pages(self) -> PagedMemory:
        """The memory of the known specs, built when first needed."""
        if self._memory is None:
            assert self._specs is not None
            self._memory = PagedMemory(self._specs, Budget.of(self._specs, **self._budget))
        return self._memory

    def _settle(self) -> None:
        """Do what was left to be done, and turn the stash of a learning forward into pages: shapes are known now."""
        self._catch_up()
        forward = self._forward
        if forward is None or forward.step is not None or not forward.stash:
            return
        windows = {index: getattr(self.layers[index], "sliding_window", None) for index in forward.stash}
        self._specs = learn_specs(forward.stash, windows, page_size=self._page_size, lanes=self._lanes)
        self._memory = None
        batch = PagedBatch(self._pages(), forward.rows.num_rows)
        real = None if forward.rows.is_dense else forward.rows.real()
        step = batch.append(forward.num_columns, real)
        for index, states in forward.stash.items():
            keys, values = (pack(part.detach(), forward.packing) for part in states)
            step.write(index, keys, values)
        for index, (keys, values) in forward.assigned.items():
            batch.assign(index, keys, values, self._window_offset(index, forward.num_columns))
        self._batch, self._forward = batch, None

    def _fits(self, layer_idx: int, keys: Tensor, values: Tensor) -> bool:
        """Whether the pages of a layer have the shape, type and place of what it is given."""
        memory = self._pages()
        if layer_idx not in memory.layers:
            return False
        spec = memory.place(layer_idx)[0].spec
        return shape_of(keys, values) == (spec.num_kv_heads, spec.key_width, spec.value_width, spec.dtype, spec.device)

    def _unlearn(self, forward: Forward, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Fall back to learning: the config promised another shape than the first forward brings.

        Raises:
            ValueError: Not the first forward any more; the pages stay as they were.
        """
        batch = self._batch
        assert batch is not None
        if batch.rows.num_columns != forward.num_columns:
            raise ValueError(
                f"layer {layer_idx} was given keys {tuple(keys.shape)} and values {tuple(values.shape)} in "
                f"{keys.dtype} on {keys.device}, its pages hold another shape: use one cache per model"
            )
        self._stash_instead(forward, batch)

    def _stash_instead(self, forward: Forward, batch: PagedBatch) -> None:
        """Take the first forward's tokens out of their pages again, to build other pages from them later."""
        for index in forward.done:
            forward.stash[index] = batch.in_columns(index)
        forward.step = None
        batch.close()
        self._batch = self._memory = self._specs = None

    def _set_apart(self, layer_idx: int) -> DynamicLayer:
        """Give a layer whose length is its own (cross-attention) a native dense layer instead of pages."""
        forward, batch = self._forward, self._batch
        if forward is not None and batch is not None and batch.rows.num_columns == forward.num_columns:
            self._stash_instead(forward, batch)
        native = DynamicLayer()
        self.layers[layer_idx] = native
        return native

    def note_padding(self, mask: Tensor | None) -> bool:
        """Take the padding of the coming forward from its 2-D attention mask.

        Args:
            mask: bool `[rows, columns so far and new]`, False at padding; None for no padding.

        Returns:
            Whether the mask hides a token that the cache holds.

        Raises:
            BatchSizeChanged: Other rows than the cache holds; nothing changed.
        """
        self._settle()
        seen = self.get_seq_length()
        self._padding = None
        if mask is not None and self._batch is not None and mask.shape[0] != len(self._batch.seqs):
            raise BatchSizeChanged(len(self._batch.seqs), mask.shape[0])
        if mask is None or mask.shape[1] <= seen or bool(mask.all()):
            return False
        self._padding = mask[:, seen:].cpu().numpy().astype(bool)
        return self._batch is not None and self._batch.rows.hides(mask)
