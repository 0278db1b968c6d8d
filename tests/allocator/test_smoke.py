"""The whole life of a few sequences, step by step."""

import numpy as np
import pytest

from allocator import BlockAllocator, InvalidArgument, OutOfPages, StaleHandle, Verdict


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
