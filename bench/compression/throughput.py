"""Tokens a second of the engine at a fixed pool of KV memory, uncompressed and with each method.

The pool holds `held` uncompressed requests; all requests wait from the start, so that how many run at once is decided
by their pages alone. What is measured:

- end to end: output tokens over the wall time of everything, prompts included;
- decode: output tokens over time of the steps that computed no prompt;
- at once: rows in those steps, mean and most;
- crops: the share of all time that choosing and moving tokens took.

Fewer bytes a row pay twice: more rows share each read of the weights, and each row's attention reads less. The first
part ends where a step computes longer than it reads weights, the second needs a step that reads much KV: `line` says
where a model stands on this machine.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.workloads import Job, token_stream, workload
from paged_kv.compression import H2O, AdaKV, ExpectedAttention, KeyNorm, LagKV, SnapKV, StreamingLLM
from paged_kv.engine.compress import Compression, ramp
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams
from paged_kv.spec import KVSpec

PAGE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What is run.

    Attributes:
        requests: How many.
        prompt_len: Tokens of each prompt.
        new_len: Tokens generated for each.
        held: Uncompressed requests that the pool holds.
        share: Budget as a share of the prompt.
        every: Output tokens between two crops.
    """

    requests: int = 64
    prompt_len: int = 1024
    new_len: int = 512
    held: int = 8
    share: float = 0.25
    every: int = 64

    @property
    def budget(self) -> int:
        """Tokens that a layer keeps, on average."""
        return int(self.prompt_len * self.share)


