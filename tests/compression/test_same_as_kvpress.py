"""Our own methods keep exactly what kvpress's keep on the same model, in all layers and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_kv import PagedCache
from paged_kv.compression import (
    H2O,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyNorm,
    LagKV,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
    compress,
    pyramid,
    record_queries,
)
from tests.compression.press_models import kept_by_press, kept_by_us, plain, press_model, prompts

kvpress = pytest.importorskip("kvpress")
LAYERS = range(4)


@pytest.fixture(scope="module")
def model() -> Any:
    return press_model()


CASES = [
    pytest.param(KeyNorm(), 64, lambda: kvpress.KnormPress(0.5), id="key norm"),
    pytest.param(KeyNorm(), 32, lambda: kvpress.KnormPress(0.75), id="key norm, a quarter"),
    pytest.param(Random(5), 64, lambda: kvpress.RandomPress(0.5, seed=5), id="random"),
    pytest.param(StreamingLLM(4), 64, lambda: kvpress.StreamingLLMPress(0.5, n_sink=4), id="streaming"),
    pytest.param(SnapKV(window=16), 64, lambda: kvpress.SnapKVPress(0.5, window_size=16), id="snapkv"),
    pytest.param(SnapKV(window=8, kernel=7), 96, lambda: kvpress.SnapKVPress(0.25, 8, 7), id="snapkv, other sizes"),
    pytest.param(LagKV(sinks=4, lag=32), 96, lambda: kvpress.LagKVPress(0.25, lag_size=32), id="lagkv"),
    # 4 sinks, 28 newest and the 5 best of each of 6 blocks: no rank is cut in two, which would be decided by chance.
    pytest.param(
        LagKV(sinks=4, lag=16), 62, lambda: kvpress.LagKVPress(1 - 62 / 128, lag_size=16), id="lagkv, short lag"
    ),
    pytest.param(
        SnapKV(window=8),
        pyramid(LAYERS, 64, smallest=8, length=128),
        lambda: kvpress.PyramidKVPress(0.5, window_size=8),
        id="pyramidkv",
    ),
    pytest.param(
        KeyNorm(),
        {0: 102, 1: 76, 2: 51, 3: 25},
        lambda: kvpress.PerLayerCompressionPress(kvpress.KnormPress(), [0.2, 0.4, 0.6, 0.8]),
        id="budgets by layer",
    ),
    pytest.param(AdaKV(KeyNorm()), 64, lambda: kvpress.AdaKVPress(kvpress.KnormPress(0.5)), id="adakv of key norm"),
    pytest.param(
        AdaKV(SnapKV(window=16)), 32, lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.75, 16)), id="adakv of snapkv"
    ),
    pytest.param(
        AdaKV(SnapKV(window=16), 0.5),
        64,
        lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, 16), 0.5),
        id="adakv, safe",
    ),
]


@pytest.mark.parametrize(("policy", "budget", "press"), CASES)
def test_keep_sets_are_the_same_per_head(model: Any, policy: Any, budget: Any, press: Any) -> None:
    _compare(model, policy, budget, press(), lanes="head")


def test_keep_sets_of_tova_which_averages_over_all_heads(model: Any) -> None:
    _compare(model, TOVA(), 64, kvpress.TOVAPress(0.5), lanes="layer")


def test_keep_sets_of_expected_attention(model: Any) -> None:
    _compare(model, ExpectedAttention.for_model(model), 64, kvpress.ExpectedAttentionPress(0.5), lanes="head")


def test_keep_sets_of_h2o_equal_observed_attention_under_eager(model: Any) -> None:
    _compare(model, H2O(recent=0), 64, kvpress.ObservedAttentionPress(0.5), lanes="head", attention="eager")


def test_protecting_the_window_of_snapkv_again_changes_nothing(model: Any) -> None:
    policy = Protect(SnapKV(window=16), sinks=0, recent=16)
    _compare(model, policy, 64, kvpress.SnapKVPress(0.5, window_size=16), lanes="head")


def _compare(model: Any, policy: Any, budget: Any, press: Any, lanes: Any, attention: str = "sdpa") -> None:
    ids, _ = prompts()
    expected = kept_by_press(model, plain(press), ids, attention=attention)
    model.set_attn_implementation("sdpa")
    cache = PagedCache.for_model(model, lanes=lanes)
    record_queries(cache, policy)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    compress(cache, policy, budget)
    assert kept_by_us(cache) == expected
    cache.check()
