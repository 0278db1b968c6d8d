"""Bytes that each of our own methods frees, beside what arithmetic allows."""

from __future__ import annotations

from typing import Any

import torch

from bench.compression.presses import prompt
from paged_kv import PagedCache
from paged_kv.compression import (
    H2O,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyNorm,
    LagKV,
    Random,
    SnapKV,
    StreamingLLM,
    compress,
    pyramid,
    record_queries,
)


def methods(net: Any, layers: list[int], length: int, budget: int) -> list[tuple[str, Any, int | dict[int, int]]]:
    """Name, policy and budgets of what is measured."""
    snap = SnapKV(window=16)
    return [
        ("Random", Random(), budget),
        ("StreamingLLM", StreamingLLM(), budget),
        ("KeyNorm", KeyNorm(), budget),
        ("SnapKV", snap, budget),
        ("TOVA", TOVA(), budget),
        ("H2O", H2O(), budget),
        ("ExpectedAttention", ExpectedAttention.for_model(net), budget),
        ("LagKV", LagKV(lag=64), budget),
        ("PyramidKV: SnapKV, pyramid", snap, pyramid(layers, budget, smallest=16, length=length)),
        ("AdaKV(SnapKV)", AdaKV(snap), budget),
        ("AdaKV(KeyNorm)", AdaKV(KeyNorm()), budget),
    ]


def run(net: Any, length: int, shares: list[float]) -> None:
    """Print what is freed at each share of the tokens kept, with page tables by layer and by head."""
    ids = prompt(length) % net.config.vocab_size
    print(
        f"one row of {length} tokens, pages of 16; per cent of the full cache's bytes freed, and live tokens of layer 0"
    )
    print("| method | budget | by layer | by head | arithmetic |\n| --- | --- | --- | --- | --- |")
    for share in shares:
        budget = int(length * share)
        names = methods(net, list(range(net.config.num_hidden_layers)), length, budget)
        for index, (name, *_) in enumerate(names):
            cells = [_freed(net, ids, methods, index, budget, lanes) for lanes in ("layer", "head")]
            print(f"| {name} | {budget} | {cells[0]} | {cells[1]} | {100 * (1 - budget / length):.1f} % |")


def _freed(net: Any, ids: torch.Tensor, make: Any, index: int, budget: int, lanes: Any) -> str:
    cache = PagedCache.for_model(net, lanes=lanes)
    _, policy, budgets = make(net, list(range(net.config.num_hidden_layers)), ids.shape[1], budget)[index]
    record_queries(cache, policy)
    with torch.inference_mode():
        net(ids, past_key_values=cache, logits_to_keep=1)
    before = cache.num_pages()
    compress(cache, policy, budgets)
    cache.check()
    live = sorted({int(n) for n in (cache.live_columns(0) >= 0).sum(dim=2).flatten()})
    return f"{100 * (1 - cache.num_pages() / before):.1f} % ({live[0]}..{live[-1]})"
