"""StreamingLLM with turned keys equals a model that counts positions within its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from allocator import KVError
from paged_kv import PagedCache
from paged_kv.compression import KeyNorm, Rotary, StreamingLLM, UnsupportedMethod, compress, crop
from tests.tiny import padded, tiny_model, tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt neox"])
def test_attention_is_as_if_positions_were_counted_within_the_cache(family: str) -> None:
    model = tiny_model(family)
    policy = StreamingLLM(sinks=3, rerotate=True).for_model(model)
    ids = tokens(1, 60)
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        compress(cache, policy, 12)
        got = model(ids[:, 40:45], past_key_values=cache).logits
    # The reference: keys as computed, turned one by one to positions 0 to 11; then positions 12 to 16.
    model.set_attn_implementation("sdpa")
    plain, rotary = DynamicCache(config=model.config), Rotary.of(model)
    kept = torch.tensor([0, 1, 2, *range(31, 40)])
    with torch.no_grad():
        model(ids[:, :40], past_key_values=plain)
        for layer in plain.layers:
            layer.keys = rotary.turn(layer.keys[:, :, kept], torch.arange(12) - kept)
            layer.values = layer.values[:, :, kept]
        want = model(ids[:, 40:45], past_key_values=plain, position_ids=torch.arange(12, 17)[None]).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_crops_again_and_again_and_rows_of_a_padded_batch_keep_the_distances() -> None:
    model = tiny_model("llama")
    policy, rotary = StreamingLLM(sinks=2, rerotate=True).for_model(model), Rotary.of(model)
    inputs = padded(2, 30, [0, 9])
    cache, plain = PagedCache.for_model(model, page_size=4), PagedCache.for_model(model, page_size=4)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        for each in (cache, plain):
            model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=each)
    before = [plain.live_tokens(0, row).keys[0] for row in range(2)]  # the first layer's keys depend on tokens alone
    compress(cache, policy, 16)
    compress(cache, policy, 9)
    for row, seen in enumerate([30, 21]):
        kept = torch.tensor([0, 1, *range(seen - 7, seen)])
        want = rotary.turn(before[row][:, kept], torch.arange(seen - 9, seen) - kept)
        torch.testing.assert_close(cache.live_tokens(0, row).keys[0], want, rtol=0, atol=1e-5)
    cache.check()


def test_one_sequence_of_a_pool_is_cropped_alike() -> None:
    model = tiny_model("llama")
    policy = StreamingLLM(sinks=2, rerotate=True).for_model(model)
    first, second = PagedCache.for_model(model), PagedCache.for_model(model)
    with torch.no_grad():
        for cache in (first, second):
            model(tokens(1, 30), past_key_values=cache)
    compress(first, policy, 9)
    seq = second._batch.seqs[0]
    for layer in range(4):
        crop(second.memory, seq, layer, policy, 9)
        for one, other in zip(first.live_tokens(layer).keys, second.live_tokens(layer).keys, strict=True):
            assert torch.equal(one, other)
    assert crop(second.memory, seq, 0, KeyNorm(), 4) == 0, "nine tokens lie in one page, and so do four"


def test_shared_pages_are_never_rewritten() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(tokens(1, 40), past_key_values=cache)
    cache.batch_repeat_interleave(2)
    with pytest.raises(KVError, match="cannot be rewritten while sequences share pages"):
        compress(cache, StreamingLLM(sinks=2, rerotate=True).for_model(model), 9)
    assert cache.layer_lengths() == [40] * 4


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {}, "has no rotary embedding"),
        ("cohere2", {}, "layout that is not supported"),
        ("gemma3", {}, "has no rotary embedding that all its layers share"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "change with the length",
        ),
    ],
)
def test_a_model_whose_keys_cannot_be_turned_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedMethod, match=message):
        StreamingLLM(rerotate=True).for_model(tiny_model(family, **changes))
