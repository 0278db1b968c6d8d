"""The rest of the contract: copies, rollback behind windows, autocast, gradients, inference mode, construction."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

import paged_kv
from allocator import KVError
from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from paged_kv.cache import BehindWindow
from paged_kv.forward import GradientsNeeded
from paged_kv.persist import UnreadableCache
from tests.tiny import padded, tiny_model, tokens


def test_a_deep_copy_goes_its_own_way() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=3)
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
        cache.crop_layer(1, keep_last=7)
        twin = copy.deepcopy(cache)
        first = model(tokens(1, 3), past_key_values=cache).logits
        assert twin.layer_lengths() == [30, 7, 30, 30]
        second = model(tokens(1, 3), past_key_values=twin).logits
    assert torch.equal(first, second)
    assert twin._config is cache._config, "a later change of the model's attention is seen by both"
    cache.reset()
    assert twin.layer_lengths() == [33, 10, 33, 33]
    twin.check()


@pytest.mark.skipif(not CROP_REMOVES, reason="this release refuses rollback behind a window itself")
@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant"])
def test_drafts_rolled_back_over_windows_give_the_same_logits(drafts: str) -> None:
    model = tiny_model("gemma3")
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if drafts == "assistant":
        options = {"assistant_model": tiny_model("gemma3", seed=3)}
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "eos_token_id": None}
    inputs = padded(1, 37, [0])
    expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=30, **options)
    cache = PagedCache.for_model(model, page_size=3)
    got = model.generate(**inputs, past_key_values=cache, max_new_tokens=30, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    cache.check()


def test_windows_free_the_pages_behind_them_and_refuse_a_rollback_into_them() -> None:
    model = tiny_model("gemma3")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        for part in tokens(1, 120).split(30, dim=1):
            model(part, past_key_values=cache)
    windowed = [length for layer, length in enumerate(cache.layer_lengths()) if cache.layers[layer].is_sliding]
    full = [length for layer, length in enumerate(cache.layer_lengths()) if not cache.layers[layer].is_sliding]
    assert set(full) == {120}
    assert max(windowed) <= 15 + 30 + 3
    with pytest.raises(BehindWindow, match="activate_past_recording"):
        cache.crop(-40)
    cache.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_as_close_as_stock_attention(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    ids = tokens(1, 30)
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", dtype):
            stock = model(ids, past_key_values=DynamicCache(config=model.config)).logits
            cache = PagedCache.for_model(model, page_size=3)
            parts = [model(part, past_key_values=cache).logits for part in ids.split([20, 10], dim=1)]
    ours, theirs = (torch.cat(parts, dim=1) - exact).abs().max(), (stock - exact).abs().max()
    assert ours <= 2 * theirs


def test_a_backward_pass_through_pages_is_an_error_and_a_forward_with_gradients_is_not() -> None:
    model = tiny_model("llama")
    for attention in ("paged_kv", "sdpa"):
        model.set_attn_implementation(attention)
        cache = PagedCache(config=model.config)
        model(tokens(1, 10), past_key_values=cache)
        loss = model(tokens(1, 4), past_key_values=cache).logits.sum()
        with pytest.raises(GradientsNeeded, match="use_cache=False"):
            loss.backward()
        assert not cache.memory.groups[0].store.keys.requires_grad


def test_a_cache_filled_in_inference_mode_serves_outside_of_it() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model)
    with torch.inference_mode():
        first = model(tokens(1, 10), past_key_values=cache).logits
    with torch.no_grad():
        second = model(tokens(1, 1), past_key_values=cache).logits
        whole = model(torch.cat([tokens(1, 10), tokens(1, 1)], dim=1)).logits
    torch.testing.assert_close(torch.cat([first.clone(), second], dim=1), whole, rtol=0, atol=1e-5)


def test_embeddings_instead_of_ids() -> None:
    model = tiny_model("llama")
    embeddings = model.get_input_embeddings()(tokens(1, 20)).detach()
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(inputs_embeds=embeddings, past_key_values=DynamicCache(config=model.config), **options)
    got = model.generate(inputs_embeds=embeddings, past_key_values=PagedCache.for_model(model), **options)
    assert torch.equal(got, expected)


def test_data_of_another_cache_is_copied_in_and_iteration_gives_it_back() -> None:
    model = tiny_model("llama")
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=dense)
        for cache in (PagedCache(dense, config=model.config), PagedCache(dense)):
            assert cache.get_seq_length() == 20
            for ours, theirs in zip(cache, dense, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])
            twin = copy.deepcopy(dense)
            expected = model(tokens(1, 2), past_key_values=twin).logits
            got = model(tokens(1, 2), past_key_values=cache).logits
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_eager_attention_still_returns_its_weights() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(tokens(1, 12), past_key_values=DynamicCache(), output_attentions=True).attentions
        got = model(tokens(1, 12), past_key_values=PagedCache.for_model(model), output_attentions=True).attentions
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_attached_switches_a_model_and_puts_it_back_after_an_exception() -> None:
    model = tiny_model("llama")
    names = []

    def fail_inside() -> None:
        with paged_kv.attached(model):
            names.append(model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert names == ["paged_kv"]
    assert model.config._attn_implementation == "sdpa"


def test_assigned_survivors_free_pages_and_keep_their_positions() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(tokens(1, 32), past_key_values=cache)
        layer = cache.layers[2]
        keys, values = layer.keys, layer.values
        keep = torch.tensor([30, 3, 17, 9])
        layer.keys = keys[:, :, keep]
        assert layer.keys.shape[2] == 32, "still the old ones until the values are there"
        layer.values = values[:, :, keep]
    assert cache.layer_lengths() == [32, 32, 4, 32]
    batch = cache._batch
    assert batch is not None
    assert cache.memory.positions(batch.seqs[0], 2).tolist() == [3, 9, 17, 30]
    assert torch.equal(cache.layers[2].keys, keys[:, :, keep.sort().values])
    assert cache.num_pages() == 3 * 8 + 1
    with pytest.raises(KVError, match="assigned 33"):
        cache.assign_layer(0, keys=torch.zeros(1, 4, 33, 16), values=torch.zeros(1, 4, 33, 16))
    cache.check()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_saved_cache_goes_on_with_the_same_logits(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    cache = PagedCache.for_model(model, page_size=3)
    inputs = padded(2, 40, [0, 9])
    more = {"attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)}
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.crop_layer(1, keep_last=7)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PagedCache.load(tmp_path / "cache.safetensors", model)
        expected = model(tokens(2, 2), **more, past_key_values=cache).logits
        assert torch.equal(model(tokens(2, 2), **more, past_key_values=loaded).logits, expected)
    loaded.check()


def test_files_that_are_no_saved_caches_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(KVError, match="no tokens"):
        PagedCache.for_model(model).save(tmp_path / "empty")
    (tmp_path / "text").write_text("not a cache")
    with pytest.raises(UnreadableCache, match="no saved cache"):
        PagedCache.load(tmp_path / "text", model)
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights")
    with pytest.raises(UnreadableCache, match="no paged_kv header"):
        PagedCache.load(tmp_path / "weights", model)
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(tokens(1, 10), past_key_values=cache)
    cache.save(tmp_path / "cache")
    whole = (tmp_path / "cache").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableCache):
        PagedCache.load(tmp_path / "cut", model)
    with pytest.raises(ValueError, match="layers"):
        PagedCache.load(tmp_path / "cache", tiny_model("llama", num_hidden_layers=2))


def test_the_memory_map_counts_every_page_of_every_layer() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4, num_pages=65)
    assert cache.memory_map() == ()
    with torch.no_grad():
        model(**padded(2, 20, [0, 8]), past_key_values=cache)
    cache.crop_layer(1, keep_last=4)
    [chart] = cache.memory_map()
    assert [chart.held_in(layer) for layer in range(4)] == [5 + 3, 1 + 1, 5 + 3, 5 + 3]
    assert (chart.held, chart.free) == (cache.num_pages(), 64 - cache.num_pages())


def test_a_crop_of_layers_of_two_shapes_changes_all_or_none() -> None:
    cache = PagedCache(page_size=4)
    for layer, heads in enumerate([2, 2, 4]):
        cache.update(torch.randn(1, heads, 10, 8), torch.randn(1, heads, 10, 8), layer)
    assert len(cache.memory.groups) == 2
    batch = cache._batch
    assert batch is not None
    with pytest.raises(KVError, match="outside the 10"):
        cache.memory.crop(batch.seqs[0], {0: [1, 2], 2: [3, 10]})
    assert cache.layer_lengths() == [10, 10, 10]
    assert cache.memory.crop(batch.seqs[0], {0: [1, 2], 2: [3]}) == 2 + 2
    assert cache.layer_lengths() == [2, 10, 1]
    cache.check()
