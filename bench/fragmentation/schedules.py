"""Crop schedules: how many tokens each row of a sequence needs, as it is filled and as it grows. Nothing of pages here.

Rows are heads of layers. Where a schedule treats all heads of a layer alike, its arrays have a head axis of length 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.fragmentation.shape import Shape

__all__ = ["SCHEDULES", "Schedule", "make_schedule"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each row keeps.

    Attributes:
        name: short name.
        text: one line for the report.
        keep: float64 [layers, heads or 1], share of the prompt kept after prefill; None keeps all.
        random_heads: draw `keep` for each request, per layer and head, instead.
        budget: int64 [layers], most tokens a layer may keep; a row is cropped to it when it is `every` above it.
        every: tokens between two crops of a row while decoding.
        windows: sliding window of each layer in tokens, 0 for none.
        draft: (least, most) draft tokens appended and rolled back in each decode step.
    """

    name: str
    text: str
    keep: Floats | None = None
    random_heads: bool = False
    budget: Ints | None = None
    every: int = 0
    windows: Ints | None = None
    draft: tuple[int, int] | None = None

    def heads(self, shape: Shape) -> int:
        """Length of the head axis: 1 unless heads differ."""
        return shape.heads if self.random_heads else 1

    def after_prefill(self, prompt: int, shape: Shape, rng: np.random.Generator) -> Ints:
        """Tokens each row keeps of a prompt, int64 [layers, heads or 1], at least 1."""
        live = np.full((shape.layers, self.heads(shape)), prompt, np.int64)
        keep = _adaptive_keep(shape, rng) if self.random_heads else self.keep
        if keep is not None:
            live = np.maximum(1, np.ceil(live * keep)).astype(np.int64)
        if self.budget is not None:
            live = np.minimum(live, self.budget[:, None])
        return self._slide(live)

    def after_step(self, live: Ints) -> Ints:
        """Tokens each row keeps after a decode step brought one more, int64 [batch, layers, heads or 1]."""
        grown = live + 1
        if self.budget is not None:
            limit = self.budget[None, :, None]
            grown = np.where(grown >= limit + self.every, limit, grown)
        return self._slide(grown)

    def drafts(self, batch: int, rng: np.random.Generator) -> Ints:
        """Draft tokens of each sequence in this step, int64 [batch]."""
        if self.draft is None:
            return np.zeros(batch, np.int64)
        return rng.integers(self.draft[0], self.draft[1] + 1, batch)

    def _slide(self, live: Ints) -> Ints:
        if self.windows is None:
            return live
        window = np.where(self.windows > 0, self.windows, np.iinfo(np.int64).max)
        return np.minimum(live, window[:, None])


def _adaptive_keep(shape: Shape, rng: np.random.Generator) -> Floats:
    """Shares like adaptive head budgets make them: a mean for each layer, unevenly divided among its heads."""
    mean = rng.uniform(0.2, 0.8, (shape.layers, 1))
    parts = rng.gamma(2.0, 1.0, (shape.layers, shape.heads))
    return np.clip(parts / parts.mean(axis=1, keepdims=True) * mean, 0.02, 1.0)


def _windows(shape: Shape, *, period: int, window: int) -> Ints:
    """Every `period`-th layer attends to everything, the others to `window` tokens."""
    layer = np.arange(shape.layers)
    return np.where((layer + 1) % period == 0, 0, window)


def make_schedule(name: str, shape: Shape) -> Schedule:
    """The schedule of that name for a model of that shape."""
    depth = np.linspace(0, 1, shape.layers)[:, None]
    third = np.arange(shape.layers)[:, None] < shape.layers // 3
    made = {
        "none": Schedule("none", "nothing is dropped"),
        "uniform": Schedule("uniform", "half of the prompt in every layer", keep=np.full((shape.layers, 1), 0.5)),
        "pyramid": Schedule("pyramid", "1.0 of the prompt in the first layer down to 0.1 in the last",
                            keep=1.0 - 0.9 * depth),
        "step": Schedule("step", "all of the prompt in the first third of the layers, a quarter in the rest",
                         keep=np.where(third, 1.0, 0.25)),
        "random": Schedule("random", "random for each layer and head of each request (like AdaKV)", random_heads=True),
        "budget": Schedule("budget", "1024 tokens in the first layer down to 128 in the last, cropped every 128 tokens",
                           budget=np.rint(1024 - 896 * depth[:, 0]).astype(np.int64), every=128),
        "window-5to1": Schedule("window-5to1", "five layers with a window of 1024 for each full one (like Gemma 3)",
                                windows=_windows(shape, period=6, window=1024)),
        "window-1to1": Schedule("window-1to1", "layers with a window of 128 and full ones in turn (like gpt-oss)",
                                windows=_windows(shape, period=2, window=128)),
        "rollback": Schedule("rollback", "4 to 8 draft tokens appended and rolled back in each step", draft=(4, 8)),
    }  # fmt: skip
    return made[name]


SCHEDULES = ("none", "uniform", "pyramid", "step", "random", "budget", "window-5to1", "window-1to1", "rollback")
