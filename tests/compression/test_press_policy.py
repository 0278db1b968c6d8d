"""Presses as policies: the same keep-sets as the press itself, by budget, without running a model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allocator import KVError
from paged_kv import PagedCache, SamplingParams
from paged_kv.compression import (
    BudgetTooSmall,
    NeedsQueries,
    UnsupportedMethod,
    compress,
    compressing,
    record_queries,
)
from paged_kv.compression.kvpress import TESTED, bridge, policy
from tests.compression.press_models import kept_by_press, kept_by_us, plain, press_model, prompts


def test_without_kvpress_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for call in (bridge, policy):
        with pytest.raises(UnsupportedMethod, match=r"not installed: pip install .paged-kv\[kvpress\]"):
            call(SimpleNamespace())


def test_an_untested_release_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(UnsupportedMethod, match=rf"kvpress 9\.9 .*{TESTED[0]}.*untested=True"):
        bridge(SimpleNamespace())
    assert bridge(SimpleNamespace(compression_ratio=0.3), untested=True).compression_ratio == 0.3


kvpress = pytest.importorskip("kvpress")


@pytest.fixture(scope="module")
def model() -> Any:
    return press_model()


@pytest.mark.parametrize(
    "press",
    [
        pytest.param(lambda: kvpress.KnormPress(0.5), id="key norm"),
        pytest.param(lambda: kvpress.KeyDiffPress(0.5), id="keydiff"),
        pytest.param(lambda: kvpress.StreamingLLMPress(0.5), id="streaming"),
        pytest.param(lambda: kvpress.LagKVPress(0.5, lag_size=31), id="lagkv"),
        pytest.param(lambda: kvpress.SnapKVPress(0.5, window_size=16), id="snapkv"),
        pytest.param(lambda: kvpress.TOVAPress(0.5), id="tova"),
        pytest.param(lambda: kvpress.ExpectedAttentionPress(0.5), id="expected attention"),
        pytest.param(lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(0.5, window_size=16)), id="criticalkv"),
        pytest.param(lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, window_size=16)), id="adakv"),
        pytest.param(lambda: kvpress.CriticalAdaKVPress(kvpress.KnormPress(0.5)), id="critical adakv"),
        pytest.param(lambda: kvpress.ChunkKVPress(kvpress.KnormPress(0.5), chunk_length=16), id="chunkkv"),
        pytest.param(lambda: kvpress.ChunkPress(kvpress.KnormPress(0.5), chunk_length=32), id="chunks"),
    ],
)
def test_a_press_as_a_policy_keeps_what_the_press_keeps(model: Any, press: Callable[[], Any]) -> None:
    ids, _ = prompts()
    expected = kept_by_press(model, plain(press()), ids)
    other_ratio = press()
    other_ratio.compression_ratio = 0.123
    chosen = policy(other_ratio, model)
    cache = PagedCache.for_model(model, lanes="head")
    record_queries(cache, chosen)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    compress(cache, chosen, 64)
    assert kept_by_us(cache) == expected
    assert other_ratio.compression_ratio == 0.123


def test_heads_in_one_lane_share_what_most_of_them_want(model: Any) -> None:
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(prompts()[0], past_key_values=cache)
    compress(cache, policy(kvpress.ChunkKVPress(kvpress.KnormPress(), chunk_length=16)), 50)
    compress(cache, policy(kvpress.KnormPress()), 30)
    assert cache.layer_lengths() == [30] * 4


def test_unequal_heads_are_scored_one_by_one(model: Any) -> None:
    cache = PagedCache.for_model(model, lanes="head")
    with torch.no_grad():
        model(prompts()[0], past_key_values=cache)
    chosen = policy(kvpress.AdaKVPress(kvpress.KnormPress()))
    compress(cache, chosen, 64)
    compress(cache, chosen, 20)
    assert [sum(map(len, layer)) for layer in kept_by_us(cache)] == [80] * 4
    compress(cache, policy(kvpress.ChunkKVPress(kvpress.KnormPress(), chunk_length=4)), 8)
    assert cache.layer_lengths() == [8] * 4
    cache.check()


@pytest.mark.parametrize(
    ("press", "message"),
    [
        pytest.param(lambda: SimpleNamespace(), "no press that takes a ratio", id="no press at all"),
        pytest.param(lambda: kvpress.DMSPress(kvpress.KnormPress(), threshold=0), "by a threshold", id="dms"),
        pytest.param(lambda: kvpress.SimLayerKVPress(), "how much a layer keeps", id="simlayer"),
        pytest.param(lambda: kvpress.ThinKPress(), "channels, not tokens", id="think"),
        pytest.param(lambda: kvpress.ObservedAttentionPress(), "use H2O", id="observed"),
        pytest.param(lambda: kvpress.ComposedPress([kvpress.KnormPress(0.2)]), "use Chain", id="composed"),
        pytest.param(lambda: kvpress.ExpectedAttentionPress(), r"policy\(press, model\)", id="needs the model"),
        pytest.param(lambda: kvpress.CriticalKVPress(kvpress.KnormPress()), r"or the model", id="needs weights"),
    ],
)
def test_a_press_that_needs_more_is_refused_by_name(model: Any, press: Callable[[], Any], message: str) -> None:
    cache = PagedCache.for_model(model, lanes="head")
    with torch.no_grad():
        model(prompts()[0], past_key_values=cache)
    with pytest.raises(UnsupportedMethod, match=message):
        compress(cache, policy(press()), 40)
    assert cache.layer_lengths() == [128] * 4


def test_a_press_where_a_policy_belongs_is_told_how_to_become_one(model: Any) -> None:
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(prompts()[0], past_key_values=cache)
    for use in (
        lambda press: compress(cache, press, 40),
        lambda press: compressing(model, press, 40).__enter__(),
        lambda press: cache.crop_layers({0: 40}, press),
        lambda press: SamplingParams(compression=press),
    ):
        with pytest.raises((KVError, ValueError), match=r"KnormPress has none; paged_kv.compression.kvpress.policy\("):
            use(kvpress.KnormPress(0.5))


def test_a_window_larger_than_the_budget_is_refused(model: Any) -> None:
    cache = PagedCache.for_model(model)
    chosen = policy(kvpress.SnapKVPress(window_size=200))
    record_queries(cache, chosen)
    with torch.no_grad():
        model(prompts()[0], past_key_values=cache)
    with pytest.raises(BudgetTooSmall, match="SnapKVPress always keeps 200 tokens, got a budget of 40"):
        compress(cache, chosen, 40)
    with pytest.raises(NeedsQueries):
        policy(kvpress.SnapKVPress(window_size=8)).keep(replace(cache.live_tokens(0), queries=None), 40)
