"""One run: requests arrive, are admitted while there is room, grow by a token a step, and leave.

First come, first served; static batches are put together by prompt length, as one does before padding. The prompt is
filled in one step, at most `PREFILL_TOKENS` a step over all requests. When a step does not fit, the youngest running
request is preempted and starts again from the front of the queue, its generated tokens now part of its prompt.
Deterministic: the only clock measures how long the scheme's own calls take, and that is kept apart.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Request, Scheme, State, run_lengths
from bench.fragmentation.shape import Shape
from bench.fragmentation.workloads import Ints, Workload

__all__ = ["Outcome", "simulate"]

PREFILL_TOKENS = 65_536
SAMPLE_EVERY = 8  # steps between two looks at the waste
TABLES_EVERY = 96  # steps between two looks at every page table
SUPERPAGE_BYTES = 2 << 20


@dataclass(slots=True)
class Outcome:
    """What one run showed. `figures` depend on the inputs alone; `timing` on the machine.

    Attributes:
        figures: name to number, for the tables.
        timing: microseconds a step spent in the scheme.
        series: per sample: step, live, held, batch (for pictures).
        layers: float64 [samples, layers], share of the pool held by each layer.
        runs: cumulative share of pages in runs of at most 1, 2, 4, ... pages; empty without page tables.
    """

    figures: dict[str, float | int]
    timing: dict[str, float]
    series: dict[str, list[float]]
    layers: npt.NDArray[np.float64]
    runs: list[float]


@dataclass(slots=True)
class _Log:
    """Samples of one run."""

    batch: list[int] = field(default_factory=list)
    saturated: list[bool] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    micros: list[float] = field(default_factory=list)
    waste: list[tuple[int, ...]] = field(default_factory=list)
    sampled: list[tuple[int, bool]] = field(default_factory=list)
    table_bytes: list[int] = field(default_factory=list)
    layers: list[Ints] = field(default_factory=list)
    runs: list[Ints] = field(default_factory=list)
    superpages: list[float] = field(default_factory=list)


class _Run:
    def __init__(self, scheme: Scheme, workload: Workload, schedule: Schedule, shape: Shape, seed: int) -> None:
        self.scheme, self.workload, self.schedule, self.shape, self.seed = scheme, workload, schedule, shape, seed
        capacity = len(workload)
        self.state = State.empty(capacity, shape.layers, schedule.heads(shape))
        self.queue: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # slot (= request index) -> request, oldest first
        self.done: set[int] = set()  # finished, but held by a static batch
        self.waiting: Request | None = None  # the request that did not fit at the last admission
        self.left = workload.output.copy()
        self.log = _Log()
        self.counts = {"completed": 0, "refused": 0, "preemptions": 0, "recomputed_tokens": 0, "admissions": 0}
        self.spent = 0.0

    def loop(self, arrivals: Ints) -> None:
        step = arrived = 0
        while arrived < len(self.workload) or self.queue or self.running:
            if not self.running and not self.queue:
                step = max(step, int(arrivals[arrived]))
            while arrived < len(arrivals) and arrivals[arrived] <= step:
                self.queue.append(
                    Request(arrived, int(self.workload.prompt[arrived]), int(self.workload.output[arrived]))
                )
                arrived += 1
            self.spent = 0.0
            admitted = self.admit_all()
            if self.running:
                self.decode(step)
            self.record(step, admitted)
            step += 1

    # ------------------------------------------------------------ admission

    def admit_all(self) -> int:
        scheme, admitted, budget = self.scheme, 0, PREFILL_TOKENS
        self.waiting = None
        if scheme.static and self.running:
            self.waiting = self.queue[0] if self.queue else None
            return 0
        if scheme.static:  # whoever pads sorts first
            self.queue = deque(sorted(self.queue, key=lambda request: (request.prompt, request.index)))
        while self.queue:
            request = self.queue[0]
            if admitted and request.prompt > budget and not scheme.static:
                break
            live = self.schedule.after_prefill(
                request.prompt, self.shape, np.random.default_rng([self.seed, request.index])
            )
            begin = time.perf_counter()
            try:
                scheme.admit(request.index, request, live)
            except Full:
                if not self.running:  # not even alone
                    self.queue.popleft()
                    self.counts["refused"] += 1
                    continue
                self.waiting = request
                break
            finally:
                self.spent += time.perf_counter() - begin
            self.queue.popleft()
            self.running[request.index] = request
            self.state.seen[request.index] = request.prompt
            self.state.final[request.index] = request.final
            self.state.live[request.index] = live
            budget -= request.prompt
            admitted += 1
        if scheme.static and admitted:
            scheme.start(self.slots(), self.state)
        self.counts["admissions"] += admitted
        return admitted

    def slots(self) -> Ints:
        return np.fromiter((slot for slot in self.running if slot not in self.done), np.int64)

    # ------------------------------------------------------------ decode

    def decode(self, step: int) -> None:
        rng = np.random.default_rng([self.seed, 1, step])
        while True:
            slots = self.slots()
            if not len(slots):
                return
            live = self.schedule.after_step(self.state.live[slots])
            drafts = self.schedule.drafts(len(slots), rng)
            begin = time.perf_counter()
            try:
                self.scheme.grow(slots, self.state, live, drafts)
                break
            except Full:
                self.preempt()
            finally:
                self.spent += time.perf_counter() - begin
        self.state.live[slots] = live
        self.state.seen[slots] += 1
        self.left[slots] -= 1
        self.finish(slots[self.left[slots] == 0])

    def preempt(self) -> None:
        slot, request = self.running.popitem()
        seen = int(self.state.seen[slot])
        if not self.running:
            self.counts["refused"] += 1  # grew beyond what the empty pool holds
        else:
            self.queue.appendleft(Request(request.index, seen, int(self.left[slot])))
            self.counts["preemptions"] += 1
            self.counts["recomputed_tokens"] += seen
        self.scheme.release(slot)

    def finish(self, slots: Ints) -> None:
        self.counts["completed"] += len(slots)
        ended = slots.tolist()
        if self.scheme.static:
            self.done.update(ended)
            if len(self.done) < len(self.running):
                return
            ended = list(self.running)
            self.done.clear()
        begin = time.perf_counter()
        for slot in ended:
            del self.running[slot]
            self.scheme.release(slot)
        self.spent += time.perf_counter() - begin

    # ------------------------------------------------------------ records

    def record(self, step: int, admitted: int) -> None:
        log, slots = self.log, self.slots()
        log.batch.append(len(slots))
        log.saturated.append(self.waiting is not None)
        log.admitted.append(admitted)
        log.micros.append(self.spent * 1e6)
        if len(log.batch) % SAMPLE_EVERY == 1 and len(slots):
            waste = self.scheme.waste(slots, self.state, self.waiting)
            waste.check()
            log.waste.append(
                (waste.live, waste.internal, waste.reservation, waste.imbalance, waste.external, waste.held)
            )
            log.sampled.append((len(log.batch) - 1, self.waiting is not None))
            log.table_bytes.append(self.scheme.table_bytes(slots))
            log.layers.append(self.scheme.held_by_layer(slots, self.state))
        if len(log.batch) % TABLES_EVERY == TABLES_EVERY - 1 and len(slots):
            self.record_tables(slots)

    def record_tables(self, slots: Ints) -> None:
        tables = self.scheme.page_tables(slots)
        if not tables:
            return
        self.log.runs.append(run_lengths(tables))
        page_bytes = self.scheme.page_unit * self.shape.head_bytes
        per_superpage = max(1, SUPERPAGE_BYTES // page_bytes)
        pages = self.shape.pool_slots // self.scheme.page_unit
        used = np.unique(np.concatenate(tables))
        touched = len(np.unique(used // per_superpage))
        free = pages - len(used)
        whole = max(0, -(-pages // per_superpage) - touched) * per_superpage
        self.log.superpages.append(min(1.0, whole / free) if free else 0.0)


def simulate(
    scheme: Scheme, workload: Workload, schedule: Schedule, shape: Shape, arrivals: Ints, *, seed: int
) -> Outcome:
    """Run a workload through a scheme.

    Figures are taken while a request waits for memory (all steps where that never happens): the state that decides how
    much memory is bought.
    """
    run = _Run(scheme, workload, schedule, shape, seed)
    run.loop(arrivals)
    return _summarise(run, shape)


def _summarise(run: _Run, shape: Shape) -> Outcome:
    log = run.log
    saturated = np.array(log.saturated)
    window = saturated if saturated.any() else np.ones(len(saturated), bool)
    batch = np.array(log.batch)[window]
    sampled = np.array([full or not saturated.any() for _, full in log.sampled])
    waste = np.array(log.waste, np.float64)[sampled] / shape.pool_slots
    live, internal, reservation, imbalance, external, held = waste.mean(axis=0) * 100
    runs = np.concatenate(log.runs) if log.runs else np.zeros(0, np.int64)
    figures: dict[str, float | int] = {
        "live_pct": live,
        "held_pct": held,
        "internal_pct": internal,
        "reservation_pct": reservation,
        "imbalance_pct": imbalance,
        "external_pct": external,
        "free_pct": 100 - held - external,
        "batch_mean": float(batch.mean()),
        "batch_p5": float(np.percentile(batch, 5)),
        "admitted_per_step": float(np.array(log.admitted)[window].mean()),
        "steps": len(log.batch),
        "saturated_steps": int(saturated.sum()),
        **run.counts,
        "table_bytes": float(np.array(log.table_bytes)[sampled].mean()),
    }
    if runs.size:
        figures["contiguity_pct"] = 100 * float(1 - len(runs) / runs.sum())
        figures["free_superpages_pct"] = 100 * float(np.mean(log.superpages))
    micros = np.array(log.micros)[window]
    timing = {"step_us_mean": float(micros.mean()), "step_us_p99": float(np.percentile(micros, 99))}
    steps = [step for step, _ in log.sampled]
    pool = shape.pool_slots
    series = {
        "step": [float(step) for step in steps],
        "live": [row[0] / pool for row in log.waste],
        "held": [row[5] / pool for row in log.waste],
        "batch": [float(log.batch[step]) for step in steps],
    }
    rounded = {name: value if isinstance(value, int) else round(float(value), 4) for name, value in figures.items()}
    return Outcome(rounded, timing, series, np.array(log.layers, np.float64) / pool, _cumulative(runs))


def _cumulative(runs: Ints) -> list[float]:
    """Share of pages in runs of at most 1, 2, 4, ..., 2048 pages."""
    if not runs.size:
        return []
    return [float(runs[runs <= 1 << k].sum() / runs.sum()) for k in range(12)]
