"""A load that makes an uncompressed engine preempt, and the same load with requests that may be cropped instead."""

from __future__ import annotations

import time
from typing import Any

from bench.compression.throughput import Load, jobs_of
from paged_kv.compression import KeyNorm, SnapKV, StreamingLLM
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams


def run(net: Any, tokenizer: Any, load: Load) -> None:
    """Print what each way computed, how often it preempted or cropped, and how much of its output is as without."""
    jobs = jobs_of(net, tokenizer, load)
    floor = load.budget
    print(
        f"{load.requests} requests of {load.prompt_len} tokens and {load.new_len} new in a pool for {load.held}; "
        f"under pressure a layer keeps {floor} tokens"
    )
    print("| | seconds | tokens computed | preemptions | pressure crops | outputs equal | tokens before a difference |")
    print("| --- " * 7 + "|")
    base: list[list[int]] = []
    for name, policy in (
        ("uncompressed", None),
        ("StreamingLLM", StreamingLLM()),
        ("KeyNorm", KeyNorm()),
        ("SnapKV", SnapKV(window=32)),
    ):
        compression = None if policy is None else Compression(policy, floor=floor)
        seconds, outputs, stats = _measure(net, jobs, load, compression)
        base = base or outputs
        same = sum(mine == theirs for mine, theirs in zip(outputs, base, strict=True))
        alike = [
            next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
            for mine, theirs in zip(outputs, base, strict=True)
        ]
        cells = [f"{seconds:.1f}", str(stats.num_computed_tokens), str(stats.num_preemptions)]
        cells += [str(stats.num_pressure_crops), f"{same} of {len(base)}", f"{sum(alike) / sum(map(len, base)):.0%}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _measure(net: Any, jobs: Any, load: Load, compression: Any) -> tuple[float, list[list[int]], Any]:
    pages = 1 + load.held * net.config.num_hidden_layers * -(-(load.prompt_len + load.new_len) // 16)
    options = EngineOptions(num_pages=pages, enable_prefix_caching=False, num_draft_tokens=0)
    params = SamplingParams(max_tokens=load.new_len, temperature=0.0, ignore_eos=True, compression=compression)
    results = {}
    with Engine(net, None, options) as engine:
        for number, job in enumerate(jobs):
            engine.add_request(str(number), list(job.prompt), params)
        start = time.perf_counter()
        while engine.has_unfinished:
            results.update({result.request_id: list(result.token_ids) for result in engine.step()})
        seconds, stats = time.perf_counter() - start, engine.stats()
    return seconds, [results[str(number)] for number in range(len(jobs))], stats
