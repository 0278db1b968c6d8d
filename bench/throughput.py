"""Throughput of the engine against `model.generate`, on the same weights, tokens and threads.

    python -m bench.throughput --workload A --limit 16
    python -m bench.throughput --workload all --repeats 5 --json figures.json --peers transformers,transformers-folded
    python -m bench.throughput --workload C --peers transformers,vllm --python vllm=/path/to/its/environment/bin/python
    python -m bench.throughput --workload A --profile

Every engine runs in a process of its own (so that its peak memory is its own) and they take turns; the other one sleeps
meanwhile. Figures are medians over the repeats; each repeat shifts the token ids, so that no prefix cache survives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers import OURS, PEERS, PeerUnavailable, Setting
from bench.workloads import Job, token_stream, workload

ROOT = Path(__file__).resolve().parent.parent


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


class Process:
    """A peer in a process of its own (`bench.peer_process`), perhaps of another environment's Python."""

    def __init__(self, peer: str, setting: Setting, python: str) -> None:
        """Start it.

        Raises:
            PeerUnavailable: It cannot run here; the message says why.
        """
        command = [python, "-m", "bench.peer_process", peer]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
            )
        except OSError as error:
            raise PeerUnavailable(f"{python} cannot be run: {error.strerror}") from error
        self._send(asdict(setting))
        answer = self._receive()
        if "unavailable" in answer:
            self._process.wait()
            raise PeerUnavailable(answer["unavailable"])

    def run(self, name: str, jobs: list[Job]) -> Figures:
        """Have the process do the jobs, and wait."""
        self._send({"workload": name, "jobs": [asdict(job) for job in jobs]})
        return Figures(**self._receive())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process {self._process.args} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- report ------------------------------------------------------------------------------------------------------------


def measure(names: list[str], peers: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every peer on every workload in turn; returns one record per pair."""
    from transformers import AutoTokenizer

    stream = token_stream(AutoTokenizer.from_pretrained(arguments.model))
    records = []
    for name in names:
        running: dict[str, Process] = {}
        for peer in peers:
            model = arguments.peer_model.get(peer, arguments.model)
            setting = Setting(model, arguments.dtype, arguments.threads, arguments.options if peer == OURS else {})
            try:
                running[peer] = Process(peer, setting, arguments.python.get(peer, sys.executable))
            except PeerUnavailable as error:
                print(f"  {peer} is left out: {error}", flush=True)
        warm = workload(name, stream, limit=1, shift=7)
        for process in running.values():
            process.run(name, [Job(job.prompt, 4) for job in warm])
        runs: dict[str, list[Figures]] = {peer: [] for peer in running}
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
            f"{record['cpu_ratio']:11.2f}{_or_blank(record['first_token']):>8}"
            f"{record['kv_bytes'] / 1e6:7.0f}{record['rss_bytes'] / 1e6:8.0f}  {record['same_tokens']:.0%}"
        )


def _or_blank(seconds: float) -> str:
    """Seconds, or nothing where a peer does not tell them."""
    return "" if seconds != seconds else f"{seconds:.2f}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="all", choices=["A", "B", "C", "D", "all"])
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads of each engine; 0 leaves torch's choice")
    parser.add_argument("--model", default="", help="folder of a model; SmolLM2-135M-Instruct by default")
    parser.add_argument(
        "--peers", default="", help=f"of {', '.join(PEERS)}; by default transformers, in bf16 also folded"
    )
    parser.add_argument("--python", type=_pair, action="append", default=[], help="NAME=PATH: Python that runs a peer")
    parser.add_argument("--peer-model", type=_pair, action="append", default=[], help="NAME=PATH: a peer's own model")
    parser.add_argument(
        "--sampling", type=json.loads, default={}, help="with --profile: parameters, as JSON; else greedy"
    )
    parser.add_argument("--profile", action="store_true", help="where the time of paged-kv goes, instead of comparing")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the engine, as JSON")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parsed = parser.parse_args(arguments)
    # As it is, transformers falls off the fast kernel in bf16 where nothing is padded: the baseline is shown both ways.
    usual = "transformers,transformers-folded" if parsed.dtype == "bfloat16" else "transformers"
    chosen = [peer for peer in (parsed.peers or usual).split(",") if peer and peer != OURS]
    parsed.python, parsed.peer_model = dict(parsed.python), dict(parsed.peer_model)
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"no such peer here: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    parsed.peers = [*chosen, OURS]
    if parsed.limit is not None and parsed.limit < 1:
        parser.error(f"--limit must be at least 1, got {parsed.limit}")
    return parsed


def _pair(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not path or name not in PEERS:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH with a name of {', '.join(PEERS)}, got {text!r}")
    return name, path


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parsed = parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not parsed.model:
        from paged_kv.weights import demo_model

        parsed.model = str(demo_model())
    names = ["A", "B", "C", "D"] if parsed.workload == "all" else [parsed.workload]
    if parsed.profile:
        from bench.step_profile import profile

        setting = Setting(parsed.model, parsed.dtype, parsed.threads, parsed.options)
        for name in names:
            print(profile(name, setting, limit=parsed.limit, sampling=parsed.sampling))
        return
    records = measure(names, parsed.peers, parsed)
    show(records)
    if parsed.json:
        parsed.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
