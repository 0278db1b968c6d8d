"""What a request may ask of compression, and when its crops fall: integers alone."""

from __future__ import annotations

import pytest

from paged_kv.compression import AdaKV, Chain, KeyNorm, MinBudget, PerLayer, Protect, SnapKV, StreamingLLM
from paged_kv.engine.compress import Compression, ramp
from paged_kv.engine.crops import CropPlan
from paged_kv.engine.params import InvalidParams, SamplingParams


def crops(asked: object, layers: int = 3) -> CropPlan:
    return Compression.of(asked).for_layers(range(layers))


def moments(plan: CropPlan, num_prompt: int, total: int, live_after: int) -> list[int]:
    """After how many tokens a row is cropped, computed as far as each answer allows."""
    computed, live, found = 0, 0, []
    while computed < total:
        step = plan.until_due(num_prompt, computed, live)
        if step is None:
            break
        assert step >= 1
        assert not any(plan.is_due(num_prompt, computed + i, live + i) for i in range(1, step)), "one was passed over"
        computed, live = computed + step, live + step
        assert plan.is_due(num_prompt, computed, live)
        live = min(live, live_after)
        found.append(computed)
    return found


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(SnapKV(budget=70), {0: 70, 1: 70, 2: 70}, id="a policy's own"),
        pytest.param(Compression(SnapKV(), 70), {0: 70, 1: 70, 2: 70}, id="one number"),
        pytest.param(Compression(SnapKV(budget=70), 80), {0: 80, 1: 80, 2: 80}, id="the request's goes first"),
        pytest.param(Compression(KeyNorm(), [3, 2, 1]), {0: 3, 1: 2, 2: 1}, id="one per layer"),
        pytest.param(Compression(KeyNorm(), {1: 9}), {1: 9}, id="some layers"),
        pytest.param(KeyNorm(budget={0: 5, 2: 6}), {0: 5, 2: 6}, id="a policy's own by layer"),
        pytest.param(AdaKV(KeyNorm(budget=5)), {0: 5, 1: 5, 2: 5}, id="of the policy inside"),
        pytest.param(AdaKV(KeyNorm(budget=5), budget=7), {0: 7, 1: 7, 2: 7}, id="of the policy around it"),
        pytest.param(Protect(KeyNorm(budget=9), 1, 2), {0: 9, 1: 9, 2: 9}, id="protected"),
        pytest.param(MinBudget(KeyNorm(budget=4), 8), {0: 4, 1: 4, 2: 4}, id="at least"),
        pytest.param(Chain([KeyNorm(budget=1), StreamingLLM(budget=6)]), {0: 6, 1: 6, 2: 6}, id="the last of a chain"),
        pytest.param(PerLayer(KeyNorm(budget=4), {1: StreamingLLM(budget=8)}), {0: 4, 1: 8, 2: 4}, id="per layer"),
        pytest.param(Compression(KeyNorm(), floor=4), {}, id="under pressure alone"),
    ],
)
def test_budgets_come_from_the_request_or_else_from_the_policy(asked: object, expected: dict[int, int]) -> None:
    assert crops(asked).budgets == expected
    assert SamplingParams(compression=asked).compression == Compression.of(asked)


def test_crops_fall_after_the_prompt_then_every_few_tokens() -> None:
    assert moments(crops(KeyNorm(budget=4)), 10, 30, 4) == [10]
    assert moments(crops(Compression(KeyNorm(), 4, 6)), 10, 30, 4) == [10, 16, 22, 28, 34]


def test_crops_fall_when_a_layer_reaches_a_length() -> None:
    assert moments(crops(Compression(KeyNorm(), 4, longest=9)), 10, 24, 4) == [10, 15, 20, 25]
    assert moments(crops(Compression(KeyNorm(), 4, longest=9)), 2, 14, 4) == [2, 9, 14]
    assert moments(crops(Compression(KeyNorm(), 4, every=3, longest=6)), 10, 16, 4) == [10, 12, 13, 15, 16]


def test_crops_fall_between_pieces_of_a_prompt() -> None:
    assert moments(crops(Compression(KeyNorm(), 4, chunk=8)), 30, 30, 4) == [8, 16, 24, 30]
    assert moments(crops(Compression(KeyNorm(), 4, chunk=8, every=5)), 16, 30, 4) == [8, 16, 21, 26, 31]


