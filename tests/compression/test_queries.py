"""Queries that the attention function records: the newest of each row, whatever happens to the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import KVError
from paged_kv import PagedCache
from paged_kv.compression import TOVA, KeyNorm, NeedsQueries, SnapKV, compress, compressing, record_queries
from paged_kv.compression.apply import cache_in
from paged_kv.queries import QueryWindow
from tests.tiny import padded, tiny_model, tokens


class Row:
    """One step over one sequence."""

    def __init__(self, seq: Any, count: int) -> None:
        self.seqs, self.counts = [seq], [count]


def states(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None, None]


def recorded(window: QueryWindow, seq: Any, seen: int) -> list[float] | None:
    recent = window.recent(seq, 0, seen)
    return None if recent is None else recent.states[0, :, 0].tolist()


def feed(window: QueryWindow, seq: Any, seen: int, *values: float) -> None:
    window.record(Row(seq, len(values)), lambda _: seen, 0, states(*values), 1.0)


def test_a_ring_keeps_the_newest_and_knows_what_a_rollback_took() -> None:
    window, seq = QueryWindow(4), 7
    feed(window, seq, 3, 0, 1, 2)
    assert recorded(window, seq, 3) == [0, 1, 2]
    feed(window, seq, 9, 3, 4, 5, 6, 7, 8)
    assert recorded(window, seq, 9) == [5, 6, 7, 8]
    assert recorded(window, seq, 7) == [5, 6], "two rolled back; what they overwrote is gone"
    feed(window, seq, 8, 70)
    assert recorded(window, seq, 8) == [5, 6, 70]
    feed(window, seq, 12, 11)
    assert recorded(window, seq, 12) == [11], "positions 8 to 10 were never recorded"
    assert recorded(window, seq, 13) is None, "the newest token's query is missing"


def test_forks_have_rings_of_their_own_and_closed_rows_give_theirs_back() -> None:
    window = QueryWindow(3)
    feed(window, 1, 2, 0, 1)
    window.fork(1, [2, 3])
    feed(window, 2, 3, 20)
    feed(window, 3, 3, 30)
    assert [recorded(window, seq, seen) for seq, seen in ((1, 2), (2, 3), (3, 3))] == [[0, 1], [0, 1, 20], [0, 1, 30]]
    window.forget(2)
    window.forget(2)
    feed(window, 4, 1, 40)
    assert recorded(window, 2, 3) is None
    assert recorded(window, 4, 1) == [40]
    assert recorded(window.copy(), 3, 3) == [0, 1, 30]


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 query, got 0"):
        QueryWindow(0)


def test_rows_of_a_padded_batch_choose_as_each_row_alone() -> None:
    model, policy = tiny_model("llama"), SnapKV(window=4)
    inputs = padded(2, 40, [0, 13])
    both = PagedCache.for_model(model, page_size=4)
    record_queries(both, policy)
    with torch.no_grad():
        model(**inputs, past_key_values=both)
    compress(both, policy, 12)
    for row in range(2):
        real = inputs["attention_mask"][row].bool()
        alone = PagedCache.for_model(model, page_size=4)
        record_queries(alone, policy)
        with torch.no_grad():
            model(inputs["input_ids"][row : row + 1, real], past_key_values=alone)
        compress(alone, policy, 12)
        for layer in range(4):
            columns = both.live_columns(layer)[row] - int((~real).sum())
            assert torch.equal(columns, alone.live_columns(layer)[0])
    both.check()


def test_chunks_and_single_tokens_record_what_one_forward_does() -> None:
    model, policy, ids = tiny_model("qwen3"), SnapKV(window=6), tokens(1, 30)
    chosen = []
    for cuts in ([30], [17, 9, 1, 3], [29, 1]):
        cache = PagedCache.for_model(model)
        record_queries(cache, policy)
        with torch.no_grad():
            for part in ids.split(cuts, dim=1):
                model(part, past_key_values=cache)
        compress(cache, policy, 11)
        chosen.append([cache.live_columns(layer) for layer in range(4)])
    for others in chosen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(chosen[0], others, strict=True))


def test_without_recording_a_method_that_needs_queries_says_so_and_nothing_changes() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(tokens(1, 30), past_key_values=cache)
    with pytest.raises(NeedsQueries, match="record_queries"):
        compress(cache, TOVA(), 8)
    assert cache.layer_lengths() == [30] * 4


def test_generate_inside_compressing_crops_after_the_prompt_then_on_schedule_and_leaves_no_hook() -> None:
    model = tiny_model("llama")
    lengths: list[int] = []
    watch = model.register_forward_hook(
        lambda m, a, k, out: lengths.append(cache_in(k).get_seq_length(0)), with_kwargs=True
    )
    cache = PagedCache.for_model(model, page_size=4)
    with compressing(model, SnapKV(window=4), 12, every=5):
        model.generate(tokens(1, 40), past_key_values=cache, max_new_tokens=11, min_new_tokens=11, do_sample=False)
    assert lengths == [40, 13, 14, 15, 16, 17, 13, 14, 15, 16, 17], "the watching hook runs before the crop"
    assert cache.layer_lengths() == [12] * 4
    assert cache.get_seq_length() == 50
    watch.remove()
    assert not model._forward_hooks and not model._forward_pre_hooks
    with compressing(model, KeyNorm(), {0: 6}, longest=20), torch.no_grad():
        model(tokens(1, 9), past_key_values=cache)
    assert cache.layer_lengths() == [6, 21, 21, 21]


@pytest.mark.parametrize("options", [{"every": 0}, {"longest": 0}])
def test_a_schedule_of_no_tokens_is_refused(options: dict[str, int]) -> None:
    with (
        pytest.raises(ValueError, match="at least 1 token, got 0"),
        compressing(tiny_model("llama"), KeyNorm(), 8, **options),
    ):
        pass


def test_recording_needs_a_cache_that_knows_its_shapes() -> None:
    with pytest.raises(KVError, match="shapes are learnt"):
        record_queries(PagedCache(config=tiny_model("llama").config), SnapKV())
