"""Benchmarks of compression.

    python -m bench.compression --table                 every press of kvpress; writes docs/compression.md
    python -m bench.compression --press AdaKV KVzip     some presses, written nowhere
    python -m bench.compression --memory                bytes freed by our own methods
    python -m bench.compression --throughput            tokens a second at a fixed pool

On the small random model by default; `--model FOLDER` takes another (not for presses).
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.compression import memory, presses, throughput


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--press", nargs="*")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=512, help="prompt of --memory")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.5, 0.25, 0.1], help="shares of --memory")
    for name, default in (("requests", 64), ("prompt-len", 1024), ("new-len", 512), ("held", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of --throughput")
    options = parser.parse_args()
    if options.table or options.press:
        from bench.compression import table  # needs kvpress

        table.run(options.press)
    if options.memory:
        memory.run(_model(options.model), options.length, options.keep)
    if options.throughput:
        load = throughput.Load(options.requests, options.prompt_len, options.new_len, options.held)
        throughput.run(_model(options.model), load)


def _model(folder: str | None) -> Any:
    if folder is None:
        return presses.model()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


if __name__ == "__main__":
    main()
