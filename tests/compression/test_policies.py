"""Keep-sets computed by hand, method by method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from allocator import KVError
from paged_kv.compression import (
    H2O,
    TOVA,
    AdaKV,
    BudgetTooSmall,
    Chain,
    KeyNorm,
    LagKV,
    MinBudget,
    NeedsQueries,
    PerLayer,
    Protect,
    Random,
    ScorePolicy,
    SnapKV,
    StreamingLLM,
    UnsupportedMethod,
    attention_of_newest,
    pyramid,
    uniform,
)
from tests.compression.layers import READS_FIRST, layer, pulled

# Ten tokens; the query reads token 3 most, then 6, then 5, then 1.
PULL = pulled(0, 2, 0, 5, 0, 3, 4, 0, 0, 0)
ONE_QUERY = [[READS_FIRST]]
NORMS = [[n, 0.0] for n in (3, 1, 4, 2, 9, 5)]


@pytest.mark.parametrize(
    ("policy", "tokens", "budget", "expected"),
    [
        pytest.param(StreamingLLM(sinks=2), layer(PULL), 5, [0, 1, 7, 8, 9], id="streaming: sinks and newest"),
        pytest.param(StreamingLLM(sinks=0), layer(PULL), 2, [8, 9], id="streaming: no sinks"),
        pytest.param(StreamingLLM(sinks=2), layer(PULL), 10, list(range(10)), id="streaming: all fit"),
        pytest.param(KeyNorm(), layer(NORMS), 3, [0, 1, 3], id="key norm: smallest norms"),
        pytest.param(
            KeyNorm(), layer(NORMS, [[1, 0]] * 2 + [[0, 0]] + [[1, 0]] * 3), 2, [1, 3], id="key norm: 2 heads"
        ),
        pytest.param(KeyNorm(), layer(NORMS), 0, [], id="key norm: nothing"),
        pytest.param(TOVA(), layer(PULL, queries=ONE_QUERY), 4, [3, 5, 6, 9], id="tova: attended, and the newest"),
        pytest.param(TOVA(), layer(PULL, queries=ONE_QUERY), 1, [9], id="tova: the newest alone"),
        pytest.param(
            TOVA(),
            layer(PULL, positions=range(10), seen=12, queries=ONE_QUERY),
            3,
            [3, 5, 6],
            id="tova: newest is gone",
        ),
        pytest.param(
            SnapKV(window=1, kernel=1), layer(PULL, queries=ONE_QUERY), 4, [3, 5, 6, 9], id="snapkv: no smoothing"
        ),
        # Smoothed over 3: token 2 and 4 share the pull of 3, which outweighs 6's; 4 also has a share of 5's.
        pytest.param(
            SnapKV(window=1, kernel=3), layer(PULL, queries=ONE_QUERY), 4, [2, 3, 4, 9], id="snapkv: neighbours of 3"
        ),
        pytest.param(
            SnapKV(window=2, kernel=1), layer(PULL, queries=[[READS_FIRST] * 2]), 3, [3, 8, 9], id="snapkv: 2"
        ),
        pytest.param(
            H2O(recent=1, queries=4), layer(PULL, queries=[[READS_FIRST] * 4]), 3, [3, 6, 9], id="h2o: heavy and recent"
        ),
        pytest.param(
            H2O(recent=0, queries=2),
            layer([[1, 9], [9, 1], [0, 0], [0, 0]], queries=[[[1, 0], [0, 1]]]),
            2,
            [0, 1],
            id="h2o: what either query reads",
        ),
        pytest.param(Protect(KeyNorm(), sinks=1, recent=1), layer(NORMS), 3, [0, 1, 5], id="protect: both ends"),
        pytest.param(
            Chain([StreamingLLM(sinks=0), KeyNorm()]), layer(NORMS), 2, [2, 3], id="chain: newest 4, then norms"
        ),
        pytest.param(
            Chain([KeyNorm(), StreamingLLM(sinks=0)]), layer(NORMS), 2, [2, 3], id="chain: norms, then newest"
        ),
        pytest.param(MinBudget(KeyNorm(), 3), layer(NORMS), 1, [0, 1, 3], id="min budget: raised"),
        pytest.param(MinBudget(KeyNorm(), 2), layer(NORMS), 3, [0, 1, 3], id="min budget: left"),
        pytest.param(PerLayer(KeyNorm()), layer(NORMS), 1, [1], id="per layer: default"),
        pytest.param(PerLayer(KeyNorm(), {0: StreamingLLM(0)}), layer(NORMS), 1, [5], id="per layer: named"),
        # Blocks of 2 after one sink: tokens 1-2, 3-4, 5-6; 5-6 have no next block. Token 2's channels spread most in
        # 1-2 (measured in 3-4's range), token 3's in 3-4.
        pytest.param(
            LagKV(sinks=1, lag=2),
            layer([[9, 9], [1, 1], [0, 9], [9, 0], [1, 1], [2, 3], [4, 6]]),
            5,
            [0, 2, 3, 5, 6],
            id="lagkv: what stands out",
        ),
        pytest.param(LagKV(sinks=2, lag=4), layer(NORMS), 4, [0, 1, 4, 5], id="lagkv: too short, by age"),
    ],
)
def test_a_method_keeps_what_a_hand_computes(policy: Any, tokens: Any, budget: int, expected: list[int]) -> None:
    kept = policy.keep(tokens, budget)
    assert [list(lane) for lane in kept] == [expected]


def test_attention_is_causal_by_position_and_sums_to_one() -> None:
    tokens = layer(pulled(1, 1, 1, 1), positions=[0, 4, 8, 9], seen=10, queries=[[READS_FIRST] * 3])
    received = attention_of_newest(tokens, 0, 3)[0, 0]
    torch.testing.assert_close(received[0], torch.tensor([0.5, 0.5, 0.0, 0.0]))  # position 7
    torch.testing.assert_close(received[1], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))
    torch.testing.assert_close(received[2], torch.full((4,), 0.25))


def test_query_heads_are_averaged_over_the_kv_head_that_they_read() -> None:
    # Two KV heads in lanes of their own, two query heads each: the first pair reads token 0, the second token 2.
    keys = [[5, 0], [0, 5], [0, 0], [0, 0]], [[0, 0], [0, 0], [5, 5], [0, 0]]
    tokens = layer(*keys, lanes=2, queries=[[[1, 0]], [[1, 0]], [[0, 1]], [[1, 1]]])
    kept = SnapKV(window=1, kernel=1).keep(tokens, 2)
    assert [list(lane) for lane in kept] == [[0, 3], [2, 3]]


@pytest.mark.parametrize(
    ("safeguard", "budget", "expected"),
    [
        # Scores, head 0: -1 -2 -3 -4; head 1: -5 -6 -7 -8.
        pytest.param(0.0, 2, [[0, 1, 2, 3], []], id="all to the better head"),
        pytest.param(0.5, 2, [[0, 1, 2], [0]], id="half of the budget is safe"),
        pytest.param(0.2, 2, [[0, 1, 2], [0]], id="at least one is safe"),
        pytest.param(1.0, 2, [[0, 1], [0, 1]], id="equal heads"),
        pytest.param(0.2, 4, [[0, 1, 2, 3], [0, 1, 2, 3]], id="everything fits"),
        pytest.param(0.2, 0, [[], []], id="nothing"),
    ],
)
def test_adakv_shares_one_budget_among_heads(safeguard: float, budget: int, expected: list[list[int]]) -> None:
    tokens = layer(pulled(1, 2, 3, 4), pulled(5, 6, 7, 8), lanes=2)
    assert [list(lane) for lane in AdaKV(KeyNorm(), safeguard).keep(tokens, budget)] == expected


def test_adakv_crops_heads_again_that_are_unequal_already() -> None:
    tokens = layer(pulled(1, 2, 3, 4), pulled(5, 6, 7, 8), lanes=2)
    shorter = type(tokens)(
        0, [tokens.keys[0], tokens.keys[1][:, :1]], [tokens.values[0], tokens.values[1][:, :1]], [np.arange(4), [0]], 4
    )
    assert [list(lane) for lane in AdaKV(KeyNorm()).keep(shorter, 2)] == [[0, 1, 2], [0]]


def test_random_tokens_are_the_same_for_one_seed_and_others_for_another() -> None:
    tokens = layer(pulled(*range(40)), pulled(*range(40)), lanes=2)
    first, again, other = (Random(seed).keep(tokens, 20) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[1]), "lanes are drawn apart"


def test_a_method_of_ones_own_takes_a_few_lines() -> None:
    class ValueNorm(ScorePolicy):
        def scores(self, tokens: Any, lane: int) -> torch.Tensor:
            return tokens.values[lane].norm(dim=-1)

    assert [list(lane) for lane in ValueNorm().keep(layer(NORMS), 2)] == [[4, 5]]


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        pytest.param(uniform(range(3), 7), [7, 7, 7], id="uniform"),
        pytest.param(
            pyramid(range(4), 64, smallest=8, length=128), [120, 83, 45, 8], id="as PyramidKV at a half of 128"
        ),
        pytest.param(pyramid(range(3), 100), [192, 100, 8], id="no length: the smallest caps"),
        pytest.param(pyramid(range(3), 400, steepness=2), [600, 400, 200], id="gentle"),
        pytest.param(pyramid(range(3), 8), [8, 8, 8], id="the mean is the smallest"),
        pytest.param(pyramid([5], 30), [30], id="one layer"),
        pytest.param(pyramid([2, 4], 20, smallest=4, length=22), [20, 20], id="hardly anything to drop"),
    ],
)
def test_budgets_across_layers(budgets: dict[int, int], expected: list[int]) -> None:
    assert list(budgets.values()) == expected


class Wrong(ScorePolicy):
    """Scores all live tokens but one."""

    def scores(self, tokens: Any, lane: int) -> torch.Tensor:
        return tokens.values[lane].norm(dim=-1)[:, 1:]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(lambda: Wrong().keep(layer(NORMS), 2), KVError, "Wrong gave scores of shape", id="few scores"),
        pytest.param(lambda: KeyNorm().keep(layer(NORMS), -1), KVError, "at least 0, got -1", id="negative budget"),
        pytest.param(lambda: KeyNorm().keep(layer(NORMS), 0.5), KVError, "got 0.5", id="a ratio for a budget"),
        pytest.param(lambda: KeyNorm().keep(layer(NORMS), True), KVError, "got True", id="a truth value"),
        pytest.param(
            lambda: StreamingLLM(4).keep(layer(NORMS), 3),
            BudgetTooSmall,
            "StreamingLLM always keeps 4.*of 3",
            id="sinks",
        ),
        pytest.param(
            lambda: SnapKV(4).keep(layer(NORMS, queries=ONE_QUERY), 3),
            BudgetTooSmall,
            "SnapKV always keeps 4",
            id="window",
        ),
        pytest.param(
            lambda: Protect(KeyNorm(), 2, 3).keep(layer(NORMS), 4),
            BudgetTooSmall,
            "Protect always keeps 5",
            id="both ends",
        ),
        pytest.param(
            lambda: AdaKV(SnapKV(4)).keep(layer(NORMS, queries=ONE_QUERY), 3), BudgetTooSmall, "keeps 4", id="adakv"
        ),
        pytest.param(lambda: MinBudget(SnapKV(4), 3), BudgetTooSmall, "SnapKV always keeps 4", id="a floor too low"),
        pytest.param(lambda: TOVA().keep(layer(NORMS), 3), NeedsQueries, "layer 0.*record_queries", id="no queries"),
        pytest.param(
            lambda: AdaKV(StreamingLLM()), TypeError, "ScorePolicy, got StreamingLLM", id="adakv of no scores"
        ),
        pytest.param(lambda: Protect(StreamingLLM()), TypeError, "ScorePolicy, got StreamingLLM", id="protect of none"),
        pytest.param(lambda: AdaKV(KeyNorm(), 1.5), ValueError, "from 0 to 1, got 1.5", id="safeguard"),
        pytest.param(lambda: SnapKV(window=0), ValueError, "window must be at least 1", id="no window"),
        pytest.param(lambda: SnapKV(kernel=4), ValueError, "kernel must be odd", id="even kernel"),
        pytest.param(lambda: H2O(queries=0), ValueError, "at least 1, got 0", id="h2o without queries"),
        pytest.param(lambda: H2O(recent=-1), ValueError, "at least 0 tokens, got -1", id="h2o recent"),
        pytest.param(lambda: LagKV(lag=1), ValueError, "lag must be at least 2", id="lag"),
        pytest.param(lambda: LagKV(sinks=-1), ValueError, "sinks must be", id="lag sinks"),
        pytest.param(lambda: StreamingLLM(-1), ValueError, "sinks must be", id="streaming sinks"),
        pytest.param(lambda: Chain([]), ValueError, "at least one policy", id="empty chain"),
        pytest.param(lambda: Chain([KeyNorm()], 0), ValueError, "narrowing must be", id="narrowing"),
        pytest.param(lambda: pyramid(range(4), 7), KVError, "at least 8.*mean of 7", id="pyramid below its smallest"),
        pytest.param(lambda: pyramid(range(4), 64, steepness=0.5), ValueError, "steepness", id="steepness"),
        pytest.param(lambda: uniform(range(4), 0.25), KVError, "got 0.25", id="uniform ratio"),
        pytest.param(
            lambda: StreamingLLM(rerotate=True).keep(layer(NORMS), 5),
            UnsupportedMethod,
            "for_model",
            id="rerotate unbound",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
