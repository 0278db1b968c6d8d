"""`PagedCache`: the drop-in `past_key_values`, a `DynamicCache` whose layers lie in pages.

Owns: transformers' cache contract (lengths, masks, rollback, rows) and what it says of itself.
Does not know: how attention is computed; it hands out either dense tensors or a handle to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allocator import KVError
from paged_kv import _compat
from paged_kv.cropping import CroppingCache, EmptyCache
from paged_kv.forward import ATTACHMENTS, ATTENTION
from paged_kv.group import Budget
from paged_kv.layers import PagedLayer
from paged_kv.memory import PagedMemory
from paged_kv.memory_map import MemoryMap, map_of
from paged_kv.persist import load, save
from paged_kv.spec import KVSpec, Lanes, UnsupportedModel


class BehindWindow(KVError, RuntimeError):
    """Raised by a rollback into tokens that slid out of a window. Do: `activate_past_recording()` beforehand."""


class PagedCache(CroppingCache):
    """A drop-in for `DynamicCache`: every layer of every row has its own page table over one shared pool.

    Layers can be cropped to different lengths; their pages are free for any other layer at once. Reading unequal
    layers needs the attention named "paged_kv", which `for_model` switches the model to.
    """

    @classmethod
    def for_model(cls, model: Any, *, page_size: int = 16, lanes: Lanes = "layer", **options: Any) -> PagedCache:
        """A cache with the shapes of `model`, which is switched to the attention that reads pages.

        A model on its default attention is switched to "paged_kv" (undone by `paged_kv.detach(model)`); one that was
        explicitly given another attention stays as it is, and is handed gathered keys and values. Where kvpress is
        installed, hooks on its decoder watch for presses until `detach`.

        Args:
            model: A transformers model.
            page_size: Tokens of a page.
            lanes: "layer" for a page table per layer, "head" for one per KV head.
            options: `backend`, and one of `num_pages`, `kv_cache_bytes`, `memory_fraction`; see `Budget.of`.

        Raises:
            UnsupportedModel: No layer of the model keeps plain keys and values.
            TypeError: Not a model.
            ValueError: The model is set to generate without a cache.
        """
        if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
            raise TypeError(f"for_model takes a transformers model that is loaded, got {model!r:.80}")
        if _compat.generates_without_cache(model):
            raise ValueError(
                f"{type(model).__name__} is set to use_cache=False and would append the whole sequence again at every "
                "step; set model.generation_config.use_cache = True"
            )
        cache = cls(config=model.config, page_size=page_size, lanes=lanes, **options)
        if not any(isinstance(layer, PagedLayer) for layer in cache.layers):
            raise UnsupportedModel(f"{type(model).__name__} has no layer with plain keys and values to page")
        cache._specs = KVSpec.from_model(model, page_size=page_size, lanes=lanes)
        Budget.of(cache._specs, **cache._budget)
        if _compat.attention_of(model) == _compat.default_attention(model):
            model.set_attn_implementation(ATTENTION)
        for attachment in ATTACHMENTS:
            attachment.attach(model)
        return cache

    # -- dense layers --------------------------------------------------------------------------------------------------

    def dense_layer(self, layer_idx: int) -> tuple[Tensor, Tensor] | None:
        """Private dense copies of a layer's K and V, or None before its first update: what `layer.keys` returns.

        Columns as seen while nothing was cropped (a window's last ones), else the live tokens alone.
        """
        self._catch_up()
        if self._forward is not None and layer_idx in self._forward.stash:
            offset = self._window_offset(layer_idx, self._forward.num_columns)
            whole = self._forward.stash[layer_idx]
            return self._forward.assigned.get(layer_idx, (whole[0][:, :, offset:], whole[1][:, :, offset:]))
        if not self.has_layer(layer_idx):
            return None
        batch = self._batch
        assert batch is not None
        return batch.dense(layer_idx, self._window_offset(layer_idx, batch.rows.num_columns))

    def assign_layer(self, layer_idx: int, *, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Take a layer's dense keys, then its values, as compression libraries assign them; frees what is left out.

        Until both are there, `layer.keys` and `layer.values` are still the old ones. Tokens are recognised by their
        bytes and keep their positions; where a method changed them they are rewritten in place.

        Args:
            layer_idx: Model layer index.
            keys: `[rows, kv_heads, kept, key_width]`.
            values: `[rows, kv_heads, kept, value_width]`.

        Raises:
            KVError: The layer holds nothing yet, or the tensors do not fit what it holds; nothing changed.
        """
        half, self._assigned = self._assigned, {}
        if half.get("layer") == layer_idx:
            keys = keys if keys is not None else half["keys"]
            values = values if values is not None else half["values"]
        if keys is None or values is None:
            self._assigned = {"layer": layer_idx, "keys": keys, "values": values}
            return
        if self._forward is not None and layer_idx in self._forward.stash:
            self._forward.assigned[layer_idx] = (keys, values)
            return
        batch = self._cropable(layer_idx)
        batch.assign(layer_idx, keys, values, self._window_offset(layer_idx, batch.rows.num_columns))

    def live_columns(self, layer_idx: int) -> Tensor:
        """The column of each live token of a layer: int64 `[rows, lanes, longest]`, -1 behind a shorter row's end."""
        self._catch_up()
        assert self._batch is not None
        return self._batch.live_columns(layer_idx)

    # -- rows and rollback -------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back the newest tokens in every layer: transformers' `crop`, with the meaning of its release.

        Every layer loses exactly the live tokens it holds of them. To choose which tokens a layer keeps, see
        `crop_layer`.

        Args:
            tokens_to_remove: From 5.24 on minus the number to remove; before, the length to keep (or negative).
        """
        self._settle()
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.crop(tokens_to_remove)
        count = _compat.tokens_to_remove(tokens_to_remove, self.get_seq_length())
        if self._batch is None:
            return
        if count:
            self._require_window(count)
            self._batch.drop(count)
        if any(layer.record_past for layer in self._paged_layers()):
            self._batch.memory.slide(self._batch.seqs)

    def _require_window(self, count: int) -> None:
        """Refuse to roll back `count` columns into tokens that slid out of a window and were freed."""
        batch = self._batch
        assert batch is not None
        windows = {layer: self.layers[layer].sliding_window for layer in batch.memory.layers}
        for row, (seq, lost) in enumerate(zip(batch.seqs, batch.rows.counts(count), strict=True)):
            seen = batch.memory.seen_len(seq)
            for layer, window in windows.items():
                if window is None or layer in batch.cropped or seen <= window:
                    continue
                first = int(batch.memory.positions(seq, layer)[0])
                if first > max(0, seen - lost - window + 1):
                    raise BehindWindow(
                        f"layer {layer} of row {row} freed the tokens before position {first}, which its window of "
                        f"{window} needs after a rollback of {lost}; call activate_past_recording() before the drafts"
                    )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row `i` what row `beam_idx[i]` was (beam search). Repeated rows share their pages until written."""
        self._select(beam_idx.tolist())
        for layer in self._native_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, next to one another; the repeats share their pages until written."""
        rows = 0 if self._forward is None else self._forward.rows.num_rows
        rows = rows if self._batch is None else len(self._batch.seqs)
        self._select([row for row in range(rows) for _ in range(repeats)])
        for layer in self._native_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows at `indices`: int64 `[rows]`, or a bool mask over the rows."""
        chosen = torch.as_tensor(indices)
        self._select((chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist())
        for layer in self._native_layers():
            layer.batch_select_indices(indices)

    def _select(self, indices: Sequence[int]) -> None:
        self._settle()
        if self._batch is not None:
            self._batch.select(indices)
            self._forward = None

    def reset(self) -> None:
        """Drop all tokens and give their pages back; the next forward may bring another number of rows."""
        self._unsettled = None
        if self._batch is not None:
            self._batch.close()
            self._batch.memory.trim()
        self._batch = self._forward = self._padding = None
        for layer in self._native_layers():
            layer.reset()

    # -- what it holds -----------------------------------------------------------------------------------------------

    @property
    def memory(self) -> PagedMemory:
        """The pages behind the cache.

        Raises:
            EmptyCache: No forward has shown the layers' shapes yet.
        """
        self._settle()
        if self._memory is None and self._specs is None:
            raise EmptyCache("the cache has no pages yet: its shapes are learnt from the first forward")
        return self._pages()

    def layer_lengths(self, row: int | None = None) -> list[int]:
        """Live tokens of each paged layer: of one row, or of the longest."""
        self._settle()
        batch = self._batch
        if batch is None:
            return [0] * sum(isinstance(layer, PagedLayer) for layer in self.layers)
        rows = self._rows(row)
        return [int(batch.live_lens(layer)[:, rows].max(initial=0)) for layer in batch.memory.layers]

    def num_pages(self) -> int:
        """Pages that the cache's rows hold now; a page that rows share counts once."""
        self._settle()
        return 0 if self._memory is None else sum(stats.active_pages for stats in self._memory.stats())

    @property
    def nbytes(self) -> int:
        """Bytes of the page tensors, taken and free pages alike: what the cache costs."""
        self._settle()
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that the pool holds and no row uses."""
        self._settle()
        if self._memory is None:
            return 0
        free = [group.spec.bytes_per_page * group.allocator.stats().free_pages for group in self._memory.groups]
        return sum(free)

    def memory_map(self) -> tuple[MemoryMap, ...]:
        """Who holds which pages now, one map per group of layers; `paged_kv.memory_map` draws them."""
        self._settle()
        if self._memory is None:
            return ()
        names = {} if self._batch is None else {f"row {row}": seq for row, seq in enumerate(self._batch.seqs)}
        return map_of(self._memory, names)

    def save(self, path: str | Path) -> None:
        """Write pages and tables to a safetensors file, to go on from with `load`.

        Raises:
            KVError: The cache is empty, or some of its layers do not lie in pages and would be left out.
        """
        self._settle()
        if self._batch is None:
            raise EmptyCache("the cache holds no tokens: there is nothing to save")
        if self._native_layers():
            raise KVError(f"{len(self._native_layers())} layers of this model do not lie in pages and cannot be saved")
        save(self._batch, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: Any, **options: Any) -> PagedCache:
        """A cache for `model` with what `save` wrote: it generates the same tokens.

        Args:
            path: The file.
            model: The model that the cache was made for.
            options: As `for_model`; the budget is the one of the file.

        Raises:
            UnreadableCache: The file is no saved cache, or of another version.
            ValueError: The model's layers have another shape.
        """
        batch = load(Path(path))
        spec = batch.memory.groups[0].spec
        lanes: Lanes = "layer" if spec.lanes == 1 else "head"
        cache = cls.for_model(model, page_size=spec.page_size, lanes=lanes, **options)
        specs = tuple(group.spec for group in batch.memory.groups)
        if cache._specs is not None and {s.layers for s in cache._specs} != {s.layers for s in specs}:
            raise ValueError(f"{path} holds layers {[s.layers for s in specs]}, not those of {type(model).__name__}")
        cache._specs, cache._memory, cache._batch = specs, batch.memory, batch
        return cache

    def check(self) -> None:
        """Assert every invariant of the pages. Complexity: O(pages)."""
        if self._memory is not None:
            self._memory.check()
