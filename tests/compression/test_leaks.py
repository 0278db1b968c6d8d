"""No schedule of crops leaks a page: a thousand random ones over one pool."""

from __future__ import annotations

import numpy as np
import torch

from paged_kv.compression import AdaKV, KeyNorm, Protect, Random, StreamingLLM, crop
from paged_kv.group import Budget
from paged_kv.memory import PagedMemory
from paged_kv.spec import KVSpec

POLICIES = [KeyNorm(), Random(3), StreamingLLM(1), AdaKV(KeyNorm(), 0.1), Protect(Random(), 1, 1)]


def test_pages_return_to_zero_after_a_thousand_random_schedules() -> None:
    spec = KVSpec(
        layers=(0, 1, 2),
        num_kv_heads=2,
        key_width=4,
        value_width=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        page_size=4,
        lanes=2,
        windows=(None, None, None),
    )
    memory = PagedMemory([spec], Budget.of([spec], num_pages=600))
    rng = np.random.default_rng(11)
    for schedule in range(1000):
        seqs = [memory.open()[0]]
        for _ in range(int(rng.integers(2, 5))):
            action = rng.integers(5)
            seq = seqs[int(rng.integers(len(seqs)))]
            if action == 0 and len(seqs) < 3:
                seqs += memory.fork(seq)
            elif action == 1 and memory.seen_len(seq):
                memory.truncate([seq], [int(rng.integers(1, memory.seen_len(seq) + 1))])
            elif action == 2 and memory.seen_len(seq):
                layer, policy = int(rng.integers(3)), POLICIES[int(rng.integers(len(POLICIES)))]
                crop(memory, seq, layer, policy, int(rng.integers(2, 12)))
            else:
                count = int(rng.integers(1, 14))
                memory.append([seq], [count])
                step = memory.step([seq], [count])
                for layer in range(3):
                    step.write(layer, *(torch.rand(count, 2, 4) for _ in range(2)))
        if schedule % 100 == 0:
            memory.check()
        for seq in seqs:
            memory.close(seq)
        assert memory.stats()[0].active_pages == 0
    memory.check()
