"""Models under `torch.compile`: the graph breaks at the cache, the tokens are the same."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import paged_kv
from paged_kv import PagedCache
from tests.tiny import padded, tiny_model, tokens

PARTS = (9, 1, 4)


def logits(model: torch.nn.Module, run: object, cache: object) -> list[torch.Tensor]:
    """The logits of a text fed in parts, through one cache."""
    assert callable(run)
    with torch.no_grad():
        return [run(part, past_key_values=cache).logits for part in tokens(1, sum(PARTS)).split(PARTS, dim=1)]


@pytest.mark.parametrize(
    "attention",
    [
        "paged_kv",
        pytest.param("sdpa", marks=pytest.mark.nightly),
        pytest.param("eager", marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_model_gives_the_logits_of_an_uncompiled_one(attention: str) -> None:
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=32)
    model.set_attn_implementation("sdpa")
    expected = logits(model, model, DynamicCache(config=model.config))
    model.set_attn_implementation(attention)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        cache = PagedCache(config=model.config, page_size=3)
        for ours, theirs in zip(logits(model, compiled, cache), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        cache.check()


@pytest.mark.nightly
def test_a_compiled_model_reads_cropped_layers_and_padded_rows() -> None:
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=32)
    inputs = padded(2, 12, [0, 5])
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
    torch._dynamo.reset()
    outcomes = []
    for run in (model, torch.compile(model, backend="eager")):
        cache = PagedCache.for_model(model, page_size=3)
        with torch.no_grad():
            run(**inputs, past_key_values=cache)
            cache.crop_layer(1, keep_last=4, sinks=1)
            outcomes.append(run(tokens(2, 3), attention_mask=mask, past_key_values=cache).logits)
        assert cache.layer_lengths() == [15, 8]
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0, atol=1e-5)
    paged_kv.detach(model)


@pytest.mark.nightly
def test_inductor_gives_the_same_logits() -> None:
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=32)
    expected = logits(model, model, DynamicCache(config=model.config))
    torch._dynamo.reset()
    cache = PagedCache.for_model(model, page_size=3)
    for ours, theirs in zip(logits(model, torch.compile(model), cache), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
