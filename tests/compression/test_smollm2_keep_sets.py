"""Real keys: on SmolLM2 our methods keep what kvpress's keep, and single heads free what arithmetic allows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from paged_kv import PagedCache, detach
from paged_kv.compression import (
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyNorm,
    LagKV,
    SnapKV,
    compress,
    pyramid,
)
from tests.compression.press_models import kept_by_press, kept_by_us, plain, run

kvpress = pytest.importorskip("kvpress")
pytestmark = [pytest.mark.weights, pytest.mark.slow]

LENGTH, HEADS = 1024, 3


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> tuple[Any, torch.Tensor, dict[str, PagedCache]]:
    """The model, 1024 tokens of our own documentation, and caches with every query recorded."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :LENGTH]
    assert ids.shape[1] == LENGTH
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    caches = {}
    for lanes in ("head", "layer"):
        cache = PagedCache.for_model(model, lanes=lanes)
        cache.memory.record_queries(LENGTH)
        run(model, ids, cache)
        caches[lanes] = cache
    detach(model)
    return model, ids, caches


@pytest.mark.parametrize(
    ("policy", "budget", "press", "lanes"),
    [
        pytest.param(lambda m: KeyNorm(), 512, lambda: kvpress.KnormPress(0.5), "head", id="key norm"),
        pytest.param(lambda m: SnapKV(), 256, lambda: kvpress.SnapKVPress(0.75), "head", id="snapkv"),
        pytest.param(lambda m: TOVA(), 512, lambda: kvpress.TOVAPress(0.5), "layer", id="tova"),
        pytest.param(
            lambda m: ExpectedAttention.for_model(m, queries=LENGTH),
            512,
            lambda: kvpress.ExpectedAttentionPress(0.5),
            "head",
            id="expected attention",
        ),
        # 4 sinks, 252 newest and the 43 best of each of 6 blocks.
        pytest.param(lambda m: LagKV(), 514, lambda: kvpress.LagKVPress(1 - 514.5 / LENGTH), "head", id="lagkv"),
        pytest.param(
            lambda m: SnapKV(),
            pyramid(range(30), 512, smallest=64, length=LENGTH),
            lambda: kvpress.PyramidKVPress(0.5),
            "head",
            id="pyramidkv",
        ),
    ],
)
def test_keep_sets_are_the_same(smollm2: Any, policy: Any, budget: Any, press: Any, lanes: str) -> None:
    model, ids, caches = smollm2
    cache = copy.deepcopy(caches[lanes])
    compress(cache, policy(model), budget)
    assert kept_by_us(cache) == kept_by_press(model, plain(press()), ids)


@pytest.mark.parametrize(("ratio", "least"), [(0.5, 0.49), (0.75, 0.74), (0.9, 0.89)])
def test_adakv_frees_single_heads_with_the_logits_of_kvpress(smollm2: Any, ratio: float, least: float) -> None:
    model, ids, caches = smollm2
    model.set_attn_implementation("paged_kv")  # a copied cache goes by the attention that it was copied under
    cache = copy.deepcopy(caches["head"])
    full, budget = cache.num_pages(), int(LENGTH * (1 - ratio))
    compress(cache, AdaKV(SnapKV()), budget)
    kept = kept_by_us(cache)
    assert [sum(map(len, layer)) for layer in kept] == [HEADS * budget] * 30
    assert cache.num_pages() == sum(-(-len(head) // 16) for layer in kept for head in layer)
    assert 1 - cache.num_pages() / full >= least
    model.set_attn_implementation("sdpa")
    masked = DynamicCache()
    with plain(kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)))(model):
        run(model, ids, masked)
    token = ids[:, 5:6]
    want = run(model, token, masked)
    model.set_attn_implementation("paged_kv")
    got = run(model, token, cache)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
