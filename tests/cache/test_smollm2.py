"""Real weights: SmolLM2-135M in fp32 gives the same 64 tokens through pages as through `DynamicCache`, 32 prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import paged_kv
from paged_kv import PagedCache

pytestmark = [pytest.mark.weights, pytest.mark.slow]

SUBJECTS = ["rain", "a lighthouse", "prime numbers", "bread", "the moon", "an old bicycle", "bees", "a lost letter"]
FORMS = [
    "Write one sentence about {}.",
    "Q: Why do people like {}?\nA:",
    "List three facts about {}, then explain the most surprising of them to a child of eight years:",
    "Once upon a time there was a story about {}",
]
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval(), tokenizer


def both(model: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor, PagedCache]:
    """The tokens through `DynamicCache` on stock attention, and through pages."""
    options: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **options)
        cache = PagedCache.for_model(model)
        got = model.generate(**inputs, past_key_values=cache, **options)
    finally:
        paged_kv.detach(model)
        torch.set_num_threads(threads)
    return expected, got, cache


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_left_padded_batches_of_eight(smollm2: tuple[Any, Any], first: int) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(PROMPTS[first : first + 8], return_tensors="pt", padding=True)
    expected, got, cache = both(model, inputs)
    assert torch.equal(got, expected)
    real = inputs["attention_mask"].sum(dim=1) + 63
    assert [cache.layer_lengths(row)[0] for row in range(8)] == real.tolist(), "pads hold no slots"
    cache.check()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_prompt_alone(smollm2: tuple[Any, Any], prompt: str) -> None:
    model, tokenizer = smollm2
    expected, got, _ = both(model, tokenizer(prompt, return_tensors="pt"))
    assert torch.equal(got, expected)
