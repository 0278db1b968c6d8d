"""The attention that transformers calls under the name "paged_kv", and how a model is switched to it.

Owns: registration, finding the pages behind a key tensor, choosing between ranges and masks.
Does not know: how a backend computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paged_kv import _compat
from paged_kv.attention.base import AttentionOptions, handle_of
from paged_kv.attention.masks import LazyMask, paged_mask, take_columns
from paged_kv.attention.sdpa import attend_dense
from paged_kv.attention.select import pick_backend
from paged_kv.forward import ATTACHMENTS, ATTENTION, LayerHandle, uncompiled, without_graph

#: The engine's name for the same attention: without a mask function, so that no mask is made.
PACKED_ATTENTION = "paged_kv_packed"

#: Backends made so far, by device and name.
_pick = lru_cache(pick_backend)


@uncompiled
def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered as "paged_kv".

    Args:
        module: The attention module of the model.
        query: `[rows, q_heads, queries, key_width]`.
        key: What the cache's `update` returned, or any `[rows, kv_heads, tokens, key_width]`.
        value: As `key`.
        attention_mask: A `LazyMask`, a tensor in columns, or None.
        dropout: For training; used only where dense tensors go to SDPA.
        scaling: Factor on the logits; `key_width ** -0.5` by default.
        kwargs: `softcap`, `s_aux` (sinks), `position_bias`, and others that are not needed.

    Returns:
        `[rows, queries, q_heads, value_width]`, and None for the weights.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale=scale, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"))
    handle = handle_of(key)
    if isinstance(handle, LayerHandle) and query.shape[2] == handle.forward.num_columns:
        with torch.no_grad():
            out = _attend_rows(handle, query, attention_mask, options)
        return without_graph(out, query), None
    if handle is not None and not isinstance(handle, LayerHandle):
        return handle.attend(query, options), None
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.for_keys(module.layer_idx, key.shape[2])
    if options.softcap is None and options.sinks is None:
        return _compat.sdpa_attention(module, query, key, value, attention_mask, dropout, scaling=scale, **kwargs), None
    if attention_mask is None and query.shape[2] > 1:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(key.shape[2] - query.shape[2])[None, None]
    return attend_dense(query, key, value, attention_mask, options).transpose(1, 2), None


def _attend_rows(handle: LayerHandle, query: Tensor, mask: Any, options: AttentionOptions) -> Tensor:
    """Attend the rows of a batch to their pages; returns `[rows, queries, q_heads, value_width]`."""
    step = handle.forward.step
    assert step is not None
    if (memory := handle.batch.memory).queries is not None:
        memory.note_queries(step, handle.layer, handle.pack(query), options.scale)
    if mask is None or (isinstance(mask, LazyMask) and mask.is_range):
        view = step.view(handle.layer, None if mask is None else mask.window)
        backend = _pick(query.device, name=handle.forward.backend)
        packed = handle.pack(query).to(view.keys.dtype)  # under autocast, queries and values differ from the pages
        return handle.unpack(backend.attend(packed, view, options)).to(query.dtype)
    batch = handle.batch
    columns = batch.live_columns(handle.layer)
    live = take_columns(mask.build() if isinstance(mask, LazyMask) else mask, columns)
    key, value = batch.compact(handle.layer)
    if live.shape[1] > 1:
        live = live.repeat_interleave(query.shape[1] // live.shape[1], dim=1)
    return attend_dense(query, key, value, live, options).transpose(1, 2)


def register() -> None:
    """Add "paged_kv" and "paged_kv_packed" to transformers' registries; nothing else there changes."""
    _compat.register_attention(ATTENTION, paged_attention, paged_mask)
    _compat.register_attention(PACKED_ATTENTION, paged_attention, None)


@contextmanager
def attached(model: Any) -> Iterator[Any]:
    """Run `model` with "paged_kv" attention inside a `with` block, and as before after it, exceptions included."""
    before = _compat.attention_of(model)
    model.set_attn_implementation(ATTENTION)
    added = [attachment for attachment in ATTACHMENTS if attachment.attach(model)]
    try:
        yield model
    finally:
        for attachment in added:
            attachment.detach(model)
        model.set_attn_implementation(before)


def detach(model: Any) -> None:
    """Put a model back on the attention that transformers gives it by default, without the hooks of `for_model`."""
    for attachment in ATTACHMENTS:
        attachment.detach(model)
    if _compat.attention_of(model) == ATTENTION:
        model.set_attn_implementation(_compat.default_attention(model))
