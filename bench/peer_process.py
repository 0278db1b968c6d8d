"""One peer in a process of its own: `python -m bench.peer_process NAME`, JSON lines in and out.

Reads a `Setting`, answers `{"ready": true}` or `{"unavailable": why}`, then answers each workload with its figures,
until its input ends. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from bench.peers import PeerUnavailable, Setting, make
from bench.workloads import Job


def main() -> None:
    """Serve one peer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = Setting(**json.loads(sys.stdin.readline()))
    try:
        if setting.threads:
            _limit_threads(setting.threads)
        peer = make(sys.argv[1], setting)
    except PeerUnavailable as error:
        print(json.dumps({"unavailable": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        jobs = [Job(tuple(job["prompt"]), job["num_output"]) for job in message["jobs"]]
        start, cpu = time.perf_counter(), time.process_time()
        first, kv_bytes, tokens = peer.run(message["workload"], jobs)
        figures = {
            "seconds": time.perf_counter() - start,
            "first_token": first,
            "cpu_seconds": time.process_time() - cpu,
            "kv_bytes": kv_bytes,
            "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "tokens": tokens,
        }
        print(json.dumps(figures), file=answers, flush=True)


def _limit_threads(number: int) -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(number)


if __name__ == "__main__":
    main()
