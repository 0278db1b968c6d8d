"""How requests are put into llama.cpp's slots and batches."""

from __future__ import annotations

import pytest

from bench.llamacpp import BATCH_TOKENS, Slots, common_prefix
from bench.peers import PeerUnavailable, Setting, make
from bench.workloads import Job


def test_a_prefix_counts_if_all_prompts_begin_with_it_and_something_is_left():
    head = tuple(range(100))
    assert common_prefix([Job((*head, 7), 1), Job((*head, 8, 9), 1)]) == 100
    assert common_prefix([Job(head, 1), Job((*head, 8), 1)]) == 99
    assert common_prefix([Job(head, 1)]) == 0
    assert common_prefix([Job((*head[:20], 200), 1), Job(head, 1)]) == 0


def test_slots_that_decode_come_first_and_a_batch_is_bounded():
    slots = Slots([Job(tuple(range(400)), 2), Job(tuple(range(300)), 2), Job((1, 2), 1)], prefix=0, size=2)
    assert [slot.job for slot in slots.admit()] == [0, 1]
    first = slots.batch()
    assert [(slot.job, count) for slot, count in first] == [(0, 400), (1, BATCH_TOKENS - 400)]
    for slot, count in first:
        slot.num_done += count
    first[0][0].tokens.append(9)
    assert [(slot.job, count) for slot, count in slots.batch()] == [(0, 1), (1, 300 - (BATCH_TOKENS - 400))]
    slots.running.remove(first[0][0])
    [slot] = slots.admit()
    assert (slot.number, slot.job) == (0, 2)


def test_without_the_library_or_a_gguf_file_it_is_left_out_with_a_word(tmp_path):
    with pytest.raises(PeerUnavailable, match=r"llamacpp takes a GGUF file: python -m bench\.llamacpp OUT\.gguf"):
        make("llamacpp", Setting(str(tmp_path)))
    with pytest.raises(PeerUnavailable, match=r"llama-cpp-python is not installed here|llama\.cpp cannot load"):
        make("llamacpp", Setting(str(tmp_path / "x.gguf")))
