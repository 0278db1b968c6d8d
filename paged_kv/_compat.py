"""The only file that knows which transformers release it runs on (5.2 to 5.24).

Owns: reading configs, the layer layout that `DynamicCache` would choose, argument names that changed.
Does not know: pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

__all__ = ["sdpa_mask"]

#: True from the release on in which `crop` takes the (negative) number of tokens to remove.
CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters

#: The forward keyword under which a model takes its cache: renamed in 5.24, which still accepts the old name.
CACHE_KEYWORD = "cache" if hasattr(Cache, "get_query_offset") else "past_key_values"


def text_config(model_or_config: Any) -> Any:
    """The decoder's config of a model, a composite config or a plain config."""
    config = getattr(model_or_config, "config", model_or_config)
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if getter else config


def native_layers(config: Any) -> list[Any]:
    """The layers that `DynamicCache` would use for this config, in order: attention, sliding, linear, shared."""
    return list(DynamicCache(config=config).layers)


def is_pageable(layer: Any) -> bool:
    """Whether a native layer holds plain keys and values, and nothing besides."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def is_attention(layer: Any) -> bool:
    """Whether a native layer holds keys and values at all."""
    return isinstance(layer, CacheLayerMixin)


def layer_windows(config: Any) -> dict[int, int | None]:
    """The layers that keep plain keys and values: index to sliding window in tokens, None for full attention."""
    return {
        index: getattr(layer, "sliding_window", None)
        for index, layer in enumerate(native_layers(config))
        if is_pageable(layer)
    }


def window_of(rest: Sequence[torch.Tensor | None]) -> int | None:
    """The sliding window in what iterating over a cache gives of a layer behind its keys and values, if any."""
    return int(rest[0]) if rest and rest[0] is not None else None


def shares(config: Any, layer: object) -> bool:
    """Whether a layer has no keys of its own but reads another layer's."""
    shared, total = getattr(config, "num_kv_shared_layers", 0) or 0, getattr(config, "num_hidden_layers", 0)
    return isinstance(layer, int) and total - shared <= layer < total


def layer_config(config: Any, layer: int) -> Any:
    """The config of one layer, where a release lets layers differ; the whole config elsewhere."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[layer]


def attention_of(model_or_config: Any) -> str | None:
    """The name of the attention that a model, or a model of this config, runs now."""
    config = getattr(model_or_config, "config", model_or_config)
    name: str | None = text_config(config)._attn_implementation
    return name


def biases_by_distance(config: Any) -> bool:
    """Whether a model adds a bias by distance in columns (ALiBi, relative buckets), blind to what was cropped."""
    if config is None:
        return False
    attention = getattr(config, "attn_config", config)
    return (
        config.model_type == "bloom"
        or bool(getattr(attention, "alibi", False))
        or hasattr(config, "relative_attention_num_buckets")
    )


def needs_dense_keys(config: Any) -> bool:
    """Whether a model works on what `update` returns before its attention: expands it (MLA) or measures it (T5)."""
    return (
        getattr(config, "kv_lora_rank", None) is not None
        or getattr(config, "relative_attention_num_buckets", None) is not None
    )


def why_not_packed(config: Any) -> str | None:
    """Why a model of this config cannot run many sequences packed in one row of tokens, or None."""
    if needs_dense_keys(config):
        return "its attention works on dense keys"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its chunked attention counts from the start of a row"
    if any(not is_attention(layer) and hasattr(layer, "conv_states") for layer in native_layers(config)):
        return "its linear-attention layers keep one state a row"
    return None


def default_attention(model: Any) -> str:
    """The attention that transformers gives a model when nobody asks for one."""
    return "sdpa" if model._supports_sdpa else "eager"


def query_length(query: int | torch.Tensor) -> int:
    """The number of queries from what `get_mask_sizes` is given: an int, or 5.2's `cache_position`."""
    return query if isinstance(query, int) else int(query.shape[0])


def restarts(passed: Sequence[Any], named: Mapping[str, Any], num_columns: int, seen: int) -> bool:
    """Whether a forward feeds a whole sequence again to a cache that holds it: what generating without a cache does.

    Args:
        passed: What `update` was given by position behind the layer (5.2: a dict with `cache_position`).
        named: What it was given by name (from 5.24 on: `kwargs`, a dict with `use_cache` and `position_ids`).
        num_columns: New columns.
        seen: Columns that the cache holds.
    """
    if seen == 0 or num_columns != seen + 1:
        return False
    told = [entry for entry in (*passed, *named.values()) if isinstance(entry, dict)]
    for entry in told:
        positions = entry.get("cache_position", entry.get("position_ids"))
        if entry.get("use_cache") is False or (isinstance(positions, torch.Tensor) and int(positions.min()) == 0):
            return True
    return False


def generates_without_cache(model: Any) -> bool:
    """Whether `model.generate` feeds the whole sequence at every step unless it is told otherwise."""
    settings = getattr(model, "generation_config", None) or text_config(model)
    return getattr(settings, "use_cache", True) is False


def tokens_to_remove(argument: int, seen: int) -> int:
    """How many tokens a call of `Cache.crop(argument)` drops from `seen` ones, in the meaning of this release.

    Raises:
        ValueError: A positive argument where this release takes only the (negative) number of tokens to remove.
    """
    if CROP_REMOVES:
        if argument > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative integer, got {argument}")
        return min(-argument, seen)
    return min(-argument, seen) if argument < 0 else max(0, seen - argument)


def causal_window(mask_function: Any) -> tuple[bool, int | None]:
    """Whether a mask function is causal, alone or within a sliding window, and that window in tokens.

    Transformers composes masks from closures; those of its own causal and sliding masks are recognised by the functions
    they close over. Anything else, known or not, is (False, None) and must be evaluated.
    """
    if mask_function is causal_mask_function:
        return True, None
    if getattr(mask_function, "__qualname__", "") == "and_masks.<locals>.and_mask":
        parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
        others = [part for part in parts if part is not causal_mask_function]
        if len(parts) == 2 and len(others) == 1:
            window = _overlay_window(others[0])
            return window is not None, window
    return False, None


def _overlay_window(overlay: Any) -> int | None:
    if getattr(overlay, "__qualname__", "") != "sliding_window_overlay.<locals>.inner_mask":
        return None
    window: int = inspect.getclosurevars(overlay).nonlocals["sliding_window"]
    return window


def build_mask(arguments: dict[str, Any]) -> torch.Tensor:
    """The mask `[rows, 1, queries, columns]` that transformers itself would build from a mask function's arguments."""
    mask: torch.Tensor = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask


def sdpa_attention(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Transformers' own SDPA attention over dense tensors: `[rows, queries, q_heads, value_width]`."""
    out: torch.Tensor = sdpa_attention_forward(module, *args, **kwargs)[0]
    return out


def register_attention(name: str, attention: Any, mask: Any | None) -> None:
    """Add an attention, and the mask function that goes with it, under a name of our own."""
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
