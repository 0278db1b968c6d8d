"""Exact traces: which page ids are given out, shared, copied and evicted, step by step. `docs/allocator.md` shows them.

A change of policy changes these numbers; that must be meant.
"""

from typing import Any

from allocator import BlockAllocator, SeqId


def tables(allocator: BlockAllocator, seq: SeqId) -> list[list[int]]:
    return [
        row[:n].tolist()
        for row, n in zip(allocator.block_tables([seq])[:, 0], allocator.num_pages_of(seq), strict=True)
    ]


def next_pages(allocator: BlockAllocator) -> list[int]:
    return allocator._core.pool.free_pages()[::-1].tolist()


def states(allocator: BlockAllocator) -> tuple[int, int, int]:
    stats = allocator.stats()
    return stats.free_pages, stats.active_pages, stats.cached_pages


def test_sharing_copying_and_cropping_page_by_page() -> None:
    allocator = BlockAllocator(13, page_size=2, num_layers=2, enable_prefix_caching=True)
    # 1: five tokens take three pages in each of two layers, row by row.
    a = allocator.open().seq
    assert allocator.append([a], 5).allocated == 6
    assert tables(allocator, a) == [[1, 2, 3], [4, 5, 6]]
    # 2: two full blocks are published, {1, 4} and {2, 5}; the partly filled third is not.
    assert allocator.commit(a, [1, 2, 3, 4, 5]) == 2
    # 3: another prompt with the same four first tokens starts on them.
    b, cached = (opened := allocator.open([1, 2, 3, 4, 9])).seq, opened.num_cached_tokens
    assert cached == 4
    assert tables(allocator, b) == [[1, 2], [4, 5]]
    # 4: its new tokens go to new pages.
    assert allocator.append([b], 2).allocated == 2
    assert tables(allocator, b) == [[1, 2, 7], [4, 5, 8]]
    # 5: a fork shares all of it; 6: its next token starts a page, so nothing is copied.
    [c] = allocator.fork(b)
    plan = allocator.append([c], 1)
    assert (plan.allocated, len(plan.copies)) == (2, 0)
    assert tables(allocator, c) == [[1, 2, 7, 9], [4, 5, 8, 10]]
    # 7: cropping layer 1 of b: pages 4, 5 are published and 8 is shared, so survivors move to fresh pages 11, 12.
    plan = allocator.crop(b, {1: [0, 3, 5]})
    assert (plan.allocated, plan.freed) == (2, 0)
    assert plan.moves.src.tolist() == [8, 11, 17]
    assert plan.moves.dst.tolist() == [22, 23, 24]
    assert tables(allocator, b) == [[1, 2, 7], [11, 12]]
    assert states(allocator) == (0, 12, 0)
    # 8: closing a frees its own pages; 9: closing c frees three and leaves 4, 5 cached; 10: so does closing b.
    assert allocator.close(a).freed == 2
    assert next_pages(allocator) == [3, 6]
    assert allocator.close(c).freed == 5
    assert next_pages(allocator) == [9, 8, 10, 3, 6]
    assert states(allocator) == (5, 5, 2)
    assert allocator.close(b).freed == 5
    assert next_pages(allocator) == [7, 11, 12, 9, 8, 10, 3, 6]
    assert states(allocator) == (8, 0, 4)
    # 11: eight pages are free: the next sequence takes them in this order, and no block is evicted.
    d = allocator.open().seq
    allocator.append([d], 8)
    assert tables(allocator, d) == [[7, 11, 12, 9], [8, 10, 3, 6]]
    assert allocator.peek([1, 2, 3, 4, 9]) == 4
    allocator.check()


def open_and_close(allocator: BlockAllocator, tokens: list[int], **kwargs: Any) -> None:
    seq = allocator.open(tokens).seq
    allocator.append([seq], len(tokens) - allocator.seen_len(seq))
    allocator.commit(seq, tokens, **kwargs)
    allocator.close(seq)


def cached_after_eviction(allocator: BlockAllocator, num_pages: int, prompts: list[list[int]]) -> list[int]:
    seq = allocator.open().seq
    allocator.append([seq], num_pages)
    found = [allocator.peek([*prompt, 0]) for prompt in prompts]
    allocator.close(seq)
    return found


