"""Where the time of a step goes: linear layers, attention, the rest of the forward pass, sampling, scheduling, Python.

Times are taken around the parts from outside, without a profiler, so that they add up to the wall time; a timer costs a
few tenths of a microsecond, linear and attention are called a few hundred times a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.peers import Setting, load
from bench.workloads import token_stream, workload

#: Parts within the forward pass; the others are host time outside of it.
INSIDE = ("linear", "attention", "rest of forward")


class Clock:
    """Sums seconds by part; parts may lie within each other, each is charged for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Charge a method to a part from now on."""
        try:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        except AttributeError:  # an object without room for attributes: its class is charged, this process has one
            setattr(type(owner), name, self._timed(getattr(type(owner), name), part))

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def wrap_call(self, owner: Any, part: str) -> None:
        """Charge calls of an object itself to a part."""
        cls = type(owner)
        owner.__class__ = type(cls.__name__, (cls,), {"__call__": self._timed(cls.__call__, part)})

    def _enter(self, part: str) -> None:
        self._charge()
        self._open.append(part)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "outside"] += now - self._since
        self._since = now


def profile(name: str, setting: Setting, *, limit: int | None = None, sampling: dict[str, Any] | None = None) -> str:
    """Run a workload on paged-kv and say where its time goes, as a table."""
    import torch
    from transformers import AutoTokenizer

    from paged_kv.engine import LLM, SamplingParams

    if setting.threads:
        torch.set_num_threads(setting.threads)
    stream = token_stream(AutoTokenizer.from_pretrained(setting.model))
    with LLM(load(setting), **setting.options) as llm:
        warm = workload(name, stream, limit=1, shift=7)
        llm.generate([list(warm[0].prompt)], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
        jobs = workload(name, stream, limit=limit)
        base = SamplingParams.from_mapping({"temperature": 0.0, "ignore_eos": True} | (sampling or {}))
        params = [replace(base, max_tokens=job.num_output) for job in jobs]
        clock = timed(llm)
        before = llm.engine.stats()
        clock.seconds.clear()
        start = time.perf_counter()
        llm.generate([list(job.prompt) for job in jobs], params, use_tqdm=False)
        wall = time.perf_counter() - start
        stats = llm.engine.stats()
    steps = stats.num_steps - before.num_steps
    rows = (stats.num_output_tokens - before.num_output_tokens) / steps
    host = sum(seconds for part, seconds in clock.seconds.items() if part not in INSIDE)
    lines = [
        f"{name} {setting.dtype}: {len(jobs)} requests, {wall:.2f} s, {steps} steps, {rows:.1f} output tokens a step"
    ]
    for part, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        lines.append(f"  {part:16}{seconds:8.2f} s {seconds / wall:6.1%} {seconds / steps * 1e3:8.2f} ms a step")
    lines.append(f"  outside of the forward pass: {host / wall:.1%}, {host / steps * 1e3:.2f} ms a step")
    return "\n".join(lines)


def timed(llm: Any) -> Clock:
    """A clock on every part of an engine."""
    import torch

    from paged_kv.optimize import FusedAttention, FusedMLP

    clock, engine = Clock(), llm.engine
    # Outermost first: what is wrapped later is charged within what was wrapped before.
    clock.wrap(engine, "step", "step")
    clock.wrap(engine, "add_request", "add request")
    clock.wrap(engine._scheduler, "plan", "scheduler")
    clock.wrap(engine.memory, "append", "allocator")
    clock.wrap(engine.memory, "step", "allocator")
    clock.wrap(engine.memory, "commit", "allocator")
    for group in engine.memory.groups:
        clock.wrap(group.store, "resize", "pool growth")
    clock.wrap(engine._runner, "forward", "rest of forward")
    clock.wrap(engine._searcher, "take", "taking tokens")
    clock.wrap(engine._searcher, "verify", "taking tokens")
    clock.wrap(engine._meter, "note", "counting")
    clock.wrap(engine._runner._cache, "update", "attention")
    within: set[int] = set()  # parts of what is fused: timed as a whole, as it comes apart when they are touched
    for module in engine._runner._model.modules():
        if isinstance(module, FusedMLP):
            within.update(map(id, module.children()))
        if isinstance(module, FusedAttention):
            within.update(map(id, (module.q_proj, module.k_proj, module.v_proj)))
            clock.wrap(module, "project", "linear")
        if isinstance(module, (torch.nn.Linear, FusedMLP)) and id(module) not in within:
            clock.wrap(module, "forward", "linear")
    clock.wrap(engine._runner._cache._backend, "attend", "attention")
    clock.wrap_call(engine._searcher._sampler, "sampling")
    return clock
