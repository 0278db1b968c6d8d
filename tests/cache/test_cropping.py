"""Layers cropped to different lengths: exact logits, exact pages, positions that go on counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from allocator import KVError
from paged_kv import PagedCache
from paged_kv.compression import KeyNorm, StreamingLLM
from tests.cache.pairs import Pair, positions_of
from tests.tiny import tiny_model, tokens

POLICIES = [pytest.param(StreamingLLM(sinks=3), id="streaming"), pytest.param(KeyNorm(), id="key norm")]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("family", "num_rows"), [("llama", 1), ("llama", 3), ("qwen3", 1), ("gpt2", 1), ("gemma3", 1)])
def test_unequal_layers_then_single_tokens_and_a_chunk_equal_the_masked_oracle(
    family: str, num_rows: int, policy: Any
) -> None:
    pair = Pair(family, num_rows, page_size=3)
    budgets = {layer: 4 + 5 * layer for layer in range(len(pair.cache.layers))}
    pair.cache.crop_layers(budgets, policy)
    assert pair.cache.layer_lengths(0) == list(budgets.values())
    pair.follow()
    new = tokens(num_rows, 29, seed=5)
    for column in range(20):
        pair.step(new[:, column : column + 1])
    pair.step(new[:, 20:29])
    assert pair.cache.get_seq_length() == 69
    for layer, length in enumerate(pair.cache.layer_lengths(0)):
        window = pair.cache.layers[layer].sliding_window
        if window is None:
            assert length == budgets[layer] + 29
        else:
            assert length <= window - 1 + 9 + 3, "what slid out of the window was freed, page by page"


def test_stock_sdpa_raises_on_the_same_chunk() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
        for layer, length in zip(cache.layers, [4, 9, 14, 19], strict=True):
            layer.keys, layer.values = layer.keys[:, :, -length:], layer.values[:, :, -length:]
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            model(tokens(1, 9), past_key_values=cache)


def test_unequal_layers_under_stock_attention_say_what_to_do_instead() -> None:
    model = tiny_model("llama")
    cache = PagedCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
        cache.crop_layer(0, keep_last=5)
        with pytest.raises(KVError, match="set_attn_implementation"):
            model(tokens(1, 9), past_key_values=cache)


def test_heads_cropped_apart_equal_the_masked_oracle() -> None:
    pair = Pair("llama", page_size=3, lanes="head")
    for layer in range(4):
        pair.cache.crop_heads(layer, [np.arange(2 + head + layer, 40 - 3 * head) for head in range(4)])
    pair.follow()
    pair.step(tokens(1, 1, seed=5))
    pair.step(tokens(1, 9, seed=6))
    lengths = [40 - 3 * head - (2 + head + 1) + 10 for head in range(4)]
    assert [len(positions_of(pair.cache, 1, 0, head)) for head in range(4)] == lengths


@settings(max_examples=12)
@given(data=st.data())
def test_any_crops_between_any_steps_equal_the_masked_oracle(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    pair = Pair("llama", data.draw(st.integers(1, 3)), page_size=page_size)
    num_rows = pair.inputs["input_ids"].shape[0]
    for _ in range(3):
        layer, row = data.draw(st.integers(0, 3)), data.draw(st.integers(0, num_rows - 1))
        live = pair.cache.layer_lengths(row)[layer]
        keep = sorted(data.draw(st.sets(st.integers(0, live - 1)))) if live else []
        pair.cache.crop_layer(layer, keep, row=row)
        pair.follow()
        pair.step(tokens(num_rows, data.draw(st.integers(1, 5)), seed=9))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_crop_frees_exactly_the_pages_that_arithmetic_says_and_another_row_can_take_them(page_size: int) -> None:
    model = tiny_model("llama")

    def pages(length: int) -> int:
        return -(-length // page_size)

    cache = PagedCache.for_model(model, page_size=page_size, num_pages=1 + 4 * pages(64))
    with torch.no_grad():
        model(tokens(1, 64), past_key_values=cache)
        assert cache.num_pages() == 4 * pages(64)
        assert cache.free_bytes == 0
        for layer, budget in enumerate([1, 17, 40, 64]):
            before = cache.num_pages()
            freed = cache.crop_layer(layer, keep_last=budget)
            assert freed == pages(64) - pages(budget)
            assert cache.num_pages() == before - freed
            cache.check()
        spec = cache.memory.groups[0].spec
        free = 4 * pages(64) - cache.num_pages()
        assert cache.free_bytes == free * spec.bytes_per_page
        other, _ = cache.memory.open()
        cache.memory.append([other], [page_size * (free // 4)])
        assert cache.memory.stats()[0].free_pages == free % 4
        cache.memory.close(other)
    cache.reset()
    assert cache.num_pages() == 0
    cache.check()


def test_rollback_takes_from_each_layer_exactly_what_it_holds_of_the_newest_tokens() -> None:
    pair = Pair("llama", length=128, page_size=16)
    for layer, keep in enumerate([120, 83, 45, 8]):
        pair.cache.crop_layer(layer, keep_last=keep)
    pair.cache.crop(-10)
    assert pair.cache.layer_lengths() == [110, 73, 35, 0]
    assert pair.cache.get_seq_length() == 118
    pair.cache.check()
    pair.cache.crop(-200)
    assert pair.cache.layer_lengths() == [0, 0, 0, 0]
    assert pair.cache.num_pages() == 0
    pair.cache.crop(-3)
    pair.cache.check()


def test_a_layer_cropped_to_nothing_holds_no_pages_and_goes_on() -> None:
    pair = Pair("llama", length=64, page_size=16)
    pair.cache.crop_layer(0, keep=[])
    assert pair.cache.layer_lengths() == [0, 64, 64, 64]
    pair.follow()
    pair.step(tokens(1, 1, seed=3))
    pair.step(tokens(1, 4, seed=4))
    assert pair.cache.layer_lengths() == [5, 69, 69, 69]


def test_forks_of_a_cropped_cache_decode_apart_and_copy_only_what_they_write() -> None:
    pair = Pair("llama", length=45, page_size=4)
    pair.cache.crop_layers({0: 10, 1: 20, 2: 30, 3: 45}, KeyNorm())
    shared = pair.cache.num_pages()
    pair.cache.batch_repeat_interleave(2)
    assert pair.cache.num_pages() == shared
    ids = tokens(2, 1, seed=8)
    with torch.no_grad():
        both = pair.model(
            ids, position_ids=torch.full((2, 1), 45), past_key_values=pair.cache, attention_mask=torch.ones(2, 46)
        ).logits
    for row in range(2):
        lone = Pair("llama", length=45, page_size=4)
        lone.cache.crop_layers({0: 10, 1: 20, 2: 30, 3: 45}, KeyNorm())
        with torch.no_grad():
            alone = lone.model(ids[row : row + 1], position_ids=torch.tensor([[45]]), past_key_values=lone.cache).logits
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-5)
    # Lengths 10, 20, 30 and 45 in pages of 4: tails of 2, 0, 2 and 1 tokens. A shared tail is copied for one of the
    # two; where there is none, each takes a fresh page.
    assert pair.cache.num_pages() == shared + 1 + 2 + 1 + 1
    pair.cache.check()


def test_a_growing_pool_gives_memory_back_after_crops_and_a_reset() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=16)
    with torch.no_grad():
        for part in tokens(1, 2048).split(512, dim=1):
            model(part, past_key_values=cache)
        full = cache.nbytes
        assert full >= 2048 * cache.memory.groups[0].spec.bytes_per_token
        cache.crop_layers(dict.fromkeys(range(4), 512), StreamingLLM())
        assert cache.nbytes <= 0.27 * full
        keys = [layer.keys.clone() for layer in cache.layers]
        model(tokens(1, 1), past_key_values=cache)
        assert all(torch.equal(layer.keys[:, :, :512], old) for layer, old in zip(cache.layers, keys, strict=True))
    cache.check()
    cache.reset()
    assert cache.nbytes <= 0.01 * full


def test_a_crop_that_moves_survivors_off_shared_pages_lets_a_growing_pool_grow() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(tokens(1, 64), past_key_values=cache)
    cache.memory.trim()
    cache.batch_repeat_interleave(2)
    assert cache.memory.stats()[0].free_pages == 0
    cache.crop_layer(0, keep=list(range(0, 64, 2)), row=1)
    assert cache.layer_lengths(0) == [64] * 4
    assert cache.layer_lengths(1) == [32, 64, 64, 64]
    cache.check()
