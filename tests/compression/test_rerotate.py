"""StreamingLLM with turned keys equals a model that counts positions within its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from allocator import KVError
from paged_kv import PagedCache
from paged_kv.compression import KeyNorm, Rotary, StreamingLLM, UnsupportedMethod, compress, crop
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams
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


def positions_within_the_cache(model: Any, ids: Tensor, sinks: int, budget: int, every: int, count: int) -> list[int]:
    """Greedy tokens of a plain cache whose positions are always 0 to its length: cropped after the prompt, then again
    and again after `every` tokens, each time with the kept keys turned to where they stand now."""
    model.set_attn_implementation("sdpa")
    cache, rotary, made, token = DynamicCache(config=model.config), Rotary.of(model), [], ids
    with torch.no_grad():
        for step in range(count):
            start = 0 if step == 0 else cache.layers[0].keys.shape[2]
            where = torch.arange(start, start + token.shape[1])[None]
            logits = model(token, past_key_values=cache, position_ids=where).logits
            live = cache.layers[0].keys.shape[2]
            if step % every == 0 and live > budget:
                kept = torch.tensor([*range(sinks), *range(live - budget + sinks, live)])
                for layer in cache.layers:
                    layer.keys = rotary.turn(layer.keys[:, :, kept], torch.arange(budget) - kept)
                    layer.values = layer.values[:, :, kept]
            token = logits[:, -1:].argmax(dim=-1)
            made.append(int(token))
    return made


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_requests_in_the_engine_turn_keys_at_every_crop(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight *= 5  # attention far from uniform, so that greedy tokens depend on positions
    prompts = [tokens(1, 40 + 9 * number, seed=number) for number in range(3)]
    want = [positions_within_the_cache(model, ids, 2, 12, 4, 15) for ids in prompts]
    unturned = StreamingLLM(2)
    turned = StreamingLLM(2, rerotate=True).for_model(model)

    def run(policies: list[StreamingLLM], **changes: Any) -> list[Any]:
        options = EngineOptions(num_pages=999, page_size=4, enable_prefix_caching=False, **changes)
        with Engine(model, None, options) as engine:
            for number, (ids, policy) in enumerate(zip(prompts, policies, strict=True)):
                asked = Compression(policy, 12, every=4)
                params = SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True, compression=asked)
                engine.add_request(str(number), ids[0].tolist(), params)
            # Beside them, a request whose completions share pages.
            shared = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
            engine.add_request("shared", prompts[0][0].tolist(), shared)
            results = {}
            while engine.has_unfinished:
                results.update({result.request_id: result for result in engine.step()})
            engine.check()
            assert engine.stats().pages_used == 0
        return [results[str(number)] for number in range(3)]

    assert [list(result.token_ids) for result in run([turned] * 3)] == want
    assert [list(result.token_ids) for result in run([turned] * 3, lanes="head")] == want
    mixed = [list(result.token_ids) for result in run([turned, unturned, turned])]
    assert mixed[::2] == want[::2]
    assert mixed[1] != want[1], "where keys stay is seen in the tokens"


def test_completions_that_share_pages_are_not_turned_and_say_so() -> None:
    model = tiny_model("llama")
    policy = StreamingLLM(2, rerotate=True).for_model(model)
    with Engine(model, None, EngineOptions(num_pages=999, page_size=4, enable_prefix_caching=False)) as engine:
        asked = Compression(policy, 24, every=1)
        params = SamplingParams(n=2, max_tokens=8, temperature=1.0, seed=0, ignore_eos=True, compression=asked)
        engine.add_request("0", tokens(1, 40)[0].tolist(), params)
        [result] = [result for _ in range(20) for result in engine.step()]
    assert result.finish_reason == "error"
    assert "cannot be rewritten while sequences share pages" in str(result.error)
    with Engine(model, None, EngineOptions(num_pages=999, enable_prefix_caching=True)) as engine:
        params = SamplingParams(compression=Compression(policy, 24))
        with pytest.raises(ValueError, match="set enable_prefix_caching=False"):
            engine.add_request("0", tokens(1, 40)[0].tolist(), params)
