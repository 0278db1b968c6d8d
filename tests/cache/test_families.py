"""The wider grid of families: the same tokens as `DynamicCache`, and unequal layers against the masked oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import paged_kv
from allocator import KVError
from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from paged_kv.compression import KeyNorm
from tests.cache.pairs import Pair
from tests.tiny import MORE_FAMILIES, padded, tiny_model, tokens

pytestmark = pytest.mark.slow

#: These do their own attention and never look at transformers' registry.
OWN_ATTENTION = {"bloom", "falcon", "mpt", "imagegpt"} | (set() if CROP_REMOVES else {"gptj"})
#: These need layers that are not keys and values, which the older release keeps in a cache class of the model's own.
NEEDS_NEWER = set() if CROP_REMOVES else {"qwen3 next"}


def generate(model: Any, inputs: Any, cache: Any) -> torch.Tensor:
    tokens_: torch.Tensor = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=25, do_sample=False, eos_token_id=None
    )
    return tokens_


@pytest.mark.parametrize("family", sorted(MORE_FAMILIES))
def test_the_same_tokens_as_dynamic_cache_with_every_attention(family: str) -> None:
    if family in NEEDS_NEWER:
        pytest.skip("this release keeps the model's linear layers in a cache class of its own")
    model = tiny_model(family)
    for pads in ([0], [0, 5, 11, 20]):
        inputs = padded(len(pads), 37, pads)
        expected = generate(model, inputs, DynamicCache(config=model.config))
        for attention in ("eager", "sdpa", "paged_kv"):
            try:
                model.set_attn_implementation(attention)
            except ValueError:
                assert attention == "sdpa", "only SDPA is refused, by models that it cannot serve"
                continue
            cache = PagedCache(config=model.config, page_size=3)
            assert torch.equal(generate(model, inputs, cache), expected), (attention, len(pads))
            cache.check()
        paged_kv.detach(model)
        cache = PagedCache.for_model(model, page_size=3)
        assert torch.equal(generate(model, inputs, cache), expected), ("for_model", len(pads))
        cache.check()
        paged_kv.detach(model)


@pytest.mark.parametrize("family", sorted(set(MORE_FAMILIES) - OWN_ATTENTION - NEEDS_NEWER))
def test_unequal_layers_equal_the_masked_oracle(family: str) -> None:
    pair = Pair(family, page_size=3)
    layers = pair.cache.memory.layers
    pair.cache.crop_layers({layer: 7 + 4 * layer for layer in layers}, KeyNorm())
    pair.follow()
    for column in tokens(1, 6, seed=5).split(1, dim=1):
        pair.step(column)
    pair.step(tokens(1, 9, seed=6))


@pytest.mark.parametrize("family", sorted(OWN_ATTENTION - {"bloom", "mpt"}))
def test_models_with_their_own_attention_refuse_a_step_over_unequal_layers(family: str) -> None:
    model = tiny_model(family)
    cache = PagedCache.for_model(model, page_size=3)
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
        cache.crop_layer(0, keep_last=9)
        with pytest.raises(KVError, match="different lengths"):
            model(tokens(1, 4), past_key_values=cache)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_models_that_bias_by_distance_refuse_to_be_cropped(family: str) -> None:
    model = tiny_model(family)
    cache = PagedCache.for_model(model, page_size=3)
    with torch.no_grad():
        before = model(tokens(1, 30), past_key_values=cache).logits
    with pytest.raises(paged_kv.UnsupportedModel, match="distance"):
        cache.crop_layer(0, keep_last=9)
    assert cache.get_seq_length() == before.shape[1]
