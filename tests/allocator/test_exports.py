"""Arrays for kernels, against the obvious loops over the page tables."""

import numpy as np
import pytest

from allocator import BlockAllocator, InvalidArgument, LayerKind, SeqId


@pytest.fixture
def batch() -> tuple[BlockAllocator, list[SeqId]]:
    """Four sequences: in lock-step, cropped by lane, empty, and long enough for a wider extent."""
    allocator = BlockAllocator(600, page_size=3, num_layers=2, lanes=2)
    seqs = [allocator.open().seq for _ in range(4)]
    allocator.append(seqs, [7, 12, 0, 60])
    allocator.crop(seqs[1], {0: [0, 4, 5, 9, 11], (1, 1): range(6, 12)})
    allocator.append(seqs, [0, 2, 0, 0])
    return allocator, seqs


def test_padded_tables_hold_each_row_and_null_pages(batch: tuple[BlockAllocator, list[SeqId]]) -> None:
    allocator, seqs = batch
    padded = allocator.block_tables(seqs)
    assert padded.shape == (4, 4, 20)
    assert padded.dtype == np.int32
    held = np.stack([allocator.num_pages_of(seq) for seq in seqs], axis=1)
    assert (held == [[3, 3, 0, 20], [3, 3, 0, 20], [3, 5, 0, 20], [3, 3, 0, 20]]).all()
    assert ((padded > 0) == (np.arange(20) < held[:, :, None])).all()
    assert len(np.unique(padded[padded > 0])) == held.sum() == allocator.stats().active_pages
    assert allocator.block_tables([]).shape == (4, 0, 1)
    assert allocator.block_tables(seqs[2:3]).tolist() == [[[0]]] * 4


@pytest.mark.parametrize("layer", [0, 1])
def test_the_tables_of_one_layer_are_its_rows_of_the_padded_table(
    batch: tuple[BlockAllocator, list[SeqId]], layer: int
) -> None:
    allocator, seqs = batch
    for chosen in (seqs, seqs[:2], seqs[1:2], seqs[2:3], []):
        whole, alone = allocator.block_tables(chosen), allocator.block_tables(chosen, layer)
        assert alone.dtype == np.int32
        assert (alone == whole[layer * 2 : layer * 2 + 2, :, : alone.shape[2]]).all()
        assert (whole[layer * 2 : layer * 2 + 2, :, alone.shape[2] :] == 0).all()
    assert allocator.block_tables(seqs[1:2], layer).shape == (2, 1, (3, 5)[layer]), "as wide as its longest row"
    with pytest.raises(InvalidArgument, match="layer"):
        allocator.block_tables(seqs, 2)


def test_pages_are_frozen_layer_by_layer(batch: tuple[BlockAllocator, list[SeqId]]) -> None:
    allocator, seqs = batch
    assert not any(allocator.is_frozen(seq, layer) for seq in seqs for layer in range(2))
    [copy] = allocator.fork(seqs[0])
    assert allocator.is_frozen(copy, 0)
    assert allocator.is_frozen(seqs[0], 1)
    assert not allocator.is_frozen(seqs[1], 0), "others share nothing"
    allocator.crop(copy, {0: [1, 3, 5]})
    assert not allocator.is_frozen(copy, 0)
    assert allocator.is_frozen(copy, 1)
    allocator.close(copy)
    assert not allocator.is_frozen(seqs[0], 1)


@pytest.mark.parametrize(("layer", "lane"), [(0, 0), (1, 0), (1, 1)])
def test_csr_is_the_padded_table_without_padding(
    batch: tuple[BlockAllocator, list[SeqId]], layer: int, lane: int
) -> None:
    allocator, seqs = batch
    csr, padded = allocator.csr_table(seqs, layer, lane), allocator.block_tables(seqs)[layer * 2 + lane]
    lens = allocator.live_lens(seqs)[layer * 2 + lane]
    assert csr.indptr[0] == 0
    assert csr.last_page_len.min() >= 1
    assert csr.last_page_len.max() <= 3
    for at in range(len(seqs)):
        pages = csr.indices[csr.indptr[at] : csr.indptr[at + 1]]
        assert pages.tolist() == padded[at][padded[at] > 0].tolist()
        assert lens[at] == max(0, len(pages) - 1) * 3 + csr.last_page_len[at] * (len(pages) > 0)


