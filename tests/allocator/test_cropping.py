"""A crop of many rows in one call, of every shape at once: what is read back, and what moves."""

import numpy as np

from allocator import BlockAllocator, Plan
from tests.allocator.model import Memory, tables_of

TOKENS, ROWS = 24, 7


def cropped(keep: dict[int, list[int]]) -> tuple[Plan, list[list[int]]]:
    """The plan of a crop, and what each row holds after it; token i of row r holds 100 r + i + 1."""
    allocator = BlockAllocator(100, page_size=4, num_layers=ROWS)
    seq = allocator.open().seq
    memory = Memory(100, 4)
    allocator.append([seq], TOKENS)
    slots = allocator.slot_mapping([seq], [TOKENS])
    memory.pages.reshape(-1)[slots] = np.arange(ROWS)[:, None] * 100 + np.arange(1, TOKENS + 1)
    plan = allocator.crop(seq, keep)
    memory.apply(plan)
    allocator.check()
    lens = allocator.live_lens([seq])[:, 0]
    tables = tables_of(allocator, seq)
    return plan, [memory.pages[tables[row]].ravel()[: lens[row]].tolist() for row in range(ROWS)]


def test_survivors_of_every_shape_are_read_back_and_only_what_is_not_in_place_moves() -> None:
    keep = {
        0: [0, 1, 5, 9, 23],
        1: list(range(8, 24)),  # whole pages: nothing moves
        2: [],
        3: list(range(1, 24)),
        5: [0, 1, 2],  # a prefix: nothing moves
        6: [3, 4, 22],
    }
    plan, held = cropped(keep)
    assert held == [[100 * row + i + 1 for i in keep.get(row, range(TOKENS))] for row in range(ROWS)]
    assert (plan.moves.src != plan.moves.dst).all()
    assert len(plan.moves) == 3 + 0 + 0 + 23 + 0 + 3  # tokens 0 and 1 of row 0 are in place


def test_the_order_in_which_rows_are_named_does_not_matter() -> None:
    keep = {row: list(range(row % 3, TOKENS, row + 1)) for row in (6, 0, 3, 1)}
    plan, held = cropped(keep)
    again, same = cropped(dict(sorted(keep.items())))
    assert held == same == [[100 * row + i + 1 for i in keep.get(row, range(TOKENS))] for row in range(ROWS)]
    assert plan.moves.dst.tolist() == again.moves.dst.tolist()


def test_rows_of_unequal_length_take_long_runs_of_pages() -> None:
    allocator = BlockAllocator(2000, page_size=4, num_layers=ROWS)
    seq, in_step = allocator.open().seq, allocator.open().seq
    allocator.append([seq, in_step], TOKENS)
    allocator.crop(seq, {row: list(range(row)) for row in range(ROWS)})
    allocator.append([seq, in_step], 300)
    allocator.check()
    assert allocator.live_lens([seq])[:, 0].tolist() == [300 + row for row in range(ROWS)]
    pages = [page for each in (seq, in_step) for table in tables_of(allocator, each) for page in table]
    assert len(set(pages)) == len(pages) == sum(-(-(300 + row) // 4) for row in range(ROWS)) + ROWS * 81


def test_moves_are_int32_unless_the_pool_has_more_slots_than_that_counts() -> None:
    for page_size, dtype in ((2**20, np.int32), (2**29, np.int64)):
        allocator = BlockAllocator(10, page_size=page_size, num_layers=ROWS)
        seq = allocator.open().seq
        allocator.append([seq], 6)
        plan = allocator.crop(seq, {ROWS - 1: [1, 3]})
        first = ROWS * page_size
        assert plan.moves.src.dtype == plan.moves.dst.dtype == dtype
        assert (plan.moves.src.tolist(), plan.moves.dst.tolist()) == ([first + 1, first + 3], [first, first + 1])
