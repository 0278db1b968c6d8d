"""Drop-in decode: seconds a step through `PagedCache` and through `DynamicCache`, same model, alternating in one run.

`python -m bench.dropin [--model DIR] [--rows 8] [--lengths 512,2048] [--steps 24] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import paged_kv
from paged_kv import PagedCache
from paged_kv.weights import demo_model


def decode(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each of `steps` greedy decode steps after a prefill of `ids`."""
    seconds = []
    with torch.inference_mode():
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        for _ in range(steps):
            token = logits[:, -1:].argmax(-1)
            begin = time.perf_counter()
            logits = model(token, past_key_values=cache).logits
            seconds.append(time.perf_counter() - begin)
    return seconds


def compare(model: Any, rows: int, length: int, steps: int, repeats: int) -> dict[str, Any]:
    """Median seconds a step of both caches at one batch size and prompt length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (rows, length), generator=generator)
    samples: dict[str, list[float]] = {"dynamic": [], "paged": []}
    for _ in range(repeats):
        paged_kv.detach(model)
        samples["dynamic"] += decode(model, DynamicCache(config=model.config), ids, steps)[2:]
        samples["paged"] += decode(model, PagedCache.for_model(model), ids, steps)[2:]
    paged_kv.detach(model)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {"rows": rows, "length": length, **medians, "ratio": medians["paged"] / medians["dynamic"]}


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2-135M-Instruct by default")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = options.model or demo_model()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()
    results = []
    print(f"{'rows':>5} {'length':>7} {'DynamicCache ms':>16} {'PagedCache ms':>14} {'ratio':>6}")
    for length in map(int, options.lengths.split(",")):
        result = compare(model, options.rows, length, options.steps, options.repeats)
        results.append(result)
        print(
            f"{result['rows']:>5} {length:>7} {result['dynamic'] * 1e3:>16.1f} {result['paged'] * 1e3:>14.1f} "
            f"{result['ratio']:>6.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