@dataclass(slots=True)
class Run:
    """What one method did."""

    seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    most_rows: int = 0
    crop_seconds: float = 0.0
    preemptions: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Output tokens a second, end to end."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Output tokens a second of steps without prompts."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")

    @property
    def rows(self) -> float:
        """Mean rows of a decode step."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else float("nan")


def methods(net: Any, load: Load) -> dict[str, tuple[Any, Compression | None]]:
    """Name to lanes and compression. By layer: unequal budgets; by head: a page table a head."""
    budget, every, layers = load.budget, load.every, net.config.num_hidden_layers
    sloped = ramp(budget, layers, 0.5)
    window = max(1, min(32, budget // 4))
    snap = SnapKV(window=window)
    return {
        "uncompressed": ("layer", None),
        "StreamingLLM": ("layer", Compression(StreamingLLM(), budget, every)),
        "StreamingLLM, by layer": ("layer", Compression(StreamingLLM(), sloped, every)),
        "KeyNorm": ("layer", Compression(KeyNorm(), budget, every)),
        "LagKV": ("layer", Compression(LagKV(lag=64), budget, every)),
        "SnapKV": ("layer", Compression(snap, budget, every)),
        "SnapKV, in pieces": ("layer", Compression(snap, budget, every, chunk=budget)),
        "SnapKV, by layer": ("layer", Compression(snap, sloped, every)),
        "H2O": ("layer", Compression(H2O(recent=window, queries=128), budget, every)),
        "ExpectedAttention": ("layer", Compression(ExpectedAttention.for_model(net, queries=256), budget, every)),
        "AdaKV(KeyNorm), by head": ("head", Compression(AdaKV(KeyNorm()), budget, every)),
        "AdaKV(SnapKV), by head": ("head", Compression(AdaKV(snap), budget, every)),
    }


def run(net: Any, tokenizer: Any, load: Load, names: list[str] | None = None) -> None:
    """Print the table; every method in an engine of its own, the uncompressed one first."""
    known = methods(net, load)
    chosen = [name for name in known if names is None or name == "uncompressed" or name in names]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"no method {min(unknown)!r}; there are {', '.join(known)}")
    jobs = jobs_of(net, tokenizer, load)
    print(asdict(load), f"budget {load.budget} tokens a layer", f"{net.dtype}")
    print(line(net, load))
    heads = [
        "method",
        "tokens/s",
        "x",
        "decode tokens/s",
        "x",
        "rows at once (most)",
        "x",
        "crops",
        "preempted",
        "same",
    ]
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    base: Run | None = None
    for name in chosen:
        found = measure(net, jobs, load, *known[name])
        base = base or found
        print(f"| {name} | {' | '.join(_cells(found, base))} |", flush=True)


def jobs_of(net: Any, tokenizer: Any, load: Load) -> list[Job]:
    """The requests: pieces of natural text, or for a model without a tokenizer, random ids."""
    if tokenizer is None:
        from bench.compression.presses import prompt

        ids = prompt(load.prompt_len)[0]
        return [
            Job(tuple(((ids + number) % net.config.vocab_size).tolist()), load.new_len)
            for number in range(load.requests)
        ]
    stream = token_stream(tokenizer)
    step = (len(stream) - load.prompt_len) // load.requests
    return [
        Job(tuple(stream[number * step : number * step + load.prompt_len]), load.new_len)
        for number in range(load.requests)
    ]


def measure(net: Any, jobs: list[Job], load: Load, lanes: Any, compression: Compression | None) -> Run:
    """Do the jobs in a pool for `load.held` uncompressed ones."""
    tokens = load.prompt_len + load.new_len
    tables = net.config.num_hidden_layers * (net.config.num_key_value_heads if lanes == "head" else 1)
    options = EngineOptions(
        num_pages=1 + load.held * tables * -(-tokens // PAGE),
        page_size=PAGE,
        lanes=lanes,
        enable_prefix_caching=False,
        num_draft_tokens=0,
    )
    found, outputs = Run(), {}
    with Engine(net, None, options) as engine:
        for number, job in enumerate(jobs):
            params = SamplingParams(
                max_tokens=job.num_output, temperature=0.0, ignore_eos=True, compression=compression
            )
            engine.add_request(str(number), list(job.prompt), params)
        begin = time.perf_counter()
        while engine.has_unfinished:
            before, start = engine.stats(), time.perf_counter()
            outputs.update({result.request_id: list(result.token_ids) for result in engine.step()})
            seconds, after = time.perf_counter() - start, engine.stats()
            made = after.num_output_tokens - before.num_output_tokens
            if made == after.num_computed_tokens - before.num_computed_tokens:
                found.decode_seconds += seconds
                found.decode_tokens += made
                found.decode_steps += 1
            found.most_rows = max(found.most_rows, before.num_running, after.num_running)
        found.seconds = time.perf_counter() - begin
        stats = engine.stats()
    found.tokens, found.preemptions, found.crop_seconds = (
        stats.num_output_tokens,
        stats.num_preemptions,
        stats.crop_seconds,
    )
    found.outputs = [outputs[str(number)] for number in range(len(jobs))]
    return found


def line(net: Any, load: Load) -> str:
    """Where more rows at once, or fewer tokens a row, make a decode step cheaper: by arithmetic and by measurement."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    per_token = sum(spec.bytes_per_token for spec in KVSpec.from_model(net))
    row = per_token * (load.prompt_len + load.new_len // 2)
    few, many = load.held, 4 * load.held
    seconds = {rows: step_seconds(net, rows) for rows in (1, few, many)}
    times = ", ".join(f"{1000 * taken:.0f} ms with {rows} rows" for rows, taken in seconds.items())
    gain = many / few * seconds[few] / seconds[many]
    kind = "bound by memory" if gain > 2 else "bound by computing" if gain < 1.33 else "between memory and computing"
    return (
        f"a decode step reads {weights / 1e6:.0f} MB of weights and {row / 1e6:.1f} MB of KV a row: at "
        f"{weights / row:.0f} rows it reads as much KV as weights. With short rows a step takes {times}: {kind} there, "
        f"so four times as many rows at once gain at most {gain:.2f} x by themselves. Past that, less KV gains; "
        "prompts gain by neither"
    )


def step_seconds(net: Any, rows: int, steps: int = 8) -> float:
    """Median time of a decode step of so many rows of a few tokens, whose KV weighs nothing."""
    options = EngineOptions(
        num_pages=1 + net.config.num_hidden_layers * 2 * rows,
        page_size=PAGE,
        enable_prefix_caching=False,
        num_draft_tokens=0,
        max_num_seqs=rows,
    )
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    taken = []
    with Engine(net, None, options) as engine:
        for number in range(rows):
            engine.add_request(str(number), [3 + number] * 4, params)
        while engine.has_unfinished:
            start = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _cells(found: Run, base: Run) -> list[str]:
    same = sum(mine == theirs for mine, theirs in zip(found.outputs, base.outputs, strict=True))
    alike = sum(_common(*pair) for pair in zip(found.outputs, base.outputs, strict=True)) / max(1, found.tokens)
    return [
        f"{found.rate:.1f}",
        f"{found.rate / base.rate:.2f}",
        f"{found.decode_rate:.1f}",
        f"{found.decode_rate / base.decode_rate:.2f}",
        f"{found.rows:.1f} ({found.most_rows})",
        f"{found.rows / base.rows:.2f}",
        f"{100 * found.crop_seconds / found.seconds:.1f} %",
        str(found.preemptions),
        f"{same} of {len(base.outputs)}, {alike:.0%} of tokens before the first difference",
    ]


def _common(first: list[int], second: list[int]) -> int:
    """Tokens before two outputs differ."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def run_workload_b(net: Any, tokenizer: Any, *, limit: int, budget: int, baseline: bool) -> None:
    """Workload B (2048 tokens of prompt, 128 new) with a budget of tokens a layer, against `model.generate` in bf16."""
    import torch

    jobs = workload("B", token_stream(tokenizer), limit=limit)
    seconds: dict[str, float] = {}
    dtype = net.dtype
    if baseline:
        net = net.to(torch.bfloat16)
        seconds["model.generate, bfloat16"] = _generate(net, jobs)
    net = net.to(dtype)
    for name, lanes, compression in (
        ("here, uncompressed", "layer", None),
        (f"here, StreamingLLM({budget})", "layer", Compression(StreamingLLM(), budget, 64, chunk=512)),
        (f"here, SnapKV({budget})", "layer", Compression(SnapKV(window=32), budget, 64, chunk=512)),
        (f"here, AdaKV(SnapKV)({budget})", "head", Compression(AdaKV(SnapKV(window=32)), budget, 64, chunk=512)),
    ):
        load = Load(len(jobs), 2048, 128, held=len(jobs))
        seconds[f"{name}, {dtype}"] = measure(net, jobs, load, lanes, compression).seconds
    first = next(iter(seconds.values()))
    made = sum(job.num_output for job in jobs)
    print(f"workload B, {len(jobs)} requests")
    print("| | seconds | tokens/s | x |\n| --- | --- | --- | --- |")
    for name, taken in seconds.items():
        print(f"| {name} | {taken:.1f} | {made / taken:.1f} | {first / taken:.2f} |")


def _generate(net: Any, jobs: list[Job]) -> float:
    import torch

    ids = torch.tensor([job.prompt for job in jobs])
    start = time.perf_counter()
    net.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=jobs[0].num_output,
        min_new_tokens=jobs[0].num_output,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start
