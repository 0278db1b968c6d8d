"""Policies per request in a continuous batch: each request's tokens are those of the drop-in cache alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from paged_kv import PagedCache, detach
from paged_kv.compression import AdaKV, Chain, KeyNorm, LagKV, StreamingLLM, compress, pyramid
from paged_kv.compression.kvpress import policy
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams
from tests.tiny import tiny_model, tokens


def alone(model: Any, ids: torch.Tensor, chosen: Any, budget: Any, count: int) -> list[int]:
    """Greedy tokens after one crop at the end of the prompt, through the drop-in cache."""
    cache = PagedCache.for_model(model, lanes="head")
    made: list[int] = []
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
        compress(cache, chosen, budget)
        for step in range(count):
            token = logits[:, -1:].argmax(-1)
            made.append(int(token))
            position = torch.tensor([[ids.shape[1] + step]])
            logits = model(token, past_key_values=cache, position_ids=position).logits
    detach(model)
    return made


def test_requests_with_policies_of_their_own_run_together_as_each_alone() -> None:
    model = tiny_model("llama")
    work: list[tuple[Any, Any]] = [
        (KeyNorm(), 20),
        (StreamingLLM(2), 9),
        (AdaKV(KeyNorm()), 12),
        (LagKV(lag=8), 24),
        (Chain([KeyNorm(), StreamingLLM(1)]), 10),
        (KeyNorm(), pyramid(range(4), 16)),
    ]
    if importlib.util.find_spec("kvpress"):
        import kvpress

        work += [(policy(kvpress.KeyDiffPress()), 15), (policy(kvpress.AdaKVPress(kvpress.KnormPress())), 11)]
    prompts = [tokens(1, 30 + 7 * number, seed=number) for number in range(len(work))]
    want = [alone(model, ids, chosen, budget, 8) for ids, (chosen, budget) in zip(prompts, work, strict=True)]
    options = EngineOptions(num_pages=4000, lanes="head", page_size=4, enable_prefix_caching=False)
    results = {}
    with Engine(model, None, options) as engine:
        for number, (ids, (chosen, budget)) in enumerate(zip(prompts, work, strict=True)):
            budgets = tuple(budget.values()) if isinstance(budget, dict) else budget
            params = SamplingParams(
                max_tokens=8, temperature=0.0, ignore_eos=True, compression=Compression(chosen, budgets)
            )
            engine.add_request(str(number), ids[0].tolist(), params)
        while engine.has_unfinished:
            results.update({result.request_id: list(result.token_ids) for result in engine.step()})
        assert engine.stats().pages_used == 0
    assert [results[str(number)] for number in range(len(work))] == want
