"""The real thing: the engine on SmolLM2 over a scaled-down trace, its resident memory beside what the pages add up to.

The pool grows as requests need it. The predicted bytes are the pages that it ends with times the bytes of a page; the
measured bytes are what the process grew by over an engine that has run the same kind of steps with hardly any KV.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from bench.fragmentation.workloads import Workload, make_workload, read_trace

__all__ = ["RealRun", "run_real"]

SCALE = 6  # lengths of the trace are divided by this
REQUESTS = 28
STEP_TOKENS = 256
BUDGETS = (None, 96)  # mean tokens a layer keeps of a prompt, first layers twice as much and more as the last


@dataclass(frozen=True, slots=True)
class RealRun:
    """One run of the engine. Bytes of KV memory.

    Attributes:
        budget: mean tokens that a layer keeps of a prompt, None for all.
        tokens: prompt and output tokens of all requests.
        used: most pages in use at once, times bytes of a page.
        predicted: pages of the pool at the end, times bytes of a page.
        measured: growth of the process's resident set.
        dynamic: what DynamicCache would have held for the same rows without padding.
    """

    budget: int | None
    tokens: int
    used: int
    predicted: int
    measured: int
    dynamic: int

    @property
    def error_pct(self) -> float:
        """Measured against predicted, in percent."""
        return 100 * (self.measured / self.predicted - 1)


def run_real(out: Path, traces: Sequence[Path], *, seed: int, console: Console) -> int:
    """Run, print a table, write `real.json`. Returns the exit status: 1 if a run is more than 5 % off."""
    workload = read_trace(traces[0], limit=REQUESTS) if traces else make_workload("chat", REQUESTS, seed=seed)
    runs = []
    for budget in BUDGETS:
        with console.status(f"{REQUESTS} requests of {workload.name}, lengths / {SCALE}, budget {budget or 'none'}"):
            runs.append(_run(workload, budget, seed))
    table = Table(title=f"SmolLM2-135M, float32: {workload.source}, lengths / {SCALE}; MiB of KV", title_justify="left")
    for column in ("budget", "tokens", "DynamicCache", "used", "predicted", "measured (RSS)", "off"):
        table.add_column(column, justify="right")
    for run in runs:
        mib = [f"{value / 2**20:.1f}" for value in (run.dynamic, run.used, run.predicted, run.measured)]
        table.add_row(str(run.budget or "none"), str(run.tokens), *mib, f"{run.error_pct:+.1f} %")
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "real.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    return int(any(abs(run.error_pct) > 5 for run in runs))


def _run(workload: Workload, budget: int | None, seed: int) -> RealRun:
    from paged_kv import LLM, SamplingParams
    from paged_kv.compression import StreamingLLM
    from paged_kv.engine.compress import Compression, ramp
    from paged_kv.weights import demo_model

    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1000, 40_000, max(4, int(n) // SCALE)).tolist() for n in workload.prompt]
    outputs = [max(2, int(n) // SCALE) for n in workload.output]
    tokens = sum(map(len, prompts)) + sum(outputs)
    options: dict[str, Any] = {
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_prefix_caching": False,  # cached pages would stay resident beside those in use
    }
    with LLM(str(demo_model()), **options) as llm:
        compression = (
            None if budget is None else Compression(StreamingLLM(), ramp(budget, len(llm.engine.memory.layers), 0.5))
        )
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, compression=compression) for n in outputs
        ]
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([rng.integers(1000, 40_000, STEP_TOKENS).tolist()], warm, use_tqdm=False)
        llm.generate([[7] * 2] * REQUESTS, warm, use_tqdm=False)
        before = _resident() - llm.engine.memory.nbytes
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
        measured = _resident() - before
        return RealRun(budget, tokens, stats.peak_bytes, llm.engine.memory.nbytes, measured, stats.peak_dynamic_bytes)


def _resident() -> int:
    """Resident bytes of this process, without what Python and malloc hold back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
