"""Memory of a cache before and after every layer is cropped: what it says it holds, and what the process holds.

`python -m bench.memory [--rows 4] [--length 2048] [--keep 0.25] [--page-size 16] [--json FILE]`

Each cache is filled by the model in a process of its own. What the process holds for a cache is its resident memory
less that after the cache is gone; free memory of the C library is handed back before each reading. `DynamicCache` is
cropped as presses crop it: each layer's tensors are replaced by copies of what is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from paged_kv import PagedCache
from paged_kv.weights import demo_model

CACHES = ("dynamic", "paged")


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one cache: by its own account, and resident in the process."""

    said: int
    resident: int


def resident() -> int:
    """Bytes of this process in memory, without what the C library keeps for later."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def said(cache: Any) -> int:
    """Bytes a cache holds by its own account."""
    if isinstance(cache, PagedCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def crop(cache: Any, keep: torch.Tensor) -> None:
    """Keep the same tokens of every layer and row."""
    if isinstance(cache, PagedCache):
        for layer in range(len(cache.layers)):
            cache.crop_layer(layer, keep=keep.tolist())
        return
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, keep].clone(), layer.values[:, :, keep].clone()


def measure(kind: str, model: Any, rows: int, length: int, keep: float, page_size: int) -> dict[str, Held]:
    """Fill a cache with random tokens, crop it, drop it: what it held full and cropped."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (rows, length), generator=generator)
    kept = torch.randperm(length, generator=generator)[: int(length * keep)].sort().values
    cache: Any = DynamicCache(config=model.config)
    if kind == "paged":
        cache = PagedCache.for_model(model, page_size=page_size)
    with torch.inference_mode():
        for part in ids.split(256, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)
        full = said(cache), resident()
        crop(cache, kept)
        cropped = said(cache), resident()
    del cache
    gone = resident()
    return {"full": Held(full[0], full[1] - gone), "cropped": Held(cropped[0], cropped[1] - gone)}


def in_own_process(arguments: list[str], kind: str) -> dict[str, Held]:
    """`measure` of one cache in a fresh interpreter."""
    command = [sys.executable, "-m", "bench.memory", *arguments, "--only", kind]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return {name: Held(**values) for name, values in json.loads(lines[-1]).items()}


def line(kind: str, held: dict[str, Held]) -> str:
    """One cache as a line of the table."""
    full, cropped = held["full"], held["cropped"]
    cells = [f"{one.said / 2**20:8.1f} {one.resident / 2**20:8.1f} MiB" for one in (full, cropped)]
    left = f"{cropped.said / full.said:6.1%} {cropped.resident / full.resident:6.1%}"
    return f"{kind:8} | full {cells[0]} | cropped {cells[1]} | left {left}"


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2-135M-Instruct by default")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--keep", type=float, default=0.25)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=CACHES, help="measure one cache here and print JSON")
    options = parser.parse_args()
    folder = options.model or demo_model()
    if options.only:
        model = AutoModelForCausalLM.from_pretrained(folder)
        held = measure(options.only, model, options.rows, options.length, options.keep, options.page_size)
        print(json.dumps({name: asdict(one) for name, one in held.items()}))
        return
    arguments = [
        f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ("rows", "length", "keep", "page_size")
    ]
    results = {kind: in_own_process([f"--model={folder}", *arguments], kind) for kind in CACHES}
    print(f"{options.rows} rows of {options.length} tokens, {options.keep:.0%} kept; said by the cache, resident:")
    for kind, held in results.items():
        print(line(kind, held))
    if options.json:
        figures = {kind: {name: asdict(one) for name, one in held.items()} for kind, held in results.items()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
