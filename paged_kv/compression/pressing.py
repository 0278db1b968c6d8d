"""kvpress's presses on a `PagedCache`: what their hooks expect, and what becomes of what they leave behind.

A press hangs forward hooks on a model's attention modules, crops `cache.layers[i]` there, or leaves in
`module.masked_key_indices` which pairs single heads should forget. Here this model alone gets hooks besides, before the
press's and behind them:

- each hook of the press is told the cache and the columns, whatever names the installed transformers uses;
- pairs that heads should forget are really dropped, and their pages freed;
- forwards that the press runs for itself are rolled back, so that they are not counted as tokens seen;
- keys that a press turned to positions from zero are turned on to where the sequence is.

Owns: these hooks and their removal.
Does not know: any press's method, kvpress's own patches (pages are never masked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from paged_kv.assign import survivors
from paged_kv.cache import PagedCache
from paged_kv.compression.apply import cache_in
from paged_kv.compression.errors import UnsupportedMethod
from paged_kv.compression.rotary import Rotary

MASK = "masked_key_indices"
_ABSENT = object()


class Bridge:
    """A press that works on paged caches and on every supported transformers: `with bridge(press)(model): ...`."""

    def __init__(self, press: Any, *, rerotates: bool = False) -> None:
        """Stand before `press`; `rerotates` says that it turns the keys it keeps to positions from zero."""
        self.press = press
        self._rerotates = rerotates
        # Layers whose heads forgot different tokens: the press goes on counting columns in them.
        self._in_columns: WeakKeyDictionary[PagedCache, set[int]] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        """What the press has, such as its `compression_ratio`."""
        return getattr(self.press, name)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Apply the press to the forwards of `model` inside a `with` block.

        Raises:
            UnsupportedMethod: The press drops tokens of single heads, and the cache has one table for all of a layer's.
        """
        hooks = _Hooks(model, self._in_columns, Rotary.of(model) if self._rerotates else None)
        try:
            with self.press(model):
                yield
                hooks.replaying = True
            hooks.settle()
        finally:
            hooks.remove()


class _Hooks:
    """The hooks on one model, from `__init__` to `remove`."""

    def __init__(self, model: Any, in_columns: WeakKeyDictionary[PagedCache, set[int]], rotary: Rotary | None) -> None:
        decoder = model.get_decoder()
        self._decoder = decoder
        self._attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
        self._in_columns = in_columns
        self._rotary = rotary
        self._cache: PagedCache | None = None
        self._seen = 0
        self.replaying = False
        # What is masked there now belongs to another cache, a plain one.
        self._masked_before = [vars(module).get(MASK, _ABSENT) for module in self._attentions]
        for module in self._attentions:
            setattr(module, MASK, None)
        self._handles = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True),
            *(m.register_forward_hook(self._tell, with_kwargs=True, prepend=True) for m in self._attentions),
        ]

    def remove(self) -> None:
        """Leave the model as it was found."""
        for handle in self._handles:
            handle.remove()
        for module, masked in zip(self._attentions, self._masked_before, strict=True):
            # A plain cache may have been masked in the block itself: its mask stays.
            if masked is _ABSENT and getattr(module, MASK, None) is None:
                delattr(module, MASK)
            elif getattr(module, MASK, None) is None:
                setattr(module, MASK, masked)

    def _before(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Note the cache before a forward; a press that put its own `forward` in place takes it by its old name."""
        self._cache = cache_in(kwargs)
        if "forward" in vars(decoder) and "cache" in kwargs:
            kwargs = {**kwargs, "past_key_values": kwargs["cache"]}
            del kwargs["cache"]
        if self._cache is not None:
            self._seen = self._cache.get_seq_length()
            if self._in_columns.get(self._cache):
                given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
                self._cache.memory.record_queries(1 if given is None else int(given.shape[1]))
        return args, kwargs

    def _tell(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Add to the arguments that the press's hook is about to read; the forward they came from is over."""
        cache = kwargs["past_key_values"] if kwargs.get("past_key_values") is not None else kwargs.get("cache")
        if cache is None:
            return
        num_new = kwargs["hidden_states"].shape[1]
        if isinstance(cache, PagedCache):
            kwargs["past_key_values"] = _CacheOfPress(cache, self._in_columns.get(cache, set()), num_new)
            seen = cache.get_seq_length()
            kwargs["cache_position"] = torch.arange(seen - num_new, seen)
            return
        kwargs["past_key_values"] = cache
        if kwargs.get("cache_position") is None:
            kwargs["cache_position"] = kwargs["position_ids"][0]

    def _after(self, decoder: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Turn what the press left on the modules into crops, and take back what it fed for itself."""
        self.settle()
        cache = self._cache
        if cache is None:
            return
        given = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        wanted = self._seen + (0 if self.replaying or given is None else given.shape[1])
        if cache.get_seq_length() > wanted:
            newest = max(_newest_column(cache, layer) for layer in cache.memory.layers)
            if newest < wanted:
                cache.crop(-(cache.get_seq_length() - wanted))
        if self._rotary is not None and self._seen == 0:
            _turn_on(cache, self._rotary)

    def settle(self) -> None:
        """Drop what single heads should forget, of the cache that was used last."""
        cache = self._cache
        if cache is None:
            return
        for module in self._attentions:
            masked = getattr(module, MASK, None)
            if masked is None:
                continue
            setattr(module, MASK, None)
            columns = self._in_columns.setdefault(cache, set())
            forget(cache, module.layer_idx, masked, in_columns=module.layer_idx in columns)
            columns.add(module.layer_idx)


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
    columns = cache.live_columns(layer).cpu().numpy()
    if columns.shape[1] == 1 and cache.memory.place(layer)[0].spec.num_kv_heads > 1:
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


def _newest_column(cache: PagedCache, layer: int) -> int:
    """The column of a layer's newest live token, -1 if it holds none."""
    columns = cache.live_columns(layer)
    return int(columns.max()) if columns.numel() else -1


def _turn_on(cache: PagedCache, rotary: Rotary) -> None:
    """Turn keys that stand at positions from zero on to the newest positions, in layers that were cropped."""
    seen = cache.get_seq_length()
    for layer in cache.memory.layers:
        live = cache.get_seq_length(layer)
        if live < seen:
            keys, values = cache.layers[layer].keys, cache.layers[layer].values
            cache.layers[layer].keys = rotary.turn(keys, torch.full((live,), seen - live))
            cache.layers[layer].values = values


class _CacheOfPress:
    """A paged cache as a press sees it; layers whose heads differ are shown in columns."""

    def __init__(self, cache: PagedCache, in_columns: set[int], num_new: int) -> None:
        self._cache = cache
        self.layers = [
            _LayerInColumns(cache, index, num_new) if index in in_columns else layer
            for index, layer in enumerate(cache.layers)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __len__(self) -> int:
        return len(self.layers)


class _LayerInColumns:
    """A layer whose heads hold different tokens, as dense tensors of all columns.

    Where a head has no token, its key attracts no attention from the newest queries, and its value is zero.
    """

    def __init__(self, cache: PagedCache, index: int, num_new: int) -> None:
        self._cache, self._index, self._num_new = cache, index, num_new
        self._new_keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache.layers[self._index], name)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    @property
    def keys(self) -> Tensor:
        keys, holes = self._spread(self._cache.layers[self._index].keys)
        repelling = self._repelling(keys)
        return torch.where(holes[..., None], repelling[:, :, None], keys)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._new_keys = keys

    @property
    def values(self) -> Tensor:
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
