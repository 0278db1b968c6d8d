"""Strategies for configurations and arguments."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from allocator import LayerKind
from tests.allocator.model import Config


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Small pools: running out, sharing and eviction happen within a few steps."""
    num_layers = draw(st.integers(1, 3))
    kind = draw(
        st.sampled_from(["prefix", "partial", "windows", "kinds", "prefix", "windows", "plain", "kinds", "partial"])
    )
    config = Config(
        num_pages=draw(st.sampled_from([60, 100, 150, 30, 12, 5])),
        page_size=draw(st.sampled_from([2, 3, 1, 4])),
        num_layers=num_layers,
        lanes=draw(st.integers(1, 2)),
        placement=draw(st.sampled_from(["lifo", "runs"])),
        watermark=draw(st.sampled_from([0, 0, 1, 3])),
        long_run=draw(st.sampled_from([32, 1])),
        few=draw(st.sampled_from([16, 1])),
    )
    if kind in ("prefix", "partial", "windows"):
        config.prefix, config.partial = True, kind == "partial"
    if kind == "windows":
        config.windows = draw(st.lists(st.sampled_from([2, 1, 3, 5, None]), min_size=num_layers, max_size=num_layers))
    if kind == "kinds":
        kinds = [LayerKind.CROSS, LayerKind.ATTENTION, LayerKind.STATE]
        config.kinds = draw(st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers))
    return config


def tokens(max_size: int = 14) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that prefixes meet."""
    return st.lists(st.sampled_from([0, 0, 1]), max_size=max_size)


def new_tokens(count: int) -> st.SearchStrategy[list[int]]:
    """What a model would generate: mostly the same, so that blocks meet by chance."""
    return st.lists(st.sampled_from([0, 0, 0, 1]), min_size=count, max_size=count)


def subsets(size: int) -> st.SearchStrategy[list[int]]:
    """A keep-list over `size` live tokens: random, a suffix, or a prefix; everything and nothing among them."""
    if size == 0:
        return st.just([])
    return st.one_of(
        st.lists(st.booleans(), min_size=size, max_size=size).map(lambda bits: [i for i in range(size) if bits[i]]),
        st.integers(0, size).map(lambda n: list(range(n, size))),
        st.integers(0, size).map(lambda n: list(range(size - n))),
    )


def batches(handles: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(handles), unique=True, min_size=1, max_size=4)
