"""Statistics, limits and promises that hold for the package as a whole."""

import gc
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import allocator as package
from allocator import (
    Admission,
    AllocatorStats,
    BlockAllocator,
    BrokenInvariant,
    LayerKind,
    OutOfPages,
    PagePool,
    PagesPinned,
    StaleHandle,
    Verdict,
)
from allocator.core import Core


def test_counters_say_what_happened() -> None:
    allocator = BlockAllocator(33, page_size=4, num_layers=2, enable_prefix_caching=True)
    seq = allocator.open().seq
    allocator.append([seq], 10)
    allocator.commit(seq, list(range(10)))
    [child] = allocator.fork(seq)
    allocator.append([child], 1)
    allocator.crop(child, {1: [1, 2, 10]})
    allocator.reserve(seq, 8)
    allocator.preempt(child)
    stats = allocator.stats()
    assert stats == AllocatorStats(
        total_pages=32,
        free_pages=26,
        active_pages=6,
        cached_pages=0,
        reserved_pages=4,
        num_seqs=1,
        live_tokens=20,
        table_entries=6,
        tail_waste=4,
        table_bytes=stats.table_bytes,
        prefix_queries=0,
        prefix_hits=0,
        evicted_blocks=0,
        copied_pages=2,
        moved_slots=2,  # the third survivor is in place: its page is recycled as the target
        preemptions=1,
    )
    with pytest.raises(FrozenInstanceError):
        stats.num_seqs = 2  # type: ignore[misc]


def test_fragmentation_by_hand() -> None:
    allocator = BlockAllocator(33, page_size=4, num_layers=2, windows=[None, 6])
    empty = allocator.fragmentation()
    assert (empty.waste.free, empty.imbalance, empty.mean_run) == (128, 0.0, 1.0)
    a, b, unused = (allocator.open().seq for _ in range(3))
    allocator.append([a, b], [13, 4])
    allocator.slide([a])  # keeps positions 8.. and what shares their page: the page of 8 to 11, and 12
    allocator.fork(b)
    measured = allocator.fragmentation()
    # a holds 13 and 5 tokens in 4 and 2 pages; b and its fork 4 and 4 in the same 2 pages.
    assert measured.waste.live == 13 + 5 + 8
    assert measured.tail_slots == (16 - 13) + (8 - 5)
    assert measured.hole_slots == 0
    assert measured.waste.internal == 6
    assert measured.imbalance == pytest.approx((1 - 9 / 13) / 3)
    allocator.append([a], 2)  # now positions 8 and 9 of layer 1 are behind its window, in a page that stays
    assert allocator.fragmentation().hole_slots == 2
    pin, _ = allocator.pin(a)
    assert allocator.fragmentation().hole_slots == 0
    allocator.unpin(pin)
    allocator.reserve(unused, 4)
    assert allocator.fragmentation().waste.reservation == 8


def test_runs_are_counted_within_rows() -> None:
    allocator = BlockAllocator(33, page_size=1, num_layers=2)
    seq = allocator.open().seq
    allocator.append([seq], 4)
    assert allocator.fragmentation().mean_run == 4
    for _ in range(4):
        allocator.append([seq], 1)  # LIFO gives the rows turns: 9, 11, ... and 10, 12, ...
    assert allocator.fragmentation().mean_run == 16 / 10


