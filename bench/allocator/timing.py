"""Timing and the record of one measurement."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Figures", "Row", "measure"]


@dataclass(frozen=True)
class Figures:
    """What repeated measurements gave."""

    median: float
    mean: float
    p99: float
    best: float

    def times(self, factor: float) -> Figures:
        """In another unit."""
        return Figures(self.median * factor, self.mean * factor, self.p99 * factor, self.best * factor)

    @classmethod
    def exactly(cls, value: float) -> Figures:
        """Of something that does not vary."""
        return cls(value, value, value, value)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        operation, case, subject: what was measured, on what size, of which structure.
        unit: of the figures, for one piece (page, step, block ...).
        figures: over the repetitions.
        target: what the project asks for, in the same unit, on its reference machine; None for baselines.
    """

    operation: str
    case: str
    subject: str
    unit: str
    figures: Figures
    target: float | None = None


def measure(
    call: Callable[[], object],
    *,
    repeat: int,
    pieces: float = 1,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Figures:
    """Processor seconds a piece over `repeat` calls of `call`; `before` and `after` each of them are not timed.

    Time of this thread on a processor, not of the clock on the wall: other jobs on the machine then show little. The
    garbage collector is off meanwhile.
    """
    seconds = []
    call_once = [step for step in (before, call, after) if step is not None]
    for step in call_once:  # warm
        step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeat):
            if before is not None:
                before()
            start = time.thread_time()
            call()
            seconds.append(time.thread_time() - start)
            if after is not None:
                after()
    finally:
        gc.enable()
    each = np.array(seconds) / pieces
    return Figures(float(np.median(each)), float(each.mean()), float(np.percentile(each, 99)), float(each.min()))
