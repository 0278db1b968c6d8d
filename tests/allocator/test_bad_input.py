"""Bad input: a typed error that names the value, and nothing changed. One row a case."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allocator import (
    AlreadyWritten,
    BlockAllocator,
    DoubleFree,
    InvalidArgument,
    LayerKind,
    OutOfPages,
    PagePool,
    SnapshotCorrupt,
    SnapshotMismatch,
    StaleHandle,
)

BUILD: dict[str, tuple[dict[str, Any], str]] = {
    "pool of size 0": ({"num_pages": 0}, "num_pages = 0"),
    "pool of the null page alone": ({"num_pages": 1}, "num_pages = 1"),
    "pool beyond int32": ({"num_pages": 2**31}, "num_pages = 2147483648"),
    "num_pages not an integer": ({"num_pages": 10.0}, "num_pages = 10.0"),
    "num_pages a bool": ({"num_pages": True}, "num_pages = True"),
    "page size 0": ({"page_size": 0}, "page_size = 0"),
    "page size negative": ({"page_size": -4}, "page_size = -4"),
    "no layers": ({"num_layers": 0}, "num_layers = 0"),
    "no lanes": ({"lanes": 0}, "lanes = 0"),
    "negative watermark": ({"watermark": -1}, "watermark = -1"),
    "unknown placement": ({"placement": "best"}, "placement = 'best'"),
    "windows for other layers": ({"windows": [4]}, "2 layers"),
    "window of size 0": ({"windows": [None, 0]}, "windows = 0"),
    "kinds for other layers": ({"kinds": [LayerKind.STATE]}, "2 layers"),
    "kinds of another type": ({"kinds": ["state", "state"]}, "LayerKind"),
    "a window on a state layer": ({"kinds": [LayerKind.STATE] * 2, "windows": [4, None]}, "only attention layers"),
    "prefix caching with state layers": (
        {"kinds": [LayerKind.STATE, LayerKind.ATTENTION], "enable_prefix_caching": True},
        "no token blocks",
    ),
    "partial reuse without prefix caching": ({"partial_reuse": True}, "need it"),
    "events without prefix caching": ({"record_events": True}, "need it"),
}


@pytest.mark.parametrize(("arguments", "message"), BUILD.values(), ids=BUILD)
def test_a_wrong_shape_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"num_pages": 8, "page_size": 2, "num_layers": 2}
    with pytest.raises(InvalidArgument) as caught:
        BlockAllocator(**{**defaults, **arguments})
    assert message in str(caught.value)


Call = Callable[[BlockAllocator, Any, Any], Any]  # allocator, an open sequence of 5 tokens, a closed one
BIG = 2**40
CALLS: dict[str, tuple[Call, type[Exception], str]] = {
    "append a negative count": (lambda a, s, c: a.append([s], -1), InvalidArgument, "counts = -1"),
    "append negative counts": (lambda a, s, c: a.append([s], [-2]), InvalidArgument, "counts = -2"),
    "append a fraction": (lambda a, s, c: a.append([s], 1.5), InvalidArgument, "1.5"),
    "append too few counts": (lambda a, s, c: a.append([s], [1, 1]), InvalidArgument, "1 sequences"),
    "append beyond int32": (lambda a, s, c: a.append([s], 2**31 - 2), InvalidArgument, "int32"),
    "append a huge count": (lambda a, s, c: a.append([s], BIG), InvalidArgument, str(BIG)),
    "append one sequence twice": (lambda a, s, c: a.append([s, s], 1), InvalidArgument, "twice"),
    "append an array of sequences": (lambda a, s, c: a.append(np.array([[s]]), 1), InvalidArgument, "one-dim"),
    "append a closed sequence": (lambda a, s, c: a.append([s, c], 1), StaleHandle, "closed"),
    "append an unknown handle": (lambda a, s, c: a.append([12345], 1), StaleHandle, "12345"),
    "append a huge handle": (lambda a, s, c: a.append([1 << 80], 1), StaleHandle, str(1 << 80)),
    "append a name": (lambda a, s, c: a.append(["x"], 1), StaleHandle, "x"),
    "append too much": (lambda a, s, c: a.append([s], 60), OutOfPages, "of 19"),
    "can_append a closed one": (lambda a, s, c: a.can_append([c], 1), StaleHandle, "closed"),
    "close twice": (lambda a, s, c: a.close(c), StaleHandle, "closed"),
    "close a name": (lambda a, s, c: a.close("x"), StaleHandle, "'x'"),
    "preempt a closed one": (lambda a, s, c: a.preempt(c), StaleHandle, "closed"),
    "fork a closed one": (lambda a, s, c: a.fork(c), StaleHandle, "closed"),
    "fork -1 times": (lambda a, s, c: a.fork(s, -1), InvalidArgument, "n = -1"),
    "crop a closed one": (lambda a, s, c: a.crop(c, {0: [0]}), StaleHandle, "closed"),
    "crop unsorted": (lambda a, s, c: a.crop(s, {0: [1, 0]}), InvalidArgument, "strictly increasing"),
    "crop repeated": (lambda a, s, c: a.crop(s, {0: [0], 1: [3, 3]}), InvalidArgument, "keep[(1, 0)] = 3"),
    "crop negative": (lambda a, s, c: a.crop(s, {0: [-1, 2]}), InvalidArgument, "= -1"),
    "crop out of range": (lambda a, s, c: a.crop(s, {1: [0, 5]}), InvalidArgument, "0 to 4"),
    "crop layer out of range": (lambda a, s, c: a.crop(s, {2: [0]}), InvalidArgument, "layer = 2"),
    "crop layer negative": (lambda a, s, c: a.crop(s, {-1: [0]}), InvalidArgument, "layer = -1"),
    "crop layer a name": (lambda a, s, c: a.crop(s, {"q": [0]}), InvalidArgument, "'q'"),
    "crop lane out of range": (lambda a, s, c: a.crop(s, {(0, 1): [0]}), InvalidArgument, "lane = 1"),
    "crop a lane twice": (lambda a, s, c: a.crop(s, {0: [0], (0, 0): [0]}), InvalidArgument, "twice"),
    "crop by floats": (lambda a, s, c: a.crop(s, {0: [0.0, 1.0]}), InvalidArgument, "float64"),
    "crop by a mask": (lambda a, s, c: a.crop(s, {0: np.ones(5, bool)}), InvalidArgument, "bool"),
    "crop by an empty list of another type": (
        lambda a, s, c: a.crop(s, {9: np.empty(0)}),
        InvalidArgument,
        "layer = 9",
    ),
    "crop by a matrix": (lambda a, s, c: a.crop(s, {0: np.ones((2, 2), int)}), InvalidArgument, "one-dim"),
    "crop by wrapping numbers": (lambda a, s, c: a.crop(s, {0: [0, 2**32 + 1, 4]}), InvalidArgument, "increasing"),
    "truncate too much": (lambda a, s, c: a.truncate([s], 6), InvalidArgument, "counts = 6"),
    "truncate a negative count": (lambda a, s, c: a.truncate([s], -1), InvalidArgument, "-1"),
    "truncate a closed one": (lambda a, s, c: a.truncate([c], 1), StaleHandle, "closed"),
    "slide a closed one": (lambda a, s, c: a.slide([c]), StaleHandle, "closed"),
    "slide with a negative margin": (lambda a, s, c: a.slide([s], margin=-1), InvalidArgument, "margin = -1"),
    "commit too few tokens": (lambda a, s, c: a.commit(s, [1, 2]), InvalidArgument, "5 tokens"),
    "commit fractions": (lambda a, s, c: a.commit(s, [0.5] * 5), InvalidArgument, "integers"),
    "commit beyond int32": (lambda a, s, c: a.commit(s, [0, 1, 2, 3, BIG]), InvalidArgument, str(BIG)),
    "commit below int32": (lambda a, s, c: a.commit(s, [0, 1, 2, 3, -BIG]), InvalidArgument, str(-BIG)),
    "commit at priority 4": (lambda a, s, c: a.commit(s, [1] * 5, priority=4), InvalidArgument, "priority = 4"),
    "open with a text scope": (lambda a, s, c: a.open([1], scope="x"), InvalidArgument, "bytes"),
    "open with a negative limit": (lambda a, s, c: a.open([1], limit=-1), InvalidArgument, "limit = -1"),
    "open with a matrix": (lambda a, s, c: a.open([[1]]), InvalidArgument, "one-dimensional"),
    "reserve a negative count": (lambda a, s, c: a.reserve(s, -1), InvalidArgument, "num_tokens = -1"),
    "reserve too much": (lambda a, s, c: a.reserve(s, 90), OutOfPages, "of 19"),
    "pin a closed one": (lambda a, s, c: a.pin(c), StaleHandle, "closed"),
    "unpin twice": (lambda a, s, c: a.unpin(77), StaleHandle, "pin 77"),
    "grow by -1": (lambda a, s, c: a.grow(-1), InvalidArgument, "n = -1"),
    "grow beyond int32": (lambda a, s, c: a.grow(2**31 - 1), InvalidArgument, "n = "),
    "shrink to nothing": (lambda a, s, c: a.shrink(19), InvalidArgument, "n = 19"),
    "shrink below what is used": (lambda a, s, c: a.shrink(16), OutOfPages, "needs 6 pages"),
    "write cross layers that are not": (lambda a, s, c: a.write_cross(s, 3), InvalidArgument, "no cross"),
    "events that are not recorded": (lambda a, s, c: a.drain_events(), InvalidArgument, "record_events"),
    "positions of layer 2": (lambda a, s, c: a.positions(s, 2), InvalidArgument, "layer = 2"),
    "positions of a float layer": (lambda a, s, c: a.positions(s, 1.0), InvalidArgument, "layer = 1.0"),
    "positions of lane 1": (lambda a, s, c: a.positions(s, 0, 1), InvalidArgument, "lane = 1"),
    "slots of more tokens than live": (lambda a, s, c: a.slot_mapping([s], 6), InvalidArgument, "counts = 6"),
    "a window of 0": (lambda a, s, c: a.visible_start([s], 1, 0, 0), InvalidArgument, "window = 0"),
    "restore nothing": (lambda a, s, c: a.restore(b""), SnapshotCorrupt, "0 bytes"),
    "restore something else": (lambda a, s, c: a.restore(b"x" * 500), SnapshotCorrupt, "500 bytes"),
}


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_a_wrong_call_is_refused_and_changes_nothing(call: Call, error: type[Exception], message: str) -> None:
    allocator = BlockAllocator(20, page_size=2, num_layers=2)
    closed, seq = allocator.open().seq, allocator.open().seq
    allocator.append([seq], 5)
    allocator.close(closed)
    before = allocator.snapshot()
    with pytest.raises(error) as caught:
        call(allocator, seq, closed)
    assert message in str(caught.value)
    assert allocator.snapshot() == before
    allocator.check()


def test_cross_layers_are_written_once() -> None:
    kinds = [LayerKind.ATTENTION, LayerKind.CROSS]
    allocator = BlockAllocator(20, page_size=2, num_layers=2, kinds=kinds)
    seq = allocator.open().seq
    assert allocator.write_cross(seq, 5).allocated == 3
    with pytest.raises(AlreadyWritten, match=str(int(seq))):
        allocator.write_cross(seq, 5)
    with pytest.raises(InvalidArgument, match="num_tokens = 0"):
        allocator.write_cross(seq, 0)
    [child] = allocator.fork(seq)
    with pytest.raises(AlreadyWritten):
        allocator.write_cross(child, 1)
    with pytest.raises(OutOfPages):
        allocator.write_cross(allocator.open().seq, 50)


def test_state_layers_cannot_be_cropped() -> None:
    allocator = BlockAllocator(20, page_size=2, num_layers=2, kinds=[LayerKind.STATE, LayerKind.ATTENTION])
    seq = allocator.open().seq
    assert allocator.append([seq], 5).allocated == 4
    with pytest.raises(InvalidArgument, match="state layers"):
        allocator.crop(seq, {0: [0]})


@pytest.mark.parametrize("damage", ["truncated", "altered", "extended"])
def test_a_damaged_snapshot_is_refused(damage: str) -> None:
    allocator = BlockAllocator(20, page_size=2, num_layers=2)
    allocator.append([allocator.open().seq], 5)
    data = bytearray(allocator.snapshot())
    if damage == "truncated":
        del data[-1]
    elif damage == "altered":
        data[len(data) // 2] ^= 1
    else:
        data += b"\0"
    before = allocator.snapshot()
    with pytest.raises(SnapshotCorrupt, match="checksum"):
        allocator.restore(bytes(data))
    assert allocator.snapshot() == before


def test_a_snapshot_of_another_configuration_is_refused() -> None:
    data = BlockAllocator(20, page_size=2, num_layers=2).snapshot()
    other = BlockAllocator(20, page_size=4, num_layers=2)
    with pytest.raises(SnapshotMismatch) as caught:
        other.restore(data)
    assert caught.value.field == "config"
    assert "page_size" in str(caught.value)


def test_a_snapshot_of_a_broken_state_is_refused() -> None:
    allocator = BlockAllocator(20, page_size=2, num_layers=2)
    allocator.append([allocator.open().seq], 5)
    allocator._core.counters.live_tokens += 1
    with pytest.raises(SnapshotCorrupt, match="live token counter"):
        BlockAllocator(20, page_size=2, num_layers=2).restore(allocator.snapshot())


def test_a_double_free_is_named() -> None:
    pool = PagePool(8)
    pages = pool.take(3)
    pool.retain(pages[:1])
    many = np.repeat(pages[1:2], 20)  # takes another path than a handful
    for wrong in (pages[[0, 0, 0]], pages[[1, 1]], pages[[1, 2, 1]], many):
        with pytest.raises(DoubleFree) as caught:
            pool.release(wrong)
        assert caught.value.page == wrong[0]
    assert pool.refs[pages].tolist() == [2, 1, 1]
    pool.release(pages)
    with pytest.raises(DoubleFree, match=f"page {pages[1]}"):
        pool.release(pages[1:])
    with pytest.raises(DoubleFree, match=f"page {pages[1]}"):
        pool.release_one(int(pages[1]))
    assert (pool.num_free, pool.num_active) == (6, 1)
    large = PagePool(60)
    large.take(30)
    with pytest.raises(DoubleFree, match="page 31"):
        large.release(np.arange(1, 40, dtype=np.int32))
    assert large.num_active == 30
