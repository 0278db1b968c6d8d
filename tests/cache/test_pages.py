"""Page tensors that grow and shrink in place: contents against numpy, memory against the operating system."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_kv.pages import Pages

SHAPE = (2, 5, 3)
CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 300), max_size=12), st.sampled_from([0, 100, 300]), st.integers(1, 20))
def test_contents_are_those_of_an_array_resized_the_same_way(sizes: list[int], capacity: int, first: int) -> None:
    pages = Pages(first, SHAPE, torch.float32, CPU, capacity)
    expected = np.zeros((first, *SHAPE), np.float32)
    for turn, size in enumerate(sizes, start=1):
        pages.tensor.fill_(turn)
        expected[:] = turn
        pages.resize(size)
        kept = expected[:size]
        expected = np.concatenate([kept, np.zeros((size - len(kept), *SHAPE), np.float32)])
        np.testing.assert_array_equal(pages.tensor.numpy(), expected)
        assert pages.tensor.is_contiguous()


@pytest.mark.skipif(not Pages(1, SHAPE, torch.float32, CPU, 2).grows_in_place, reason="no reserved addresses here")
def test_memory_of_the_process_follows_the_pages_and_growing_moves_nothing() -> None:
    process, page = psutil.Process(), 2**18
    gc.collect()
    before = process.memory_info().rss
    pages = Pages(1, (page // 4,), torch.float32, CPU, capacity=2**16)  # 16 GiB of addresses
    assert process.memory_info().rss - before < 2**23
    address = pages.tensor.data_ptr()
    held = {}
    for count in (256, 1024, 256, 64):
        pages.resize(count)
        pages.tensor.fill_(1.0)
        held[count] = process.memory_info().rss - before
        assert held[count] == pytest.approx(count * page, rel=0.05, abs=2**23)
    assert pages.tensor.data_ptr() == address


def test_a_pool_that_outgrows_its_reservation_moves() -> None:
    pages = Pages(2, SHAPE, torch.float16, CPU, capacity=4)
    pages.tensor.fill_(7.0)
    pages.resize(9)
    assert not pages.grows_in_place
    assert (pages.tensor[:2] == 7.0).all()
    assert not pages.tensor[2:].any()


def test_pages_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        pages = Pages(2, SHAPE, torch.float32, CPU, capacity=4)
        pages.resize(3)
    pages.tensor[2] = 1.0
    assert not pages.tensor.is_inference()
