"""Random paged problems; the right answer to them is `paged_kv.attention.dense`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_kv.attention.dense import attend_exactly
from paged_kv.store import LayerView

__all__ = ["Shape", "attend_exactly", "problem", "without_nan"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, widths and pages of a problem."""

    lanes: int = 1
    heads_per_lane: int = 2
    group: int = 3
    key_width: int = 64
    value_width: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def q_heads(self) -> int:
        return self.lanes * self.heads_per_lane * self.group


def problem(
    shape: Shape,
    lives: Sequence[Sequence[int]] | Sequence[int],
    queries: Sequence[int] | None = None,
    *,
    seed: int = 0,
    starts: bool = False,
    spread: float = 1.0,
) -> tuple[Tensor, LayerView]:
    """A query and a view with pages in random order; every slot that no live token has, the null page's too, is NaN.

    Args:
        shape: Heads, widths and pages.
        lives: Live tokens `[lanes][rows]`, or `[rows]` for the same in every lane.
        queries: Queries of each row; one each by default.
        seed: Of the random numbers.
        starts: Give each query a random first visible token.
        spread: Standard deviation of the query's entries.
    """
    random = torch.Generator().manual_seed(seed)
    per_lane = [[int(n) for n in lane] for lane in lives] if lives and not isinstance(lives[0], int) else None
    lane_lives = per_lane or [[int(n) for n in lives] for _ in range(shape.lanes)]  # type: ignore[call-overload]
    rows = len(lane_lives[0])
    counts = list(queries) if queries is not None else [1] * rows
    page_counts = [[-(-n // shape.page_size) for n in lane] for lane in lane_lives]
    num_pages = sum(map(sum, page_counts)) + 3
    free = (torch.randperm(num_pages - 1, generator=random) + 1).tolist()
    table = torch.zeros(shape.lanes, rows, max(1, *(max(lane) for lane in page_counts)), dtype=torch.int32)
    pages = (num_pages, shape.heads_per_lane, shape.page_size)
    keys = torch.full((*pages, shape.key_width), float("nan"), dtype=shape.dtype)
    values = torch.full((*pages, shape.value_width), float("nan"), dtype=shape.dtype)
    for lane, lives_of_lane in enumerate(lane_lives):
        for row, live in enumerate(lives_of_lane):
            for index in range(page_counts[lane][row]):
                page = free.pop()
                table[lane, row, index] = page
                n = min(shape.page_size, live - index * shape.page_size)
                for store in (keys, values):
                    fresh = torch.randn(shape.heads_per_lane, n, store.shape[-1], generator=random)
                    store[page, :, :n] = fresh.to(shape.dtype)
    query_start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tokens = sum(counts)
    query = (torch.randn(tokens, shape.q_heads, shape.key_width, generator=random) * spread).to(shape.dtype)
    live_lens = torch.tensor(lane_lives, dtype=torch.int32)
    kv_start = None
    if starts:
        row_of = torch.repeat_interleave(torch.arange(rows), torch.tensor(counts))
        room = live_lens[:, row_of].double() + 2  # now and then past the end: such a query sees nothing
        kv_start = (torch.rand(shape.lanes, tokens, generator=random).double() * room).to(torch.int32)
    most = max(1, int(live_lens.max()))
    view = LayerView(keys, values, table, live_lens, query_start, kv_start, max([1, *counts]), most)
    return query, view


def without_nan(view: LayerView) -> LayerView:
    """The same view with zeros where nothing was written: for backends that read such slots and mask them."""
    return replace(view, keys=view.keys.nan_to_num(0.0), values=view.values.nan_to_num(0.0))
