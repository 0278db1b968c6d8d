"""Benchmarks of compression.

    python -m bench.compression --table                 every press of kvpress; writes docs/compression.md
    python -m bench.compression --press AdaKV KVzip     some presses, written nowhere
    python -m bench.compression --memory                bytes freed by our own methods
    python -m bench.compression --throughput            tokens a second at a fixed pool
    python -m bench.compression --quality               perplexity and needles beside it
    python -m bench.compression --pressure              a load that preempts, and the same cropped under pressure
    python -m bench.compression --workload-b            2048-token prompts with a budget, against model.generate

Presses and memory are measured on a small random model, the others on SmolLM2-135M-Instruct; `--model FOLDER` takes
another, `--model random` the small one. Scale down with --requests, --prompt-len, --new-len and --held: what was run is
printed with the figures.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from bench.compression import memory, presses, pressure, quality, throughput


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("table", "memory", "throughput", "quality", "pressure", "workload-b"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--press", nargs="*")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's choice")
    parser.add_argument("--method", nargs="*", help="of --throughput and --quality; all by default")
    parser.add_argument("--length", type=int, default=512, help="prompt of --memory")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.5, 0.25, 0.1], help="shares of --memory")
    for name, default in (("requests", 64), ("prompt-len", 1024), ("new-len", 512), ("held", 8), ("every", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the load")
    parser.add_argument("--share", type=float, default=0.25, help="budget as a share of the prompt")
    parser.add_argument("--depth", type=float, nargs="*", default=[0.1, 0.5, 0.9], help="of the needles of --quality")
    parser.add_argument("--limit", type=int, default=4, help="requests of --workload-b")
    parser.add_argument("--budget", type=int, default=512, help="tokens a layer of --workload-b")
    parser.add_argument("--no-baseline", action="store_true", help="--workload-b without model.generate")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for."""
    options = parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.table or options.press:
        from bench.compression import table  # needs kvpress

        table.run(options.press)
    if options.memory:
        net, _ = _model(options.model or "random", options)
        memory.run(net, options.length, options.keep)
    if not (options.throughput or options.quality or options.pressure or options.workload_b):
        return
    net, tokenizer = _model(options.model, options)
    load = throughput.Load(
        options.requests, options.prompt_len, options.new_len, options.held, options.share, options.every
    )
    if options.throughput:
        throughput.run(net, tokenizer, load, options.method)
    if options.quality:
        quality.run(net, tokenizer, load, options.method, options.depth)
    if options.pressure:
        pressure.run(net, tokenizer, load)
    if options.workload_b:
        throughput.run_workload_b(
            net, tokenizer, limit=options.limit, budget=options.budget, baseline=not options.no_baseline
        )


def _model(name: str, options: argparse.Namespace) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    if name == "random":
        return presses.model(), None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from paged_kv.weights import demo_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = name or str(demo_model())
    net = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()
    return net, AutoTokenizer.from_pretrained(path)


if __name__ == "__main__":
    main()
