"""Policies per request in a continuous batch: each request's tokens are those of the drop-in cache alone."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from paged_kv import PagedCache, detach
from paged_kv.compression import (
    H2O,
    TOVA,
    AdaKV,
    Chain,
    ExpectedAttention,
    KeyNorm,
    LagKV,
    PerLayer,
    Protect,
    SnapKV,
    StreamingLLM,
    compress,
    pyramid,
    record_queries,
)
from paged_kv.compression.kvpress import policy
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams
from tests.tiny import tiny_model, tokens


def spread_model() -> Any:
    """A random model whose attention is far from uniform, so that no two tokens score alike to rounding."""
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight *= 5
    return model


def alone(model: Any, ids: torch.Tensor, chosen: Any, budget: Any, count: int) -> list[int]:
    """Greedy tokens after one crop at the end of the prompt, through the drop-in cache."""
    cache = PagedCache.for_model(model, lanes="head")
    record_queries(cache, chosen)
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
    model = spread_model()
    work: list[tuple[Any, Any]] = [
        (KeyNorm(), 20),
        (StreamingLLM(2), 9),
        (AdaKV(KeyNorm()), 12),
        (LagKV(lag=8), 24),
        (Chain([KeyNorm(), StreamingLLM(1)]), 10),
        (KeyNorm(), pyramid(range(4), 16)),
        (SnapKV(window=6), 17),
        (TOVA(), 8),
        (H2O(recent=3, queries=20), 13),
        (ExpectedAttention.for_model(model, queries=16, horizon=32), 14),
        (AdaKV(SnapKV(window=4)), 15),
        (PerLayer(Protect(TOVA(), 2, 3), {2: SnapKV(window=5)}), 19),
    ]
    if importlib.util.find_spec("kvpress"):
        import kvpress

        work += [(policy(kvpress.KeyDiffPress()), 15), (policy(kvpress.AdaKVPress(kvpress.KnormPress())), 11)]
        work += [(policy(kvpress.SnapKVPress(window_size=7)), 18), (policy(kvpress.TOVAPress()), 9)]
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


def run(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """All results in the order of the work, and the engine empty and sound afterwards."""
    for number, (ids, params) in enumerate(work):
        engine.add_request(str(number), ids, params)
    results = {}
    while engine.has_unfinished:
        results.update({result.request_id: result for result in engine.step()})
    engine.check()
    assert engine.stats().pages_used == 0
    return [results[str(number)] for number in range(len(work))]


def greedy(compression: Any = None, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, compression=compression)


def test_a_policy_with_a_budget_is_all_that_a_request_needs() -> None:
    model, ids = spread_model(), tokens(1, 60)
    want = alone(model, ids, SnapKV(window=6), 17, 8)
    with Engine(model, None, EngineOptions(num_pages=999, page_size=4, lanes="head")) as engine:
        [result] = run(engine, [(ids[0].tolist(), greedy(SnapKV(window=6, budget=17)))])
        assert engine.stats().mean_live_len == (17 + 7,) * 4
    assert list(result.token_ids) == want


def test_queries_are_recorded_for_the_sequences_that_need_them_and_only_until_their_last_crop() -> None:
    model = spread_model()
    prompts = [tokens(1, 40, seed=number)[0].tolist() for number in range(3)]
    with Engine(model, None, EngineOptions(num_pages=999, page_size=4)) as engine:
        engine.add_request("plain", prompts[0], greedy(max_tokens=12))
        engine.add_request("key norm", prompts[1], greedy(KeyNorm(budget=9), 12))
        engine.step()
        assert engine.memory.queries is None, "nobody asked"
        engine.add_request("once", prompts[2], greedy(SnapKV(window=5, budget=9), 12))
        engine.add_request("again", prompts[0], greedy(Compression(TOVA(), 9, every=4), 12))
        engine.step()
        queries = engine.memory.queries
        rows = {row.request.request_id: row.seq for row in engine._scheduler.running}
        held = {name: queries.recent(seq, 1, engine.memory.seen_len(seq)) for name, seq in rows.items()}
        assert {name: recent is not None for name, recent in held.items()} == {
            "plain": False, "key norm": False, "once": True, "again": True,
        }  # fmt: skip
        assert held["once"].states.shape[1] == 5
        assert held["again"].states.shape[1] == 1
        engine.step()
        assert queries.recent(rows["once"], 1, engine.memory.seen_len(rows["once"])) is None, "no more crops to come"
        assert queries.recent(rows["again"], 1, engine.memory.seen_len(rows["again"])) is not None
        while engine.has_unfinished:
            engine.step()
        assert queries.is_idle


def test_cached_prefixes_change_nothing_for_methods_that_read_queries() -> None:
    model, ids = spread_model(), tokens(1, 60)[0].tolist()
    options = EngineOptions(num_pages=999, page_size=4, max_num_batched_tokens=32, max_num_seqs=8)
    asked = greedy(Compression(SnapKV(window=6), 17, every=5), 14)
    with Engine(model, None, options) as engine:
        [first] = run(engine, [(ids, asked)])
        run(engine, [(ids, greedy())])
        again, plain = run(engine, [(ids, asked), (ids, greedy(max_tokens=14))])
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 52, "whole blocks before the window"
    assert list(again.token_ids) == list(first.token_ids)
    with Engine(model, None, options) as engine:
        assert list(run(engine, [(ids, greedy(max_tokens=14))])[0].token_ids) == list(plain.token_ids)
