"""What may be shared, and what never is."""

import hashlib

import numpy as np
import pytest

from allocator import BlockAllocator, BlockRemoved, BlocksCleared, BlockStored, InvalidArgument, OutOfPages, SeqId
from tests.allocator.model import chain


def build(num_pages: int = 60, **kwargs: bool) -> BlockAllocator:
    return BlockAllocator(num_pages, page_size=4, num_layers=2, enable_prefix_caching=True, **kwargs)


def publish(allocator: BlockAllocator, tokens: list[int], scope: bytes = b"", *, close: bool = True) -> int:
    opened = allocator.open(tokens, scope=scope)
    allocator.append([opened.seq], len(tokens) - opened.num_cached_tokens)
    published = allocator.commit(opened.seq, tokens)
    if close:
        allocator.close(opened.seq)
    return published


TEN = list(range(10))


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [(TEN, 8), (TEN[:9], 8), (TEN[:8], 4), (TEN[:5], 4), (TEN[:4], 0), ([], 0), ([9, *TEN], 0), ([*TEN[:6], 0, 0], 4)],
    ids=["all", "9 of 10", "two blocks end at the last token", "5", "one block only", "empty", "shifted", "branch"],
)
def test_a_match_is_whole_blocks_and_never_the_last_token(prompt: list[int], cached: int) -> None:
    allocator = build()
    assert publish(allocator, TEN) == 2
    assert allocator.peek(prompt) == cached
    assert allocator.open(prompt).num_cached_tokens == cached
    assert allocator.stats().prefix_queries == len(TEN) + len(prompt)
    assert allocator.stats().prefix_hits == cached


def test_hashes_do_not_depend_on_how_tokens_were_committed_forked_or_rolled_back() -> None:
    allocator = build()
    tokens = list(range(40, 58))
    seq = allocator.open(tokens).seq

    def go_on(seq: SeqId, end: int) -> bytes:
        allocator.append([seq], end - allocator.seen_len(seq))
        allocator.commit(seq, tokens[:end])
        return bytes(allocator._core.chains[allocator._core.tables.slot_of(seq)])

    for end in (5, 8, 9, 13):
        assert go_on(seq, end) == b"".join(chain(b"", tokens[:end], 4))
    child, other = allocator.fork(seq, 2)
    allocator.truncate([seq], 6)
    for each in (seq, child, other):
        assert go_on(each, 18) == b"".join(chain(b"", tokens, 4))
    restored = build()
    restored.restore(allocator.snapshot())
    restored.append([child], 2)
    assert restored.commit(child, [*tokens, 58, 59]) == 1
    assert restored.peek([*tokens, 58, 59, 60]) == 20


def test_tokens_that_differ_from_those_matched_before_are_refused() -> None:
    allocator = build()
    publish(allocator, TEN)
    seq = allocator.open(TEN).seq
    allocator.append([seq], 4)
    before = allocator.snapshot()
    with pytest.raises(InvalidArgument, match="not those that the sequence was opened or committed with"):
        allocator.commit(seq, [9, *TEN[1:], 1, 2])
    assert allocator.snapshot() == before
    assert allocator.commit(seq, [*TEN, 1, 2]) == 1


