"""Tokens a second of the engine at a fixed pool, uncompressed and with each method.

The pool holds `held` uncompressed requests; all requests wait from the start, so that how many run at once is decided
by their pages alone.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.compression.presses import prompt
from paged_kv.compression import AdaKV, KeyNorm, LagKV, StreamingLLM, pyramid
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """What is run: requests of `prompt_len` and `new_len` tokens, over a pool for `held` of them uncompressed."""

    requests: int = 64
    prompt_len: int = 1024
    new_len: int = 512
    held: int = 8
    share: float = 0.25


def run(net: Any, load: Load) -> None:
    """Print the table; every method in an engine of its own."""
    layers = list(range(net.config.num_hidden_layers))
    budget = int((load.prompt_len + load.new_len) * load.share)
    every = max(16, budget // 4)
    by_layer = tuple(pyramid(layers, budget, length=load.prompt_len).values())
    methods: list[tuple[str, Any, Compression | None]] = [
        ("uncompressed", "layer", None),
        ("StreamingLLM", "layer", Compression(StreamingLLM(), budget, every)),
        ("KeyNorm", "layer", Compression(KeyNorm(), budget, every)),
        ("LagKV", "layer", Compression(LagKV(), budget, every)),
        ("KeyNorm, pyramid", "layer", Compression(KeyNorm(), by_layer, every)),
        ("AdaKV(KeyNorm)", "head", Compression(AdaKV(KeyNorm()), budget, every)),
    ]
    print(asdict(load), f"budget {budget} tokens, cropped every {every}")
    print("| method | tokens/s | most running | pages freed by crops | preemptions |\n| --- | --- | --- | --- | --- |")
    for name, lanes, compression in methods:
        print("| " + " | ".join([name, *_measure(net, load, lanes, compression)]) + " |", flush=True)


def _measure(net: Any, load: Load, lanes: Any, compression: Compression | None) -> list[str]:
    tokens = load.prompt_len + load.new_len
    tables = net.config.num_hidden_layers * (net.config.num_key_value_heads if lanes == "head" else 1)
    options = EngineOptions(
        num_pages=1 + load.held * tables * -(-tokens // 16),
        lanes=lanes,
        enable_prefix_caching=False,
        num_draft_tokens=0,
    )
    params = SamplingParams(max_tokens=load.new_len, temperature=0.0, ignore_eos=True, compression=compression)
    running = 0
    with Engine(net, None, options) as engine:
        for number in range(load.requests):
            ids = (prompt(load.prompt_len)[0] + number) % net.config.vocab_size
            engine.add_request(str(number), ids.tolist(), params)
        begin = time.perf_counter()
        made = 0
        while engine.has_unfinished:
            made += sum(len(result.token_ids) for result in engine.step())
            running = max(running, engine.stats().num_running)
        seconds = time.perf_counter() - begin
        stats = engine.stats()
    rate = f"{made / seconds:.0f}"
    return [rate, str(running), str(stats.pages_freed_by_crops), str(stats.num_preemptions)]
