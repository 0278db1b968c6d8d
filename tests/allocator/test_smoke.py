"""The whole life of a few sequences, step by step."""

import numpy as np
import pytest

from allocator import (
    EMPTY_PLAN,
    BlockAllocator,
    BlocksCleared,
    InvalidArgument,
    LayerKind,
    OutOfPages,
    StaleHandle,
    Verdict,
)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_crop_frees_exactly_what_arithmetic_says(page_size: int) -> None:
    allocator = BlockAllocator(400, page_size=page_size, num_layers=3)
    seq = allocator.open().seq
    allocator.append([seq], 50)
    free = allocator.stats().free_pages
    keep = np.arange(0, 50, 2)
    plan = allocator.crop(seq, {1: keep})
    expected = -(-50 // page_size) - -(-25 // page_size)
    assert plan.freed == expected
    assert allocator.stats().free_pages == free + expected
    assert allocator.positions(seq, 1).tolist() == keep.tolist()
    assert allocator.live_lens([seq]).tolist() == [[50], [25], [50]]
    allocator.check()
    allocator.append([seq], 4)
    assert allocator.positions(seq, 1).tolist() == [*keep.tolist(), 50, 51, 52, 53]
    allocator.truncate([seq], 30)
    assert allocator.positions(seq, 1).tolist() == [p for p in keep.tolist() if p < 24]
    allocator.check()
    allocator.close(seq)
    assert allocator.stats().free_pages == 399
    allocator.check()


def test_forks_share_pages_until_one_writes() -> None:
    allocator = BlockAllocator(20, page_size=4, num_layers=2)
    seq = allocator.open().seq
    allocator.append([seq], 6)
    [child] = allocator.fork(seq)
    assert allocator.stats().active_pages == 4
    assert len(allocator.append([seq, child], 1).copies) == 2
    assert len(allocator.append([seq, child], 1).copies) == 0
    allocator.check()
    assert allocator.close(seq).freed == 2
    with pytest.raises(StaleHandle):
        allocator.append([seq], 1)


def test_running_out_changes_nothing() -> None:
    allocator = BlockAllocator(5, page_size=4, num_layers=2)
    seq = allocator.open().seq
    allocator.append([seq], 8)
    with pytest.raises(OutOfPages) as caught:
        allocator.append([seq], 1)
    assert (caught.value.needed, caught.value.available, caught.value.total) == (2, 0, 4)
    assert allocator.can_append([seq], 1).verdict is Verdict.NEVER
    assert allocator.seen_len(seq) == 8
    with pytest.raises(InvalidArgument, match="-1"):
        allocator.append([seq], -1)
    allocator.grow(2)
    allocator.append([seq], 1)
    allocator.check()


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_rows_are_cropped_again_and_again(page_size: int) -> None:
    allocator = BlockAllocator(200, page_size=page_size, num_layers=3)
    seq = allocator.open().seq
    allocator.append([seq], 20)
    allocator.crop(seq, {0: range(0, 20, 2), 1: range(5, 20)})
    allocator.append([seq], 4)
    allocator.crop(seq, {0: [0, 3, 9, 10, 13], 2: [23]})
    assert [allocator.positions(seq, layer).tolist() for layer in range(3)] == [
        [0, 6, 18, 20, 23],
        [*range(5, 24)],
        [23],
    ]
    allocator.append([seq], 1)
    allocator.truncate([seq], 5)  # back into what the first crop left
    assert [allocator.positions(seq, layer).tolist() for layer in range(3)] == [[0, 6, 18], [*range(5, 20)], []]
    assert allocator.crop(seq, {0: [0, 1, 2]}) == EMPTY_PLAN
    allocator.check()


def test_windows_slide_over_what_crops_left() -> None:
    allocator = BlockAllocator(60, page_size=2, num_layers=2, windows=[4, None])
    seq = allocator.open().seq
    allocator.append([seq], 10)
    allocator.crop(seq, {0: [0, 2, 5, 7, 8, 9]})
    assert (
        allocator.slide([seq], margin=2).freed == 1
    )  # positions 5.. must stay: 0 and 2 share a page, 5 is in the next
    assert allocator.positions(seq, 0).tolist() == [5, 7, 8, 9]
    allocator.append([seq], 4)
    assert allocator.slide([seq]).freed == 2
    assert allocator.positions(seq, 0).tolist() == [10, 11, 12, 13]
    assert allocator.slide([seq]) == EMPTY_PLAN
    assert not EMPTY_PLAN.moves_bytes
    allocator.check()


def test_windows_longer_than_what_was_seen_drop_nothing() -> None:
    allocator = BlockAllocator(60, page_size=2, num_layers=2, windows=[20, 3])
    seq = allocator.open().seq
    allocator.append([seq], 10)
    assert allocator.slide([seq]).freed == 4
    assert allocator.slide([seq]) == EMPTY_PLAN
    assert allocator.positions(seq, 0).tolist() == [*range(10)]
    allocator.truncate([seq], 9)  # further back than the second layer still reaches
    assert [allocator.positions(seq, layer).tolist() for layer in (0, 1)] == [[0], []]
    allocator.append([seq], 3)
    assert [allocator.positions(seq, layer).tolist() for layer in (0, 1)] == [[0, 1, 2, 3], [1, 2, 3]]
    allocator.check()


@pytest.mark.parametrize(("prefix", "partial"), [(False, False), (True, False), (True, True)])
def test_a_restored_allocator_goes_on_as_the_original(prefix: bool, partial: bool) -> None:
    def build() -> BlockAllocator:
        return BlockAllocator(
            60,
            page_size=2,
            num_layers=2,
            enable_prefix_caching=prefix,
            partial_reuse=partial,
            record_events=partial,
        )

    original, twin = build(), build()
    twin.restore(original.snapshot())  # an empty one
    a, b = original.open([1, 2, 3]).seq, original.open().seq
    original.append([a, b], [7, 4])
    original.commit(a, [1, 2, 3, 4, 5, 6, 7])
    original.crop(b, {0: [1, 3]})
    pin, _ = original.pin(b)
    original.close(b)
    twin.restore(original.snapshot())
    if partial:
        assert twin.drain_events() == [BlocksCleared()]
    for allocator in (original, twin):
        assert allocator.unpin(pin).freed == 3
        opened = allocator.open([1, 2, 3, 4, 9])
        assert opened.num_cached_tokens == (4 if prefix else 0)
        allocator.append([a, opened.seq], 5)
        allocator.check()
    assert original.block_tables([a]).tolist() == twin.block_tables([a]).tolist()
    assert original.snapshot() == twin.snapshot()


def test_page_tables_of_every_kind_grow_together() -> None:
    kinds = [LayerKind.CROSS, LayerKind.ATTENTION]
    allocator = BlockAllocator(60, page_size=2, num_layers=2, kinds=kinds)
    seq = allocator.open().seq
    allocator.append([seq], 1)
    allocator.write_cross(seq, 30)  # far longer than the rest: the extent moves
    allocator.append([seq], 2)
    assert allocator.num_pages_of(seq).tolist() == [15, 2]
    assert allocator.is_diverged(seq)
    allocator.check()


def test_a_batch_of_lock_step_and_diverged_sequences() -> None:
    allocator = BlockAllocator(60, page_size=2, num_layers=2)
    seqs = [allocator.open().seq for _ in range(3)]
    allocator.append(seqs, 4)
    allocator.crop(seqs[1], {0: [0]})
    plan = allocator.append(seqs, [1, 2, 3])
    assert plan.allocated == 2 + (1 + 1) + 4
    assert allocator.live_lens(seqs).tolist() == [[5, 3, 7], [5, 6, 7]]
    allocator.check()