@pytest.mark.parametrize("limit", [0, 3, 4, 7, 8, 100])
def test_a_limit_bounds_the_match(limit: int) -> None:
    allocator = build()
    publish(allocator, TEN)
    assert (
        allocator.peek(TEN, limit=limit) == allocator.open(TEN, limit=limit).num_cached_tokens == min(8, limit // 4 * 4)
    )


def test_another_scope_never_hits() -> None:
    allocator = build()
    publish(allocator, TEN, b"tenant a")
    assert allocator.peek(TEN, scope=b"tenant a") == 8
    assert allocator.peek(TEN, scope=b"tenant b") == allocator.peek(TEN) == 0
    assert publish(allocator, TEN, b"tenant b") == 2


def test_hashes_are_sha256_over_the_scope_and_the_raw_bytes_of_all_tokens_so_far() -> None:
    allocator = build(record_events=True)
    publish(allocator, TEN, b"salt")
    root = hashlib.sha256(b"paged-kv blocks 2\0" + b"4\0" + b"salt").digest()
    first = hashlib.sha256(root + np.arange(4, dtype="<i4").tobytes()).digest()
    second = hashlib.sha256(root + np.arange(8, dtype="<i4").tobytes()).digest()
    assert allocator.drain_events() == [BlockStored(first, root), BlockStored(second, first)]  # type: ignore[arg-type]
    allocator.append([allocator.open().seq], 4 * 28)
    assert allocator.drain_events() == [BlockRemoved(second)]  # type: ignore[arg-type]
    assert allocator.clear_prefix() == 1
    assert allocator.drain_events() == [BlocksCleared()]
    assert allocator.drain_events() == []


def test_an_equal_block_is_stored_once() -> None:
    allocator = build()
    one, other = allocator.open(TEN).seq, allocator.open(TEN).seq
    allocator.append([one, other], 10)
    assert allocator.stats().active_pages == 12
    assert allocator.commit(one, TEN) == 2
    assert allocator.commit(other, TEN) == 0
    assert allocator.stats().active_pages == 8
    tables = allocator.block_tables([one, other])
    assert (tables[:, 0, :2] == tables[:, 1, :2]).all()
    assert (tables[:, 0, 2] != tables[:, 1, 2]).all()
    assert allocator.commit(other, TEN) == 0
    allocator.check()


def test_a_cropped_or_slid_sequence_publishes_nothing() -> None:
    allocator = BlockAllocator(60, page_size=2, num_layers=2, windows=[None, 3], enable_prefix_caching=True)
    assert BlockAllocator(9, page_size=1, num_layers=1).peek([1, 2, 3]) == 0  # without an index nothing is found
    cropped, slid = allocator.open().seq, allocator.open().seq
    allocator.append([cropped, slid], 8)
    allocator.crop(cropped, {0: [0, 2, 3]})
    assert allocator.slide([slid]).freed == 3
    assert allocator.commit(cropped, TEN[:8]) == allocator.commit(slid, TEN[:8]) == 0
    assert allocator.clear_prefix() == 0


def test_a_crop_that_keeps_everything_is_no_crop() -> None:
    allocator = build()
    seq = allocator.open().seq
    allocator.append([seq], 10)
    assert allocator.crop(seq, {0: np.arange(10)}) == allocator.crop(seq, {})
    assert not allocator.is_diverged(seq)
    assert allocator.commit(seq, TEN) == 2


def test_rolling_back_into_a_published_block_copies_it_before_writing() -> None:
    allocator = build()
    seq = allocator.open().seq
    allocator.append([seq], 8)
    allocator.commit(seq, TEN[:8])
    allocator.truncate([seq], 2)
    plan = allocator.append([seq], 2)
    assert len(plan.copies) == plan.allocated == 2
    assert plan.freed == 2  # the published pages stay, cached
    assert allocator.stats().cached_pages == 2
    assert allocator.commit(seq, [0, 1, 2, 3, 4, 5, 60, 70]) == 1
    assert allocator.peek(TEN) == 8


def test_a_published_page_that_a_crop_cuts_is_copied_before_the_next_append_writes_it() -> None:
    allocator = build()
    seq = allocator.open().seq
    allocator.append([seq], 8)
    allocator.commit(seq, TEN[:8])
    plan = allocator.crop(seq, {0: range(6)})  # a prefix: nothing moves, but the tail page is published
    assert len(plan.moves) == plan.allocated == 0
    plan = allocator.append([seq], 1)
    assert len(plan.copies) == 1
    assert plan.allocated == 2  # the copy, and a new page for the layer that was full


def test_a_pinned_prefix_is_not_evicted() -> None:
    allocator = build(num_pages=11)
    publish(allocator, TEN[:8])
    pin, covered = allocator.pin_prefix(TEN[:4])
    assert covered == 4
    with pytest.raises(OutOfPages):
        allocator.append([allocator.open().seq], 20)
    allocator.append([allocator.open().seq], 16)
    assert allocator.peek(TEN) == 4
    assert allocator.unpin(pin).freed == 2
    assert BlockAllocator(9, page_size=1, num_layers=1).pin_prefix([1, 2])[1] == 0


def test_reserved_pages_are_not_taken_by_matches() -> None:
    allocator = build(num_pages=9)
    publish(allocator, TEN[:8])
    seq = allocator.open().seq
    assert allocator.reserve(seq, 12) == 6
    assert allocator.peek(TEN) == 8
    assert allocator.open(TEN).num_cached_tokens == 4  # one block may go from cached to referenced, two may not
    with pytest.raises(OutOfPages):
        allocator.pin_prefix(TEN)
    allocator.append([seq], 12)
    allocator.check()


def test_deduplication_leaves_reserved_pages_alone() -> None:
    allocator = BlockAllocator(6, page_size=1, num_layers=1, enable_prefix_caching=True)
    seq = allocator.open().seq
    allocator.append([seq], 1)
    [twin] = allocator.fork(seq)
    publish(allocator, [7])
    other = allocator.open().seq
    assert allocator.reserve(other, 4) == 4
    before = allocator.block_tables([seq]).tolist()
    assert allocator.commit(seq, [7]) == 0  # reading the cached block would take a page that is set aside
    assert allocator.block_tables([seq]).tolist() == before
    allocator.reserve(other, 0)
    assert allocator.commit(twin, [7]) == 0
    assert allocator.block_tables([twin]).tolist() != before


class TestPartialReuse:
    def test_the_best_block_is_copied(self) -> None:
        allocator = build(partial_reuse=True)
        publish(allocator, [0, 1, 2, 3, 4, 5, 6, 7])
        publish(allocator, [0, 1, 2, 3, 4, 5, 60, 70])
        opened = allocator.open([0, 1, 2, 3, 4, 5, 6, 99])
        assert opened.num_cached_tokens == 7
        assert len(opened.plan.copies) == opened.plan.allocated == 2
        assert allocator.num_pages_of(opened.seq).tolist() == [2, 2]
        plan = allocator.append([opened.seq], 1)
        assert plan.allocated == 0  # the copy is the sequence's own
        assert allocator.commit(opened.seq, [0, 1, 2, 3, 4, 5, 6, 99]) == 1
        allocator.check()

    def test_a_part_of_the_first_block_counts_too_but_never_the_last_token(self) -> None:
        allocator = build(partial_reuse=True)
        publish(allocator, TEN[:4])
        assert allocator.open(TEN[:4]).num_cached_tokens == 3
        assert allocator.open([0]).num_cached_tokens == 0
        assert allocator.open([5, 6, 7]).num_cached_tokens == 0

    def test_without_pages_for_the_copy_nothing_is_reused(self) -> None:
        allocator = build(num_pages=5, partial_reuse=True)
        publish(allocator, TEN[:4], close=False)
        allocator.append([allocator.open().seq], 3)
        assert allocator.open(TEN[:4]).num_cached_tokens == 0

    def test_the_newest_sixteen_candidates_are_tried(self) -> None:
        allocator = build(num_pages=200, partial_reuse=True)
        for first in range(20):
            publish(allocator, [first, 1, 2, 3])
        assert allocator.open([3, 1, 2, 9]).num_cached_tokens == 0
        assert allocator.open([4, 1, 2, 9]).num_cached_tokens == 3

    def test_evicted_blocks_are_no_candidates(self) -> None:
        allocator = build(num_pages=9, partial_reuse=True)
        for first in range(4):
            publish(allocator, [first, 1, 2, 3])
        for evicted in range(4):
            seq = allocator.open().seq
            allocator.append([seq], 4 * (evicted + 1))
            allocator.close(seq)
            allocator.check()
        assert allocator.clear_prefix() == 0


def test_the_newest_candidate_may_be_forgotten_before_an_older_one() -> None:
    allocator = build(num_pages=5, partial_reuse=True)
    publish(allocator, [1, 1, 2, 3])
    pin, _ = allocator.pin_prefix([1, 1, 2, 3])
    publish(allocator, [2, 1, 2, 3])
    filler = allocator.open().seq
    allocator.append([filler], 4)  # evicts the newer block
    allocator.close(filler)
    assert allocator.open([1, 1, 2, 9]).num_cached_tokens == 3
    allocator.unpin(pin)
    allocator.check()


def test_pages_are_not_published_twice_under_other_tokens() -> None:
    allocator = build()
    seq = allocator.open().seq
    allocator.append([seq], 4)
    [twin] = allocator.fork(seq)
    assert allocator.commit(seq, [1, 2, 3, 4]) == 1
    assert allocator.commit(twin, [5, 6, 7, 8]) == 0  # wrong, but the published block stays what it is
    assert allocator.peek([1, 2, 3, 4, 0]) == 4
    assert allocator.peek([5, 6, 7, 8, 0]) == 0
    allocator.check()


def test_forgetting_blocks_in_any_order_keeps_the_candidates_right() -> None:
    allocator = build(num_pages=41, partial_reuse=True)
    for first in range(4):
        publish(allocator, [first, 1, 2, 3])
    assert allocator.open([1, 1, 2, 3]).num_cached_tokens == 3  # holding a copy
    pin, _ = allocator.pin_prefix([3, 1, 2, 3])
    keep, _ = allocator.pin_prefix([1, 1, 2, 3])
    filler = allocator.open().seq
    allocator.append([filler], 4 * 17)  # evicts 0 and 2, which lie between the pinned ones
    assert [allocator.peek([first, 1, 2, 3, 0]) for first in range(4)] == [0, 4, 0, 4]
    allocator.close(filler)
    assert allocator.open([3, 1, 9]).num_cached_tokens == 2
    allocator.unpin(pin)
    allocator.unpin(keep)
    first = publish(allocator, [7, 1, 2, 3]), publish(allocator, [8, 1, 2, 3])
    assert first == (1, 1)
    assert allocator.clear_prefix() == 4  # 1 and 3 go before 7 and 8, which were filed after them
    allocator.check()


@pytest.mark.parametrize("partial", [False, True])
def test_the_index_grows_with_the_pool(partial: bool) -> None:
    allocator = build(num_pages=5, partial_reuse=partial)
    publish(allocator, TEN[:8])
    allocator.grow(40)
    for start in range(10, 30, 4):
        publish(allocator, list(range(start, start + 4)))
    assert allocator.peek(TEN) == 8
    allocator.shrink(40)
    assert allocator.stats().cached_pages == 4
    allocator.check()
