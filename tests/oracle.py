"""A float64 reference for models whose layers keep different tokens: nothing is dropped, everything is masked.

A copy of the model in double precision runs over a `DynamicCache` that keeps every key and value of every token. Its
attention is a few plain lines: a query sees a token if that token is not padding, not behind the window, not newer than
the query, and has not been cropped from this layer (head). What pages hold plays no part in it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

NAME = "test_oracle"


class MaskedOracle:
    """Runs `model` in float64; `crop` hides tokens by position from then on."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_attn_implementation(NAME)
        self.model.set_experts_implementation("eager")  # grouped products of experts know no float64
        # Without a config nothing slides out of a window; with linear layers there is no cache without one.
        hybrid = DynamicCache(config=model.config)
        self.cache = hybrid if any(getattr(hybrid, "is_linear", ())) else DynamicCache()
        self.real = torch.zeros(0, 0, dtype=torch.bool)
        self.hidden: dict[int, Tensor] = {}

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """Logits `[rows, columns, vocab]` of new tokens; `real` is False at padding."""
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
        self.real = torch.cat([self.real, real], dim=1) if self.real.numel() else real
        positions = (self.real.long().cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        _CURRENT.append(self)
        try:
            with torch.no_grad():
                return self.model(ids, position_ids=positions, past_key_values=self.cache, use_cache=True).logits
        finally:
            _CURRENT.pop()

    def crop(self, layer: int, row: int, kept_positions: Any, head: int | None = None) -> None:
        """Hide all tokens seen so far from a layer's row (of one KV head), but those at the kept positions."""
        heads = self.model.config.num_key_value_heads if hasattr(self.model.config, "num_key_value_heads") else None
        heads = heads or self.model.config.num_attention_heads
        columns = self.real.shape[1]
        old = self.hidden.get(layer, torch.zeros(self.real.shape[0], heads, 0, dtype=torch.bool))
        new = torch.zeros(self.real.shape[0], heads, columns, dtype=torch.bool)
        new[:, :, : old.shape[2]] = old
        position = self.real[row].long().cumsum(0) - 1
        gone = ~torch.isin(position, torch.as_tensor(kept_positions)) | ~self.real[row]
        new[row, slice(None) if head is None else head] |= gone
        self.hidden[layer] = new


_CURRENT: list[MaskedOracle] = []


def _holder(config: Any, layer: int) -> int:
    """The layer whose keys and values a layer reads: its own, or those of the last one of its type that keeps any."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    keeping = config.num_hidden_layers - shared
    if shared == 0 or layer < keeping:
        return layer
    return max(index for index in range(keeping) if config.layer_types[index] == config.layer_types[layer])


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    oracle = _CURRENT[-1]
    queries, columns = query.shape[2], key.shape[2]
    column = torch.arange(columns)
    at = torch.arange(columns - queries, columns)[:, None]
    seen = oracle.real[:, None, None, :] & (column <= at)
    window = kwargs.get("sliding_window")
    if window is not None:
        seen = seen & (column > at - window)
    config = module.config
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and config.layer_types[module.layer_idx] == "chunked_attention":
        seen = seen & (column // chunk == at // chunk)
    hidden = oracle.hidden.get(_holder(config, module.layer_idx))
    seen = seen.expand(-1, key.shape[1], -1, -1).clone()
    if hidden is not None:
        seen[..., : hidden.shape[2]] &= ~hidden[:, :, None, :]
    group = query.shape[1] // key.shape[1]
    key, value, seen = (part.repeat_interleave(group, dim=1) for part in (key, value, seen))
    logits = query @ key.transpose(-1, -2) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if kwargs.get("softcap") is not None:
        logits = kwargs["softcap"] * torch.tanh(logits / kwargs["softcap"])
    logits = logits.masked_fill(~seen, float("-inf"))
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :columns]
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
