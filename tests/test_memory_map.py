"""The map counts every page once, and its pictures say what it counts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rich.console import Console

from allocator import BlockAllocator, StaleHandle
from paged_kv.memory_map import render_html, render_text, snapshot


def _pool(**options: object) -> BlockAllocator:
    return BlockAllocator(101, page_size=4, num_layers=3, **options)  # type: ignore[arg-type]


def _text(*args: object, **kwargs: object) -> str:
    console = Console(width=160, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_text(*args, **kwargs))  # type: ignore[arg-type]
    return console.export_text()


def test_an_empty_pool_is_all_free():
    memory = snapshot(_pool(), {})
    assert (memory.held, memory.cached, memory.free, memory.total) == (0, 0, 100, 100)
    assert "0 of 100 pages held" in _text(memory)
    assert "<svg" in render_html([memory])


def test_pages_are_counted_by_layer_and_sequence_and_add_up():
    allocator = _pool()
    first, second = allocator.open().seq, allocator.open().seq
    allocator.append([first, second], [17, 6])
    allocator.crop(first, {2: np.arange(3)})
    memory = snapshot(allocator, {"a": first, "b": second}, layers=[4, 5, 6], page_bytes=1024)
    assert memory.own == ((5, 2), (5, 2), (1, 2))
    assert memory.live == ((17, 6), (17, 6), (3, 6))
    assert memory.seen == (17, 6)
    assert memory.shared == (0, 0, 0)
    assert memory.total == 100
    assert [memory.held_in(line) for line in range(3)] == [7, 7, 3]


def test_shared_pages_count_once():
    allocator = _pool()
    seq = allocator.open().seq
    allocator.append([seq], 8)
    [child] = allocator.fork(seq)
    allocator.append([child], 3)
    memory = snapshot(allocator, {"parent": seq, "child": child})
    assert memory.shared == (2, 2, 2)
    assert memory.own == ((0, 1),) * 3
    assert memory.held == 9
    assert memory.total == 100


def test_cached_pages_are_told_from_free_ones():
    allocator = _pool(enable_prefix_caching=True)
    tokens = list(range(8))
    seq = allocator.open(tokens).seq
    allocator.append([seq], 8)
    allocator.commit(seq, tokens)
    allocator.close(seq)
    memory = snapshot(allocator, {})
    assert (memory.held, memory.cached, memory.free) == (0, 6, 94)


def test_lanes_add_up_within_their_layer():
    allocator = _pool(lanes=2)
    seq = allocator.open().seq
    allocator.append([seq], 8)
    allocator.crop(seq, {(1, 0): [0]})
    memory = snapshot(allocator, {"a": seq})
    assert memory.own == ((4,), (3,), (4,))
    assert memory.live[1] == (4.5,)


def test_a_closed_sequence_is_refused():
    allocator = _pool()
    seq = allocator.open().seq
    allocator.close(seq)
    with pytest.raises(StaleHandle):
        snapshot(allocator, {"gone": seq})


def test_bars_are_as_long_as_the_pages_they_stand_for():
    allocator = _pool()
    first, second = allocator.open().seq, allocator.open().seq
    allocator.append([first, second], [40, 20])
    text = _text(snapshot(allocator, {"a": first, "b": second}))
    assert text.count("a" * 10 + "b" * 5) == 3
    halved = _text(snapshot(allocator, {"a": first, "b": second}), width=8)
    assert "one character is 2 pages" in halved
    assert halved.count("a" * 5 + "b" * 3) == 3


def test_the_page_is_self_contained_and_escapes_names():
    allocator = _pool()
    seq = allocator.open().seq
    allocator.append([seq], 9)
    page = render_html([snapshot(allocator, {"<b>&": seq}, name="a < b")])
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;: 3 pages of its own, 9 live tokens" in page
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert page.count("<rect") == 3 + 2  # a bar for each layer; held and free of the pool
