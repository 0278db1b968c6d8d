"""Throughput of the engine against `model.generate`, on the same weights, tokens and threads.

    python -m bench.throughput --workload A --limit 16
    python -m bench.throughput --workload all --repeats 5 --json figures.json --peers transformers,transformers-folded

Every engine runs in a process of its own (so that its peak memory is its own) and they take turns; the other one sleeps
meanwhile. Figures are medians over the repeats; each repeat shifts the token ids, so that no prefix cache survives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from bench.workloads import BASELINE_BATCH, Job, token_stream, workload

OURS = "paged-kv"
PEERS = ("transformers", "transformers-folded", OURS)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one workload.

    Attributes:
        seconds: Wall time from the first prompt to the last token.
        first_token: Mean seconds from the start until a request has its first token.
        cpu_seconds: Processor time of the process.
        kv_bytes: Most bytes of KV cache held.
        rss_bytes: Peak resident memory of the process so far.
        tokens: Output tokens of each job, to compare engines.
    """

    seconds: float
    first_token: float
    cpu_seconds: float
    kv_bytes: int
    rss_bytes: int
    tokens: list[list[int]]


class Peer(Protocol):
    """An engine under test."""

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """Do the jobs; returns mean seconds to the first token, most KV bytes, and the tokens."""
        ...


class Generate:
    """transformers' `generate`: static left-padded batches, sorted by prompt length."""

    def __init__(self, model: Any, *, folded: bool) -> None:
        self._model = model
        if folded:
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import sdpa_mask

            AttentionInterface.register("folded_group", _folded)
            AttentionMaskInterface.register("folded_group", sdpa_mask)
            model.set_attn_implementation("folded_group")

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """Static batches; see `Peer.run`."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):
            def __init__(self) -> None:
                self.calls = 0
                self.first = 0.0

            def put(self, value: Any) -> None:
                self.calls += 1
                if self.calls == 2:
                    self.first = time.perf_counter()

            def end(self) -> None:
                pass

        start, size = time.perf_counter(), BASELINE_BATCH[name]
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))
        tokens: list[list[int]] = [[] for _ in jobs]
        firsts, most = [], 0
        for begin in range(0, len(order), size):
            batch = order[begin : begin + size]
            longest = max(len(jobs[i].prompt) for i in batch)
            steps = max(jobs[i].num_output for i in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, i in enumerate(batch):
                ids[line, longest - len(jobs[i].prompt) :] = torch.tensor(jobs[i].prompt)
                mask[line, longest - len(jobs[i].prompt) :] = 1
            clock = Clock()
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                streamer=clock if len(batch) == 1 else None,
            )
            # transformers streams single rows only: the first tokens of a batch are seen when the batch is done.
            ended = time.perf_counter()
            firsts += [(clock.first or ended) - start] * len(batch)
            most = max(most, len(batch) * (longest + steps) * _bytes_per_token(self._model))
            for line, i in enumerate(batch):
                tokens[i] = out[line, longest : longest + jobs[i].num_output].tolist()
        return statistics.mean(firsts), most, tokens


def _folded(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    """SDPA with the query heads of a group folded into the query length: the fast kernel in every dtype."""
    from torch.nn.functional import scaled_dot_product_attention

    rows, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if length > 1 and mask is None:
        import torch

        mask = torch.ones(length, key.shape[2], dtype=torch.bool).tril(key.shape[2] - length)[None, None]
    if mask is not None:
        mask = mask[:, :, None].expand(rows, mask.shape[1], group, length, key.shape[2]).flatten(2, 3)
    out = scaled_dot_product_attention(
        query.reshape(rows, kv_heads, group * length, width), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(rows, heads, length, -1).transpose(1, 2), None


class PagedKV:
    """This project's engine."""

    def __init__(self, model: Any, **options: Any) -> None:
        from paged_kv.engine.llm import LLM

        self.llm = LLM(model, **options)

    def run(self, name: str, jobs: list[Job]) -> tuple[float, int, list[list[int]]]:
        """One call of `LLM.generate`; see `Peer.run`."""
        from paged_kv.engine import SamplingParams

        start = time.perf_counter()
        params = [SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True) for job in jobs]
        results = self.llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
        failed = [result.error for result in results if result.error is not None]
        if failed:
            raise RuntimeError(failed[0])
        firsts = [result.timings["first_token"] - start for result in results]
        return statistics.mean(firsts), self.llm.engine.stats().peak_bytes, [list(r.token_ids) for r in results]


def _bytes_per_token(model: Any) -> int:
    from paged_kv.spec import KVSpec

    return sum(spec.bytes_per_token for spec in KVSpec.from_model(model))


