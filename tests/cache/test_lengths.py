"""How long a cache says its layers are: after crops, within a forward, for windows and for data of other caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from allocator import KVError
from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from paged_kv.forward import cache_of_mask
from tests.cache.pairs import Pair
from tests.tiny import padded, tiny_model, tokens

KEPT = [7, 31, 12, 25]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_layers_cropped_by_different_amounts_each_say_their_length_and_the_mask_has_the_longest(family: str) -> None:
    pair = Pair(family, page_size=4)
    cache, layers = pair.cache, len(pair.cache.layers)
    for layer in range(layers):
        cache.crop_layer(layer, keep_last=KEPT[layer] - 2, sinks=2)
    pair.follow()
    assert [cache.get_seq_length(layer) for layer in range(layers)] == KEPT[:layers]
    assert cache.get_seq_length() == 40
    pair.model.set_attn_implementation("sdpa")
    for queries in (1, 5):
        asked = queries if CROP_REMOVES else torch.arange(40, 40 + queries)
        for layer in range(layers):
            length, offset = cache.get_mask_sizes(asked, layer)
            assert (int(length), offset) == (max(KEPT[:layers]) + queries, 40 - max(KEPT[:layers]))
    pair.model.set_attn_implementation("paged_kv")
    pair.step(tokens(1, 1, seed=5))
    pair.step(tokens(1, 6, seed=6))
    assert [cache.get_seq_length(layer) for layer in range(layers)] == [kept + 7 for kept in KEPT[:layers]]


def test_a_layer_that_a_forward_has_not_reached_does_not_count_its_tokens() -> None:
    states = torch.randn(1, 2, 5, 8)
    cache = PagedCache(page_size=4)
    for layer in range(3):
        cache.update(states, states, layer)
    cache.update(states[:, :, :2], states[:, :, :2], 0)
    assert [cache.get_seq_length(layer) for layer in range(3)] == [7, 5, 5]
    assert [cache.get_query_offset(layer) for layer in range(3)] == [7, 5, 5]
    assert cache.get_seq_length() == 7
    assert cache.get_seq_length(3) == 0, "as DynamicCache says of a layer that is not there"


def test_a_model_that_asks_every_layer_for_its_length_gives_the_same_beams() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 3, "num_heads": 4}
    model = UMT5ForConditionalGeneration(UMT5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)).eval()
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "output_scores": True}
    settings = GenerationConfig(**options, return_dict_in_generate=True, pad_token_id=0, decoder_start_token_id=0)
    expected = model.generate(tokens(2, 9) % 90 + 3, generation_config=settings)
    decoder = PagedCache(config=model.config, page_size=3), PagedCache(config=model.config, page_size=3)
    got = model.generate(
        tokens(2, 9) % 90 + 3, generation_config=settings, past_key_values=EncoderDecoderCache(*decoder)
    )
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_windowed_layers_show_the_keys_that_dynamic_cache_shows_from_the_first_forward_on() -> None:
    model = tiny_model("gemma3")
    model.set_attn_implementation("sdpa")
    dense, paged = DynamicCache(config=model.config), PagedCache(config=model.config, page_size=4)
    with torch.no_grad():
        for part in tokens(1, 60).split([40, 1, 19], dim=1):
            for cache in (dense, paged):
                model(part, past_key_values=cache)
            for ours, theirs in zip(paged.layers, dense.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-5)
                assert ours.get_seq_length() == theirs.get_seq_length()


def test_another_caches_windows_are_copied_in_with_their_windows() -> None:
    model = tiny_model("gemma3")
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=dense)
    copied = PagedCache(list(dense), page_size=4)
    assert copied.is_sliding == dense.is_sliding
    for ours, theirs in zip(copied, dense, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None and other is None) or torch.equal(mine, other)
    copied.check()


def test_a_cache_of_native_layers_alone_says_their_length() -> None:
    cache = PagedCache(page_size=4)
    cache.layers.append(DynamicLayer())
    states = torch.randn(1, 2, 5, 8)
    cache.update(states, states, 0)
    assert cache.get_seq_length() == 5


def test_a_mask_without_a_cache_finds_none_after_compiled_code_asked_for_one() -> None:
    assert cache_of_mask(7) is None


def test_stock_attention_refuses_unequal_layers_before_torch_does_and_the_cache_is_as_before() -> None:
    model = tiny_model("llama")
    for attention, new in (("eager", 1), ("eager", 3), ("sdpa", 3)):
        model.set_attn_implementation(attention)
        cache = PagedCache(config=model.config, page_size=4)
        with torch.no_grad():
            model(**padded(1, 20, [0]), past_key_values=cache)
            cache.crop_layer(2, keep_last=6)
            with pytest.raises(KVError, match="set_attn_implementation"):
                model(tokens(1, new), past_key_values=cache)
            assert cache.layer_lengths() == [20, 20, 6, 20]
            assert cache.get_seq_length() == 20
            cache.check()
            model.set_attn_implementation("paged_kv")
            model(tokens(1, new), past_key_values=cache)
        assert cache.layer_lengths() == [20 + new, 20 + new, 6 + new, 20 + new]
