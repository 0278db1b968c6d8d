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
    kind = draw(st.sampled_from(["plain", "prefix", "prefix", "partial", "windows", "kinds"]))
    config = Config(
        num_pages=draw(st.integers(4, 60)),
        page_size=draw(st.sampled_from([1, 2, 3, 4])),
        num_layers=num_layers,
        lanes=draw(st.integers(1, 2)),
        placement=draw(st.sampled_from(["lifo", "runs"])),
        watermark=draw(st.sampled_from([0, 0, 1, 3])),
    )
    if kind in ("prefix", "partial", "windows"):
        config.prefix, config.partial = True, kind == "partial"
    if kind == "windows":
        config.windows = draw(st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=num_layers, max_size=num_layers))
    if kind == "kinds":
        config.kinds = draw(st.lists(st.sampled_from(list(LayerKind)), min_size=num_layers, max_size=num_layers))
    return config


def tokens(max_size: int = 14) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that prefixes meet."""
    return st.lists(st.integers(0, 1), max_size=max_size)


def subsets(size: int) -> st.SearchStrategy[list[int]]:
    """A keep-list over `size` live tokens: random, a prefix, whole pages, everything, or nothing."""
    if size == 0:
        return st.just([])
    return st.one_of(
        st.lists(st.booleans(), min_size=size, max_size=size).map(
            lambda bits: [i for i, bit in enumerate(bits) if bit]
        ),
        st.integers(0, size).map(lambda n: list(range(n))),
        st.integers(0, size).map(lambda n: list(range(n, size))),
    )


def batches(handles: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(handles), unique=True, min_size=1, max_size=4)
