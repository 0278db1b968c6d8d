"""The tiny model that presses are compared on, its inputs, and what a press leaves in a plain cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from paged_kv.compression.kvpress import bridge


def press_model() -> Any:
    """A random Llama of four layers, 8 query heads and 4 KV heads of 16 channels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts `[1, 128]`."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(5, 1000, (1, 128), generator=generator) for _ in range(2))


def run(model: Any, ids: Tensor, cache: Any, first: int | None = None) -> Tensor:
    """One forward; returns the logits. Positions start at `first`, by default where the cache says."""
    start = cache.get_seq_length() if first is None else first
    with torch.no_grad():
        return model(ids, past_key_values=cache, position_ids=torch.arange(start, start + ids.shape[1])[None]).logits


def kept_by_press(model: Any, press: Any, ids: Tensor, attention: str = "sdpa") -> list[list[list[int]]]:
    """Which tokens of the first row a press keeps in a plain cache: `[layer][head]`, masked pairs left out."""
    model.set_attn_implementation(attention)
    full = DynamicCache()
    run(model, ids, full)
    cache = DynamicCache()
    with press(model):
        run(model, ids, cache)
    kept = []
    for layer, whole in enumerate(full.layers):
        module = model.model.layers[layer].self_attn
        masked, module.masked_key_indices = getattr(module, "masked_key_indices", None), None
        heads = []
        for head in range(whole.keys.shape[1]):
            distance = torch.cdist(
                cache.layers[layer].keys[0, head], whole.keys[0, head], compute_mode="donot_use_mm_for_euclid_dist"
            )
            found = set(distance.argmin(dim=1).tolist())
            if masked is not None:
                found -= set(masked[2][(masked[0] == 0) & (masked[1] == head)].tolist())
            heads.append(sorted(found))
        kept.append(heads)
    return kept


def kept_by_us(cache: PagedCache, row: int = 0) -> list[list[list[int]]]:
    """Which tokens of a row a paged cache holds: `[layer][head]`, every head of a lane alike."""
    heads = cache.memory.groups[0].spec.heads_per_lane
    kept = []
    for layer in range(len(cache.layers)):
        columns = cache.live_columns(layer)[row]
        kept.append([[int(c) for c in lane if c >= 0] for lane in columns for _ in range(heads)])
    return kept


def plain(press: Any) -> Any:
    """A press for plain caches: kvpress's own where it runs alone, else behind the bridge."""
    return bridge(press) if CROP_REMOVES else press


def attached(press: Any, behind_bridge: bool) -> Any:
    return bridge(press) if behind_bridge else press


BOTH_WAYS = pytest.mark.parametrize("behind_bridge", [False, True], ids=["press alone", "bridge"])
