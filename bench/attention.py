"""Attention on the CPU: the fused kernel against gathering and against contiguous SDPA, and against memory itself.

    python -m bench.attention [--quick] [--json FILE] [--only decode|prefill|lanes|ragged|linear]

Every case measures its ways in turns, so that a machine that slows down slows all of them; times are medians. `limit`
is the bytes of live K and V over the read bandwidth measured at the start. `between` is the same call between two
matrix products, less the products: whether two pools of threads meet shows only there. Contiguous SDPA gets its K and V
for free, without pages, and the query heads of a group folded into the query length, its fastest way.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.cpu.backend import CpuBackend
from paged_kv.attention.sdpa import SdpaBackend
from paged_kv.attention.select import pick_backend
from paged_kv.optimize import best_method, optimize_for_cpu
from paged_kv.store import LayerView

HEADS = {"9/3 x 64": (9, 3, 64), "32/8 x 128": (32, 8, 128), "16/16 x 64": (16, 16, 64)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True)
class Case:
    """One measured case: what, and milliseconds by way."""

    kind: str
    heads: str
    dtype: str
    page_size: int
    rows: int
    live: int
    lengths: str = "equal"
    kv_bytes: int = 0
    limit_ms: float = 0.0
    ms: dict[str, float] = field(default_factory=dict)


def in_turns(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each way, called in turns for about `seconds`, at least five times each."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def read_bandwidth() -> float:
    """Bytes a second that all threads read together: the best of summing 256 MiB."""
    data = torch.ones(64 * 2**20)
    best = min(in_turns({"sum": data.sum}, 0.2)["sum"] for _ in range(5))
    return data.numel() * 4 / best * 1e3


def paged(case: Case, lengths: Sequence[int], queries: int = 1, lanes: int = 1) -> tuple[Tensor, LayerView]:
    """Random pages in random order for rows of the given lengths."""
    q_heads, kv_heads, width = HEADS[case.heads]
    dtype, size = DTYPES[case.dtype], case.page_size
    counts = [-(-n // size) for n in lengths]
    total = sum(counts) * lanes + 1
    ids = (torch.randperm(total - 1) + 1).to(torch.int32)
    table = torch.zeros(lanes, len(lengths), max(counts), dtype=torch.int32)
    at = 0
    for lane in range(lanes):
        for row, count in enumerate(counts):
            table[lane, row, :count] = ids[at : at + count]
            at += count
    keys = torch.randn(total, kv_heads // lanes, size, width, dtype=dtype)
    values = torch.randn(total, kv_heads // lanes, size, width, dtype=dtype)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * queries
    live = torch.tensor(lengths, dtype=torch.int32).expand(lanes, -1).contiguous()
    view = LayerView(keys, values, table, live, starts, None, queries, max(lengths))
    return torch.randn(len(lengths) * queries, q_heads, width, dtype=dtype), view


def contiguous(case: Case, queries: int = 1) -> Callable[[], Tensor]:
    """SDPA over K and V that lie in order; decode folds the group, prefill has K and V repeated beforehand."""
    q_heads, kv_heads, width = HEADS[case.heads]
    dtype = DTYPES[case.dtype]
    if queries == 1:
        query = torch.randn(case.rows, kv_heads, q_heads // kv_heads, width, dtype=dtype)
        key, value = (torch.randn(case.rows, kv_heads, case.live, width, dtype=dtype) for _ in range(2))
        return lambda: scaled_dot_product_attention(query, key, value)
    query, key, value = (torch.randn(case.rows, q_heads, queries, width, dtype=dtype) for _ in range(3))
    return lambda: scaled_dot_product_attention(query, key, value, is_causal=True)


def between_products(call: Callable[[], object], dtype: torch.dtype) -> Callable[[], object]:
    """The call between two matrix products of the size of a projection."""
    a, b = torch.randn(16, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)

    def run() -> object:
        torch.mm(a, b)
        call()
        return torch.mm(a, b)

    return run


def decode(case: Case, bandwidth: float, seconds: float) -> Case:
    """One query a row, equal lengths."""
    _, kv_heads, width = HEADS[case.heads]
    query, view = paged(case, [case.live] * case.rows)
    options = AttentionOptions(scale=width**-0.5)
    dtype = DTYPES[case.dtype]
    case.kv_bytes = case.rows * case.live * kv_heads * width * 2 * dtype.itemsize
    case.limit_ms = case.kv_bytes / bandwidth * 1e3
    calls: dict[str, Callable[[], object]] = {
        "kernel": lambda: CpuBackend().attend(query, view, options),
        "contiguous": contiguous(case),
    }
    if case.kv_bytes < 2**28:
        calls["gather"] = lambda: SdpaBackend().attend(query, view, options)
    case.ms = in_turns(calls, seconds)
    framed = {name: between_products(calls[name], torch.float32) for name in ("kernel", "contiguous")}
    framed["nothing"] = between_products(lambda: None, torch.float32)
    between = in_turns(framed, seconds / 2)
    case.ms |= {f"{name} between": between[name] - between["nothing"] for name in ("kernel", "contiguous")}
    return case


def ragged(case: Case, bandwidth: float, seconds: float) -> Case:
    """The same total of live tokens, log-normal lengths against equal ones."""
    _, _, width = HEADS[case.heads]
    drawn = torch.randn(case.rows).exp()
    lengths = (drawn / drawn.sum() * case.rows * case.live).round().clamp_min(1).int().tolist()
    lengths[0] = max(1, lengths[0] + case.rows * case.live - sum(lengths))
    options = AttentionOptions(scale=width**-0.5)
    even, uneven = paged(case, [case.live] * case.rows), paged(case, lengths)
    case.lengths = "log-normal"
    case.ms = in_turns(
        {"equal": lambda: CpuBackend().attend(*even, options), "kernel": lambda: CpuBackend().attend(*uneven, options)},
        seconds,
    )
    return case


def lanes(case: Case, bandwidth: float, seconds: float) -> Case:
    """A page table for each KV head against one for the layer."""
    _, kv_heads, width = HEADS[case.heads]
    options = AttentionOptions(scale=width**-0.5)
    one, many = paged(case, [case.live] * case.rows), paged(case, [case.live] * case.rows, lanes=kv_heads)
    case.ms = in_turns(
        {"layer": lambda: CpuBackend().attend(*one, options), "kernel": lambda: CpuBackend().attend(*many, options)},
        seconds,
    )
    return case


def prefill(case: Case, bandwidth: float, seconds: float) -> Case:
    """A whole prompt of `live` tokens, causal."""
    _, _, width = HEADS[case.heads]
    query, view = paged(case, [case.live] * case.rows, queries=case.live)
    options = AttentionOptions(scale=width**-0.5)
    case.ms = in_turns(
        {"kernel": lambda: CpuBackend().attend(query, view, options), "contiguous": contiguous(case, case.live)},
        seconds,
    )
    return case


def linear(case: Case, bandwidth: float, seconds: float) -> Case:
    """The linear layers of one SmolLM2 layer, times four, for `rows` tokens: torch's own, and packed."""
    sizes = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)] * 4
    dtype = DTYPES[case.dtype]
    layers = [nn.Linear(*size, bias=False, dtype=dtype) for size in sizes]
    packed = [nn.Linear(*size, bias=False, dtype=dtype) for size in sizes]
    optimize_for_cpu(nn.ModuleList(packed))
    x = {width: torch.randn(case.rows, width, dtype=dtype) for width in (576, 1536)}
    case.kv_bytes = sum(a * b for a, b in sizes) * dtype.itemsize
    case.limit_ms = case.kv_bytes / bandwidth * 1e3
    case.ms = in_turns(
        {
            "kernel": lambda: [layer(x[layer.in_features]) for layer in packed],
            "contiguous": lambda: [layer(x[layer.in_features]) for layer in layers],
        },
        seconds,
    )
    return case