@pytest.mark.parametrize("counts", [1, [2, 5, 0, 9], [0, 1, 0, 1]], ids=str)
def test_slots_of_the_newest_tokens(batch: tuple[BlockAllocator, list[SeqId]], counts: int | list[int]) -> None:
    allocator, seqs = batch
    if counts == 1:
        seqs = [seqs[0], seqs[1], seqs[3]]
    each = [1] * len(seqs) if counts == 1 else counts
    padded, lens = allocator.block_tables(seqs), allocator.live_lens(seqs)
    expected = [
        [
            padded[row, at, i // 3] * 3 + i % 3
            for at, n in enumerate(each)  # type: ignore[arg-type]
            for i in range(lens[row, at] - n, lens[row, at])
        ]
        for row in range(4)
    ]
    slots = allocator.slot_mapping(seqs, counts)
    assert slots.dtype == np.int64
    assert slots.tolist() == expected


def test_no_sequences_give_empty_arrays(batch: tuple[BlockAllocator, list[SeqId]]) -> None:
    allocator, _ = batch
    assert allocator.slot_mapping([], 1).shape == (4, 0)
    assert allocator.live_lens([]).shape == (4, 0)
    assert allocator.visible_start([], 1, 0, 4).shape == (2, 0)
    assert allocator.device_rows([]).shape == (4, 0)
    assert allocator.append([], 3).allocated == allocator.truncate([], 1).freed == allocator.slide([]).freed == 0


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_visible_ranges(batch: tuple[BlockAllocator, list[SeqId]], window: int | None) -> None:
    allocator, seqs = batch
    counts = [3, 4, 0, 2]
    start = allocator.visible_start(seqs, counts, 0, window)
    assert start.shape == (2, 9)
    for lane in range(2):
        expected = []
        for seq, count in zip(seqs, counts, strict=True):
            positions = allocator.positions(seq, 0, lane)
            seen = allocator.seen_len(seq)
            for query in range(seen - count, seen):
                expected.append(0 if window is None else int((positions <= query - window).sum()))
        assert start[lane].tolist() == expected


def test_deltas_name_each_changed_entry_once() -> None:
    allocator = BlockAllocator(40, page_size=2, num_layers=2)
    a, b = allocator.open().seq, allocator.open().seq
    allocator.append([a], 3)
    delta = allocator.drain_deltas()  # the first call: everything there is
    assert list(zip(delta.rows, delta.columns, delta.pages, strict=True)) == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 3),
        (1, 1, 4),
    ]
    allocator.append([a, b], 2)
    delta = allocator.drain_deltas()
    assert list(zip(delta.rows, delta.columns, delta.pages, strict=True)) == [
        (0, 2, 5),
        (1, 2, 6),
        (2, 0, 7),
        (3, 0, 8),
    ]
    assert allocator.device_rows([b, a]).tolist() == [[2, 0], [3, 1]]
    allocator.truncate([a], 5)
    assert len(allocator.drain_deltas().rows) == 0  # nothing to write: rows only got shorter
    [child] = allocator.fork(b)
    allocator.append([child], 1)
    delta = allocator.drain_deltas()
    assert sorted(zip(delta.rows, delta.columns, delta.pages, strict=True))[0] == (4, 0, 7)
    assert len({*zip(delta.rows, delta.columns, strict=True)}) == len(delta.rows) == 4
    allocator.truncate([b], 1)
    assert len(allocator.append([b], 1).copies) == 2
    assert set(allocator.drain_deltas().pages.tolist()) == {*allocator.block_tables([b]).ravel().tolist()}


def test_rows_that_do_not_grow_map_to_the_null_page() -> None:
    kinds = [LayerKind.CROSS, LayerKind.STATE, LayerKind.ATTENTION]
    allocator = BlockAllocator(40, page_size=2, num_layers=3, kinds=kinds)
    seq = allocator.open().seq
    allocator.write_cross(seq, 3)
    allocator.append([seq], 4)
    assert allocator.live_lens([seq])[:, 0].tolist() == [3, 1, 4]
    assert allocator.slot_mapping([seq], 2).tolist() == [[0, 0], [0, 0], [10, 11]]
    allocator.crop(seq, {0: [0, 2]})
    assert allocator.positions(seq, 0).tolist() == [0, 2]
    allocator.truncate([seq], 4)
    assert allocator.live_lens([seq])[:, 0].tolist() == [2, 1, 0]
    [child] = allocator.fork(seq)
    assert len(allocator.append([child], 1).copies) == 1  # the state, which every append writes
    assert len(allocator.append([seq], 1).copies) == 0
    allocator.check()