def test_blocks_are_evicted_deepest_first_and_longest_unused_first() -> None:
    allocator = BlockAllocator(7, page_size=1, num_layers=1, enable_prefix_caching=True)
    one, two = [10, 11, 12], [20, 21, 22]
    open_and_close(allocator, one)  # pages 1 2 3
    open_and_close(allocator, two)  # pages 4 5 6
    assert states(allocator) == (0, 0, 6)
    # Order of eviction: 12 11 10, then 22 21 20.
    assert cached_after_eviction(allocator, 1, [one, two]) == [2, 3]
    assert cached_after_eviction(allocator, 2, [one, two]) == [1, 3]
    # A hit makes `one` the one used last: now the rest of it outlives `two`.
    open_and_close(allocator, [10, 99])  # 10 is refreshed; 99 takes a free page and is published
    assert cached_after_eviction(allocator, 3, [one, two]) == [1, 1]
    assert cached_after_eviction(allocator, 5, [one, two]) == [1, 0]
    assert cached_after_eviction(allocator, 6, [one, two]) == [0, 0]
    assert allocator.stats().evicted_blocks == 7


def test_a_peek_refreshes_nothing() -> None:
    allocator = BlockAllocator(3, page_size=1, num_layers=1, enable_prefix_caching=True)
    open_and_close(allocator, [1])
    open_and_close(allocator, [2])
    assert allocator.peek([1, 0]) == 1
    assert cached_after_eviction(allocator, 1, [[1], [2]]) == [0, 1]


def test_low_priorities_go_first_whenever_they_were_used() -> None:
    allocator = BlockAllocator(4, page_size=1, num_layers=1, enable_prefix_caching=True)
    open_and_close(allocator, [1], priority=3)
    open_and_close(allocator, [2], priority=1)
    open_and_close(allocator, [3], priority=1)
    assert cached_after_eviction(allocator, 1, [[1], [2], [3]]) == [1, 0, 1]
    assert cached_after_eviction(allocator, 2, [[1], [2], [3]]) == [1, 0, 0]
    assert cached_after_eviction(allocator, 3, [[1], [2], [3]]) == [0, 0, 0]


def test_handles_of_equal_calls_are_equal() -> None:
    one, other = (BlockAllocator(50, page_size=n, num_layers=n) for n in (2, 3))
    for allocator in (one, other):
        first, second = allocator.open().seq, allocator.open().seq
        allocator.close(first)
        third = allocator.open().seq
        assert (first, second, third) == (1 << 32, 1 << 32 | 1, 2 << 32)
        assert allocator.fork(second, 2) == [1 << 32 | 2, 1 << 32 | 3]


def test_shrinking_moves_the_highest_pages_into_the_lowest_free_ones() -> None:
    allocator = BlockAllocator(9, page_size=2, num_layers=1)
    a, b = allocator.open().seq, allocator.open().seq
    allocator.append([a], 8)
    allocator.append([b], 6)
    allocator.close(a)
    assert tables(allocator, b) == [[5, 6, 7]]
    plan = allocator.shrink(3)
    assert (plan.copies.src.tolist(), plan.copies.dst.tolist()) == ([6, 7], [1, 2])
    assert tables(allocator, b) == [[5, 1, 2]]
    assert allocator.num_pages == 6
    allocator.check()


def test_placement_in_runs_leaves_each_row_room_to_go_on() -> None:
    allocator = BlockAllocator(65, page_size=1, num_layers=2, placement="runs")
    a = allocator.open().seq
    for _ in range(3):
        allocator.append([a], 1)
    assert tables(allocator, a) == [[8, 9, 10], [16, 17, 18]]  # chunk 0 is not whole: it holds the null page
    b = allocator.open().seq
    allocator.append([b], 10)
    assert tables(allocator, b) == [[*range(24, 34)], [*range(40, 50)]]
    allocator.append([a], 5)
    assert tables(allocator, a) == [[*range(8, 16)], [*range(16, 24)]]
    allocator.append([a], 1)  # what follows is taken: a chunk of its own while there is one, else the lowest page
    assert tables(allocator, a) == [[*range(8, 16), 56], [*range(16, 24), 1]]
    allocator.check()
    allocator.grow(16)
    allocator.append([b], 7)  # the last six of its second chunk, then a chunk of its own
    assert tables(allocator, b) == [[*range(24, 40), 64], [*range(40, 56), 72]]
    allocator.check()
