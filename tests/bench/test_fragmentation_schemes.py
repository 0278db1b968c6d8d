"""Each scheme accounts for every slot, equal needs give equal figures, and rows agree with what they model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allocator.waste import Waste
from bench.fragmentation.published import PUBLISHED, one_table_waste
from bench.fragmentation.schedules import SCHEDULES, Schedule, make_schedule
from bench.fragmentation.schemes import SCHEMES
from bench.fragmentation.schemes.base import Full, Request, State, run_lengths
from bench.fragmentation.schemes.contiguous import Buddy, ContiguousExact
from bench.fragmentation.schemes.hf import unavailable
from bench.fragmentation.schemes.paged import GroupTables, group_layers
from bench.fragmentation.schemes.rectangle import StaticRectangle
from bench.fragmentation.shape import Shape
from bench.fragmentation.simulate import Outcome, simulate
from bench.fragmentation.workloads import Workload, make_workload

SMALL = Shape(layers=6, heads=4, head_bytes=512, pool_tokens=16_384, page_size=16, model_max=8192)
MISSING = unavailable()
KEYS = [
    pytest.param(key, marks=[pytest.mark.skip(MISSING)] if MISSING and key == "transformers-paged" else [])
    for key in SCHEMES
]


def _workload(n: int = 60, name: str = "staggered") -> Workload:
    made = make_workload(name, n, seed=1)
    return replace(made, prompt=np.minimum(made.prompt, 2000), output=np.minimum(made.output, 120))


def _run(
    key: str, schedule: str, *, shape: Shape = SMALL, workload: Workload | None = None, load: float | None = None
) -> Outcome:
    workload = workload or _workload()
    if key == "transformers-paged":
        shape = replace(shape, page_size=64)
    made = make_schedule(schedule, shape)
    arrivals = workload.arrival_steps(load, shape.pool_tokens)
    return simulate(SCHEMES[key](shape, made), workload, made, shape, arrivals, seed=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("key", KEYS)
def test_every_scheme_serves_every_request_and_accounts_for_every_slot(key: str, schedule: str):
    figures = _run(key, schedule).figures  # `Waste.check` runs at each sample
    assert figures["completed"] == 60
    assert figures["refused"] == 0
    shares = [figures[f"{name}_pct"] for name in ("live", "internal", "reservation", "imbalance", "external", "free")]
    assert sum(shares) == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize("key", KEYS)
def test_the_same_seed_gives_the_same_figures(key: str):
    first, again = (_run(key, "random", load=0.95) for _ in range(2))
    assert first.figures == again.figures
    assert first.series == again.series
    assert np.array_equal(first.layers, again.layers)
    assert first.runs == again.runs


def test_without_crops_our_rows_all_equal_one_table():
    figures = {key: _run(key, "none").figures for key in SCHEMES if key.startswith("ours") or key == "group-tables"}
    for name in ("batch_mean", "live_pct", "held_pct", "preemptions"):
        assert len({figures[key][name] for key in figures if key != "group-tables"}) == 1, name
    assert figures["group-tables"]["batch_mean"] == pytest.approx(figures["ours-per-layer"]["batch_mean"], rel=0.02)


def test_crops_by_layer_admit_more_only_where_layers_have_tables_over_one_pool():
    batch = {key: _run(key, "pyramid").figures["batch_mean"] for key in SCHEMES if "transformers" not in key}
    assert batch["ours-per-layer"] > 1.4 * batch["group-tables"]
    assert batch["ours-per-layer"] > 1.4 * batch["private-pools"]
    assert batch["ours-per-layer"] > 1.4 * batch["ours-lockstep"]
    assert batch["ours-per-layer"] == batch["ours-runs"] == batch["ours-per-head"]


def test_crops_by_head_pay_only_with_a_table_for_each_head():
    batch = {key: _run(key, "random").figures["batch_mean"] for key in ("ours-per-layer", "ours-per-head")}
    assert batch["ours-per-head"] > 1.4 * batch["ours-per-layer"]


def test_reservation_schemes_rank_as_published():
    live = {key: _run(key, "none").figures["live_pct"] for key in SCHEMES if "transformers" not in key}
    assert live["contiguous-max"] < live["buddy"] < live["contiguous-exact"] < live["ours-lockstep"]
    assert live["contiguous-max"] < 40
    assert live["ours-lockstep"] > 90


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.model)
def test_one_table_for_all_layers_wastes_what_was_published(published):
    assert one_table_waste(published.needed, published.tokens) == pytest.approx(published.wasted_pct, abs=0.05)


@pytest.mark.parametrize("published", PUBLISHED[1:], ids=lambda published: published.model)
def test_the_group_row_wastes_as_published_when_all_layers_share_one_group(published):
    """Without windows in the schedule the row makes one group; what layers need is then what it must waste."""
    shape = Shape(layers=len(published.needed), heads=1, pool_tokens=published.tokens * 2, page_size=16)
    scheme = GroupTables(shape, Schedule("published", ""), watermark=0)
    live = np.array(published.needed, np.int64)[:, None]
    scheme.admit(0, Request(0, published.tokens, 1), live)
    state = State.empty(1, shape.layers, 1)
    state.seen[0], state.live[0] = published.tokens, live
    waste = scheme.waste(np.array([0]), state, None)
    assert 100 * waste.imbalance / waste.held == pytest.approx(published.wasted_pct, abs=0.05)


@pytest.mark.parametrize(
    ("kinds", "groups", "size"),
    [
        ([0] * 4, [[0, 1, 2, 3]], 4),
        ([0, 8, 0, 8], [[0, 2], [1, 3]], 2),
        ([8, 8, 0, 8, 8], [[0, 1, 3, 4][i : i + 1] for i in range(4)] + [[2]], 1),
        ([8] * 6 + [0] * 5, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], 6),  # within a quarter: padded to the larger
    ],
)
def test_layers_are_grouped_by_kind_in_equal_sizes(kinds: list[int], groups: list[list[int]], size: int):
    made, made_size = group_layers(kinds)
    assert sorted(made) == sorted(groups)
    assert made_size == size


def test_first_fit_takes_the_first_hole_and_joins_neighbours():
    scheme = ContiguousExact(replace(SMALL, pool_tokens=100), make_schedule("none", SMALL))
    places = [scheme.take(n)[0] for n in (30, 30, 30)]
    assert places == [0, 30, 60]
    scheme.give(0, 30)
    scheme.give(60, 30)
    assert scheme.holes == [(0, 30), (60, 40)]
    with pytest.raises(Full):
        scheme.take(50)  # 70 are free, no hole is large enough
    scheme.give(30, 30)
    assert scheme.holes == [(0, 100)]


def test_room_that_no_hole_offers_counts_as_external():
    shape = replace(SMALL, pool_tokens=100)
    scheme = ContiguousExact(shape, make_schedule("none", shape))
    live = np.full((shape.layers, 1), 30, np.int64)
    for slot in range(3):
        scheme.admit(slot, Request(slot, 29, 1), live)
    scheme.release(1)
    state = State.empty(3, shape.layers, 1)
    state.seen[:], state.live[:] = 29, 29
    row = shape.layers * shape.heads
    waste = scheme.waste(np.array([0, 2]), state, Request(9, 34, 1))
    assert waste.external == 40 * row
    assert waste.reservation == 2 * row
    assert waste.free == 0
    assert scheme.waste(np.array([0, 2]), state, None).external == 0


def test_buddies_split_and_merge():
    scheme = Buddy(replace(SMALL, pool_tokens=64), make_schedule("none", SMALL))
    regions = [scheme.take(n) for n in (5, 16, 3)]
    assert regions == [(0, 8), (16, 16), (8, 4)]
    for start, size in regions:
        scheme.give(start, size)
    assert scheme.free[6] == {0}
    with pytest.raises(Full):
        scheme.take(65)


def test_the_static_row_holds_the_bytes_of_the_real_class():
    from transformers import LlamaConfig, StaticCache

    config = LlamaConfig(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, hidden_size=16)
    requests = [Request(0, 40, 10), Request(1, 90, 21)]
    scheme = StaticRectangle(SMALL, make_schedule("none", SMALL))
    for request in requests:
        scheme.admit(request.index, request, np.full((6, 1), request.prompt, np.int64))
    cache = StaticCache(config=config, max_cache_len=111)
    import torch

    new = torch.zeros(2, 4, 1, 4)
    for layer in cache.layers:
        layer.lazy_initialization(new, new)
    real = sum(layer.keys.numel() for layer in cache.layers) // 4  # values of K, 4 a slot
    assert int(scheme.held_by_layer(np.array([0, 1]), State.empty(2, 6, 1)).sum()) == real


def test_runs_of_neighbouring_pages_are_counted_in_each_table():
    tables = [np.array([5, 6, 7, 2]), np.array([3, 4]), np.array([], int), np.array([5])]
    assert run_lengths(tables).tolist() == [3, 1, 2, 1]
    assert run_lengths([]).tolist() == []


def test_waste_adds_up_and_refuses_negative_places():
    waste = Waste(pool=100, live=50, internal=10, reservation=5, imbalance=15, external=12)
    assert (waste.held, waste.free) == (80, 8)
    assert (waste.live_share, waste.held_share) == (0.5, 0.8)
    waste.check()
    with pytest.raises(ValueError, match="free is -1"):
        Waste(pool=10, live=11).check()


def test_waste_reports_what_a_gauge_of_blocks_hides():
    """A published gauge says 66.7 % where 36.5 % is occupied: two of three blocks held, half of each filled."""
    waste = Waste(pool=3000, live=1095, internal=905)
    assert round(100 * waste.held_share, 1) == 66.7
    assert round(100 * waste.live_share, 1) == 36.5
