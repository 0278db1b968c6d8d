"""Memory for temporary arrays: kept between calls, never too small, and never a result's."""

import numpy as np
import pytest

from allocator import BlockAllocator
from allocator.scratch import Scratch


def test_a_name_keeps_its_memory_until_more_is_needed() -> None:
    borrow = Scratch().int64
    small = borrow("a", 10)
    assert np.shares_memory(small, borrow("a", 1000))
    assert not np.shares_memory(small, borrow("b", 10))
    assert len(borrow("a", 5000)) == 5000
    assert not np.shares_memory(small, borrow("a", 10))


def test_the_count_and_the_flags_grow_as_well() -> None:
    scratch = Scratch()
    assert np.shares_memory(scratch.bool(3), scratch.bool(5))
    assert len(scratch.bool(3000)) == 3000
    assert scratch.count(4).tolist() == [0, 1, 2, 3]
    assert scratch.count(3000).tolist() == list(range(3000))
    with pytest.raises(ValueError, match="read-only"):
        scratch.count(2)[0] = 1


def test_a_plan_and_stored_positions_survive_later_crops() -> None:
    allocator = BlockAllocator(200, page_size=4, num_layers=2)
    one, other = allocator.open().seq, allocator.open().seq
    allocator.append([one, other], 40)
    first = allocator.crop(one, {0: [1, 5, 9], 1: list(range(39))})
    moves = [first.moves.src.tolist(), first.moves.dst.tolist()]
    allocator.crop(other, {0: list(range(2, 40, 3)), 1: list(range(1, 40, 2))})
    assert [first.moves.src.tolist(), first.moves.dst.tolist()] == moves
    assert allocator.positions(one, 0).tolist() == [1, 5, 9]
    assert allocator.positions(one, 1).tolist() == list(range(39))