def test_what_a_row_holds_at_most_follows_from_its_crops() -> None:
    assert crops(KeyNorm(budget=4)).most_live(100, 100) == 100
    assert crops(KeyNorm(budget=4)).most_live(10, 30) == 24
    assert crops(Compression(KeyNorm(), 4, chunk=8)).most_live(100, 100) == 12
    assert crops(Compression(KeyNorm(), 4, chunk=8, every=3)).most_live(100, 150) == 12
    assert crops(Compression(KeyNorm(), 4, chunk=8, longest=20)).most_live(100, 150) == 20
    assert crops(Compression(KeyNorm(), 8, every=3)).most_live(2, 50) == 11, "a short prompt grows to the budget first"
    assert crops(Compression(KeyNorm(), 8, every=3)).most_live(2, 6) == 6
    assert crops(Compression(KeyNorm(), 4, every=3)).most_live_after(100, 150) == 7
    assert crops(Compression(KeyNorm(), {0: 4}, chunk=8)).most_live(100, 100) == 100, "other layers keep all"
    assert crops(Compression(KeyNorm(), floor=4)).most_live(100, 120) == 120


def test_the_prefix_cache_serves_no_tokens_whose_queries_the_first_crop_reads() -> None:
    assert crops(KeyNorm(budget=4)).reusable(100) == 99
    assert crops(SnapKV(budget=70)).reusable(100) == 100 - 64
    assert crops(SnapKV(budget=70)).reusable(20) == 0
    assert crops(Compression(SnapKV(8, budget=70), chunk=32)).reusable(100) == 24


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        pytest.param((KeyNorm(), 0), {}, "a budget is a number of tokens, at least 1, got 0", id="zero"),
        pytest.param((KeyNorm(), -3), {}, "at least 1, got -3", id="negative"),
        pytest.param((KeyNorm(), 0.25), {}, "at least 1, got 0.25", id="a ratio"),
        pytest.param((KeyNorm(), True), {}, "at least 1, got True", id="a truth value"),
        pytest.param((KeyNorm(), "256"), {}, "at least 1, got '256'", id="text"),
        pytest.param((KeyNorm(), (4, -1)), {}, "at least 1, got -1", id="of one layer"),
        pytest.param((KeyNorm(), {0: 1.5}), {}, "at least 1, got 1.5", id="by layer"),
        pytest.param((SnapKV(), 63), {}, "SnapKV always keeps 64 tokens, got a budget of 63", id="below a window"),
        pytest.param((StreamingLLM(), 3), {}, "StreamingLLM always keeps 4 tokens, got a budget of 3", id="sinks"),
        pytest.param((Protect(SnapKV(8), 4, 4), 15), {}, "Protect always keeps 16 tokens", id="a combinator's"),
        pytest.param((KeyNorm(), 4, 0), {}, "every must be a number of tokens, at least 1, got 0", id="every"),
        pytest.param((KeyNorm(), 4), {"longest": 0.5}, "longest must be a number of tokens", id="longest"),
        pytest.param((KeyNorm(), 4), {"chunk": -1}, "chunk must be a number of tokens", id="chunk"),
        pytest.param((SnapKV(), 128), {"floor": 63}, "got a floor of 63", id="floor"),
        pytest.param(((), 4), {}, "method `keep`, tuple has none", id="no policy"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(arguments: tuple, named: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Compression(*arguments, **named)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param(SnapKV(budget=8), "SnapKV always keeps 64 tokens, got a budget of 8", id="below a window"),
        pytest.param(KeyNorm(budget=-1), "at least 1, got -1", id="negative"),
        pytest.param(KeyNorm(), r"how many tokens may stay\? KeyNorm\(budget=256\)", id="no budget"),
        pytest.param(Compression(KeyNorm(), every=4, floor=3), "every, longest and chunk need a budget", id="every"),
        pytest.param(Compression(KeyNorm(), (1, 2)), "3 paged layers, got 2 budgets", id="too few"),
        pytest.param(Compression(KeyNorm(), {7: 2}), "no paged layer 7", id="unknown layer"),
        pytest.param(Compression(KeyNorm(), 9, longest=9), "longest=9 must be above the largest", id="longest"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_when_the_request_is_added(asked: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        crops(asked)


def test_parameters_name_what_is_no_compression() -> None:
    with pytest.raises(InvalidParams, match="compression: a policy chooses with a method `keep`, int has none"):
        SamplingParams(compression=256)


def test_a_ramp_keeps_its_mean() -> None:
    assert ramp(100, 5, 0.5) == (150, 125, 100, 75, 50)
    assert ramp(100, 1, 0.5) == (100,)
    assert ramp(1, 3, 0.9) == (2, 1, 1)
    with pytest.raises(ValueError, match="spread"):
        ramp(10, 3, 1.0)