def test_no_python_object_per_page() -> None:
    def tracked(num_pages: int) -> int:
        allocator = BlockAllocator(num_pages, page_size=16, num_layers=4, enable_prefix_caching=True)
        seq = allocator.open().seq
        allocator.append([seq], (num_pages // 8) * 16)
        allocator.commit(seq, np.arange((num_pages // 8) * 16))
        gc.collect()
        return len(gc.get_objects())

    small = tracked(100)
    assert tracked(20_000) <= small + 50


def test_admission_says_never_later_or_ok() -> None:
    allocator = BlockAllocator(11, page_size=1, num_layers=1, watermark=2)
    a, b = allocator.open().seq, allocator.open().seq
    allocator.append([a], 6)
    assert allocator.can_append([b], 2) == Admission(Verdict.OK, 2, 2, 10)
    assert allocator.can_append([b], 3) == Admission(Verdict.LATER, 3, 2, 10)
    assert allocator.can_append([b], 8).verdict is Verdict.LATER
    assert allocator.can_append([b], 9).verdict is Verdict.NEVER
    assert allocator.can_append([a], 4).verdict is Verdict.OK  # running: the watermark is there for it
    assert allocator.can_append([a], 5) == Admission(Verdict.NEVER, 5, 4, 10)
    assert allocator.can_append([a], 5).shortfall == 1
    assert allocator.can_append([], 1).verdict is Verdict.OK


def test_a_reservation_is_there_when_it_is_needed() -> None:
    allocator = BlockAllocator(11, page_size=1, num_layers=1)
    a, b = allocator.open().seq, allocator.open().seq
    assert allocator.reserve(a, 6) == 6
    assert allocator.can_append([b], 5).verdict is Verdict.LATER
    with pytest.raises(OutOfPages) as caught:
        allocator.append([b], 5)
    assert caught.value.available == 4
    allocator.append([b], 4)
    allocator.append([a], 5)
    assert allocator.stats().reserved_pages == 1
    allocator.append([a], 1)
    assert allocator.stats().reserved_pages == 0
    assert allocator.reserve(a, 0) == 0


def test_pinned_pages_outlive_their_sequence_and_cannot_move() -> None:
    allocator = BlockAllocator(9, page_size=2, num_layers=1)
    filler, seq = allocator.open().seq, allocator.open().seq
    allocator.append([filler, seq], [6, 3])
    pin, pages = allocator.pin(seq)
    assert pages.tolist() == [4, 5]
    assert allocator.append([seq], 1).copies.src.tolist() == [5]  # a transfer reads the old page
    assert allocator.close(seq).freed == 1
    allocator.close(filler)
    with pytest.raises(PagesPinned, match="1 pages"):
        allocator.shrink(4)
    assert allocator.shrink(3).copies.src.tolist() == []
    assert allocator.unpin(pin).freed == 2
    allocator.check()


def test_exported_names_are_what_they_say() -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name), name
    errors = [getattr(package, name) for name in package.__all__ if isinstance(getattr(package, name), type)]
    for error in errors:
        if issubclass(error, Exception):
            assert issubclass(error, package.KVError)


@pytest.mark.parametrize("error", [OutOfPages(3, 2, 9), StaleHandle(7), PagesPinned(2)], ids=str)
def test_errors_survive_pickling(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("placement", ["lifo", "runs"])
def test_the_pool_gives_out_every_page_once(placement: str) -> None:
    pool = PagePool(50, placement=placement)  # type: ignore[arg-type]
    pages = [pool.take_one(), *pool.take(47).tolist(), pool.take_one()]
    assert sorted(pages) == list(range(1, 50))
    for page in pages[:20]:
        pool.release_one(page)
    pool.retain(np.array(pages[20:21], np.int32))
    pool.release_one(pages[20])
    assert (pool.num_free, pool.num_active) == (20, 29)
    pool.release(np.array(pages[20:], np.int32))
    assert sorted(pool.free_pages().tolist()) == list(range(1, 50))
    many = pool.take(40)
    pool.retain(many)
    assert pool.release(many[:30])[0] == 0
    assert pool.release(np.concatenate([many, many[30:]]))[0] == 40  # some twice, as forks in one batch give them back
    assert sorted(pool.free_pages().tolist()) == list(range(1, 50))


def test_check_finds_damage() -> None:
    def damaged() -> BlockAllocator:
        allocator = BlockAllocator(20, page_size=2, num_layers=2, enable_prefix_caching=True)
        seq = allocator.open().seq
        allocator.append([seq], 5)
        allocator.commit(seq, [1, 2, 3, 4, 5])
        allocator.check()
        return allocator

    def leak(core: Core) -> None:
        core.pool.refs[3] += 1

    def lose(core: Core) -> None:
        core.pool.take_one()
        core.pool.refs[:] = np.bincount(core.tables.pages_of(0), minlength=20)

    def shift(core: Core) -> None:
        core.tables.seen[0] -= 1

    def twice(core: Core) -> None:
        core.tables.view(0)[0, 0] = core.tables.view(0)[1, 0]

    def miscount(core: Core) -> None:
        core.counters.live_tokens += 1

    def unlink(core: Core) -> None:
        assert core.prefix is not None
        core.prefix.by_hash.popitem()

    def trust(core: Core) -> None:
        core.pool.refs[core.tables.view(0)[0, 2]] += 1

    for damage in (leak, lose, shift, twice, miscount, unlink, trust):
        allocator = damaged()
        damage(allocator._core)
        with pytest.raises(BrokenInvariant):
            allocator.check()


def test_a_mixed_batch_of_kinds_counts_live_tokens() -> None:
    allocator = BlockAllocator(40, page_size=2, num_layers=2, kinds=[LayerKind.STATE, LayerKind.ATTENTION])
    a, b = allocator.open().seq, allocator.open().seq
    allocator.append([a, b], [3, 0])
    assert allocator.stats().live_tokens == 4
    assert allocator.live_lens([a, b]).tolist() == [[1, 0], [3, 0]]