# -- processes ---------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, peer_name: str, settings: dict[str, Any]) -> None:
    """A peer's process: does the jobs it is sent, until it is sent None."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    peer: Peer
    if peer_name == OURS:
        peer = PagedKV(model, **settings["options"])
    else:
        peer = Generate(model, folded=peer_name == "transformers-folded")
    connection.send("ready")
    while (message := connection.recv()) is not None:
        name, jobs = message
        start, cpu = time.perf_counter(), time.process_time()
        first, kv_bytes, tokens = peer.run(name, jobs)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(Figures(seconds, first, cpu_seconds, kv_bytes, rss, tokens))


class Process:
    """A peer in a process of its own."""

    def __init__(self, peer: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, peer, settings), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()

    def run(self, name: str, jobs: list[Job]) -> Figures:
        """Have the process do the jobs, and wait."""
        self._connection.send((name, jobs))
        figures: Figures = self._connection.recv()
        return figures

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


# -- report ------------------------------------------------------------------------------------------------------------


def measure(names: list[str], peers: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every peer on every workload in turn; returns one record per pair."""
    from transformers import AutoTokenizer

    stream = token_stream(AutoTokenizer.from_pretrained(arguments.model))
    settings = {name: getattr(arguments, name) for name in ("model", "dtype", "threads", "options")}
    records = []
    for name in names:
        running = {peer: Process(peer, settings) for peer in peers}
        warm = workload(name, stream, limit=1, shift=7)
        for process in running.values():
            process.run(name, [Job(job.prompt, 4) for job in warm])
        runs: dict[str, list[Figures]] = {peer: [] for peer in peers}
        for repeat in range(arguments.repeats):
            jobs = workload(name, stream, limit=arguments.limit, shift=1000 * repeat)
            for peer, process in running.items():
                runs[peer].append(process.run(name, jobs))
                print(f"  {name} {peer} run {repeat + 1}: {runs[peer][-1].seconds:.2f} s", flush=True)
        records += [_record(name, peer, figures, runs) for peer, figures in runs.items()]
        for process in running.values():
            process.close()
    return records


def _record(name: str, peer: str, figures: list[Figures], runs: dict[str, list[Figures]]) -> dict[str, Any]:
    output = sum(map(len, figures[0].tokens))
    seconds = statistics.median(run.seconds for run in figures)
    base = runs.get("transformers", figures)
    alike = sum(mine == theirs for run, other in zip(figures, base, strict=True) for mine, theirs in _pairs(run, other))
    return {
        "workload": name,
        "peer": peer,
        "requests": len(figures[0].tokens),
        "seconds": seconds,
        "tokens_per_second": output / seconds,
        "cpu_ratio": statistics.median(run.cpu_seconds for run in base) / statistics.median(_cpu(figures)),
        "ratio": statistics.median(run.seconds for run in base) / seconds,
        "first_token": statistics.median(run.first_token for run in figures),
        "cpu_seconds": statistics.median(run.cpu_seconds for run in figures),
        "kv_bytes": max(run.kv_bytes for run in figures),
        "rss_bytes": max(run.rss_bytes for run in figures),
        "same_tokens": alike / sum(len(run.tokens) for run in figures),
        "runs": [asdict(run) | {"tokens": None} for run in figures],
    }


def _cpu(figures: list[Figures]) -> list[float]:
    return [run.cpu_seconds for run in figures]


def _pairs(run: Figures, other: Figures) -> zip[tuple[list[int], list[int]]]:
    return zip(run.tokens, other.tokens, strict=True)


def show(records: list[dict[str, Any]]) -> None:
    """Print one line per workload and peer."""
    columns = (
        f"{'seconds':>9}{'CPU s':>8}{'tok/s':>8}{'ratio':>7}{'CPU ratio':>11}{'TTFT s':>8}{'KV MB':>7}{'RSS MB':>8}"
    )
    print(f"{'':3}{'peer':22}{'requests':>9}{columns}  same")
    for record in records:
        print(
            f"{record['workload']:3}{record['peer']:22}{record['requests']:9}{record['seconds']:9.2f}"
            f"{record['cpu_seconds']:8.2f}{record['tokens_per_second']:8.1f}{record['ratio']:7.2f}"
            f"{record['cpu_ratio']:11.2f}{record['first_token']:8.2f}"
            f"{record['kv_bytes'] / 1e6:7.0f}{record['rss_bytes'] / 1e6:8.0f}  {record['same_tokens']:.0%}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="all", choices=["A", "B", "C", "D", "all"])
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads of each engine; 0 leaves torch's choice")
    parser.add_argument("--model", default="", help="folder of a model; SmolLM2-135M-Instruct by default")
    parser.add_argument("--peers", default="transformers", help=f"of {', '.join(PEERS)}; paged-kv runs in any case")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the engine, as JSON")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parsed = parser.parse_args(arguments)
    chosen = [peer for peer in parsed.peers.split(",") if peer and peer != OURS]
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"no such peer here: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    parsed.peers = [*chosen, OURS]
    if parsed.limit is not None and parsed.limit < 1:
        parser.error(f"--limit must be at least 1, got {parsed.limit}")
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parsed = parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not parsed.model:
        from paged_kv.weights import demo_model

        parsed.model = str(demo_model())
    names = ["A", "B", "C", "D"] if parsed.workload == "all" else [parsed.workload]
    records = measure(names, parsed.peers, parsed)
    show(records)
    if parsed.json:
        parsed.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
