"""The four throughput workloads: fixed token ids and output lengths, so that every engine does the same work.

Text comes from what every machine has (licences and Python's own documentation topics), cut by a fixed seed.

| name | requests | prompt tokens | output tokens |
| --- | --- | --- | --- |
| A offline-mixed | 64 | log-normal, median 128, 16 to 1024 | log-normal, median 64, 8 to 256 |
| B long-context decode | 16 | 2048 | 128 |
| C shared prefix | 64 | 512 shared + 32 own | 32 |
| D single stream | 1 | 128 | 128 |
"""

from __future__ import annotations

import math
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LICENCES = Path("/usr/share/common-licenses")

#: Rows of a static batch of the baseline.
BASELINE_BATCH = {"A": 16, "B": 8, "C": 16, "D": 16}


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt token ids and exactly how many tokens to generate."""

    prompt: tuple[int, ...]
    num_output: int


def token_stream(tokenizer: Any) -> list[int]:
    """A long stream of token ids of natural text."""
    tokenizer.model_max_length = 1 << 62  # the stream is cut before any model sees it: no warning that it is long
    texts = []
    if LICENCES.is_dir():
        files = sorted(path for path in LICENCES.iterdir() if path.is_file() and not path.is_symlink())
        texts += [path.read_text(errors="ignore") for path in files]
    texts += [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    return list(tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"])


def workload(name: str, stream: Sequence[int], *, limit: int | None = None, shift: int = 0) -> list[Job]:
    """The jobs of a workload.

    Args:
        name: "A", "B", "C" or "D".
        stream: Where prompts are cut from.
        limit: Only the first so many jobs.
        shift: Added to the token ids (wrapping within those that occur), so that a repeat finds no prefix of an earlier
            one in any cache. Lengths stay.
    """
    makers: dict[str, tuple[int, Callable[[_Cutter], list[Job]]]] = {
        "A": (1234, _mixed),
        "B": (2345, lambda cut: [Job(cut(2048), 128) for _ in range(16)]),
        "C": (3456, _shared),
        "D": (4567, lambda cut: [Job(cut(128), 128)]),
    }
    if name not in makers:
        raise ValueError(f"workload must be one of {', '.join(makers)}, got {name!r}")
    seed, make = makers[name]
    jobs = make(_Cutter(stream, random.Random(seed)))[:limit]
    highest = max(stream) + 1
    return [Job(tuple((token + shift) % highest for token in job.prompt), job.num_output) for job in jobs]


class _Cutter:
    """Cuts pieces from a stream at random places."""

    def __init__(self, stream: Sequence[int], dice: random.Random) -> None:
        self._stream = stream
        self.dice = dice

    def __call__(self, length: int) -> tuple[int, ...]:
        start = self.dice.randrange(0, len(self._stream) - length)
        return tuple(self._stream[start : start + length])

    def log_normal(self, median: int, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(median * math.exp(self.dice.gauss(0, sigma)))))


def _mixed(cut: _Cutter) -> list[Job]:
    return [Job(cut(cut.log_normal(128, 0.8, 16, 1024)), cut.log_normal(64, 0.7, 8, 256)) for _ in range(64)]


def _shared(cut: _Cutter) -> list[Job]:
    prefix = cut(512)
    return [Job(prefix + cut(32), 32) for _ in range(64)]