MEASURES = {"decode": decode, "ragged": ragged, "lanes": lanes, "prefill": prefill, "linear": linear}


def cases(quick: bool) -> list[Case]:
    """The grid, or the part of it that takes under a minute."""
    found = []
    for dtype in DTYPES:
        for heads in HEADS if not quick else list(HEADS)[:1]:
            grid = [(r, n) for r in (1, 4, 16, 64) for n in (128, 512, 2048, 8192) if r * n <= 64 * 2048]
            for rows, live in grid if not quick else [(1, 2048), (16, 128), (16, 1024)]:
                found.append(Case("decode", heads, dtype, 16, rows, live))
            for live in (512, 2048) if not quick else (512,):
                found.append(Case("prefill", heads, dtype, 16, 1, live))
            found.append(Case("ragged", heads, dtype, 16, 64, 512))
            found.append(Case("lanes", heads, dtype, 16, 16, 512))
        if not quick:
            found += [Case("decode", "9/3 x 64", dtype, page, 16, 512) for page in (32, 64)]
        found += [Case("linear", "9/3 x 64", dtype, 0, rows, 0) for rows in ((1, 16) if quick else (1, 4, 16, 64, 512))]
    return found


def line(case: Case) -> str:
    """A case as one line: milliseconds, and the ratio that its target is about."""
    against = {"ragged": "equal", "lanes": "layer"}.get(case.kind, "contiguous")
    ratio = case.ms["kernel"] / case.ms[against]
    rate = f" {case.kv_bytes / case.ms['kernel'] / 1e6:6.1f} GB/s" if case.kv_bytes else ""
    parts = "  ".join(f"{name} {value:.3f}" for name, value in case.ms.items())
    limit = f" limit {case.limit_ms:.3f}" if case.limit_ms else ""
    what = f"{case.kind:8} {case.heads:10} {case.dtype} page {case.page_size:2} rows {case.rows:3} live {case.live:5}"
    return f"{what} | {ratio:5.2f} of {against}{rate} | ms: {parts}{limit}"


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid, under a minute")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", choices=MEASURES, help="one kind of case")
    parser.add_argument("--seconds", type=float, default=None, help="for each case")
    arguments = parser.parse_args()
    pick_backend("cpu", name="cpu")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = read_bandwidth()
    machine = {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "read_bytes_per_second": bandwidth,
        "linear": {name: best_method(dtype) for name, dtype in DTYPES.items()},
    }
    print(f"{machine['threads']} threads, {machine['capability']}, reads {bandwidth / 1e9:.1f} GB/s")
    seconds = arguments.seconds or (0.4 if arguments.quick else 1.0)
    results = []
    for case in cases(arguments.quick):
        if arguments.only in (None, case.kind):
            results.append(MEASURES[case.kind](case, bandwidth, seconds))
            print(line(results[-1]), flush=True)
    if arguments.json:
        report = {"machine": machine, "cases": [asdict(case) for case in results]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
