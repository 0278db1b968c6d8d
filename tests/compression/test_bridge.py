"""Presses of kvpress on paged caches, unmodified where transformers lets them run and behind the bridge everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from allocator import OutOfPages
from paged_kv import PagedCache, detach
from paged_kv.attention.attach import paged_attention
from paged_kv.compression import UnsupportedMethod
from paged_kv.compression.kvpress import bridge
from tests.compression.press_models import (
    BOTH_WAYS,
    attached,
    kept_by_press,
    kept_by_us,
    plain,
    prompts,
    run,
)

kvpress = pytest.importorskip("kvpress")
from kvpress.attention_patch import attention_patch  # noqa: E402 - after the check that it is there

UNEVEN: list[Any] = [
    pytest.param(lambda: kvpress.PyramidKVPress(0.5, window_size=8), [117, 81, 44, 8], id="pyramid"),
    pytest.param(
        lambda: kvpress.PerLayerCompressionPress(kvpress.KnormPress(), [0.8, 0.6, 0.4, 0.2]),
        [24, 50, 75, 100],
        id="per layer",
    ),
    pytest.param(lambda: kvpress.ChunkKVPress(kvpress.KnormPress(0.5), chunk_length=10), None, id="chunks"),
]


@BOTH_WAYS
@pytest.mark.parametrize(("press", "lengths"), UNEVEN)
def test_uneven_layers_take_several_tokens_at_once_as_one_by_one(
    model: Any, press: Callable[[], Any], lengths: list[int] | None, behind_bridge: bool
) -> None:
    a, b = prompts()
    prompt, rest = a[:, :125], b[:, :7]
    caches = [PagedCache.for_model(model), PagedCache.for_model(model)]
    for cache in caches:
        with attached(press(), behind_bridge)(model):
            run(model, prompt, cache)
    after = caches[0].layer_lengths()
    if lengths is not None:
        assert after == lengths
        assert caches[0].num_pages() == 18
    at_once = run(model, rest, caches[0])
    one_by_one = torch.cat([run(model, token, caches[1]) for token in rest.split(1, dim=1)], dim=1)
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-5)
    assert caches[0].layer_lengths() == [length + 7 for length in after]
    for cache in caches:
        cache.check()


@BOTH_WAYS
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(
    ("ratios", "steps"),
    [
        ([1, 0.1, 0.5, 0.5], [[0, 57, 32, 32], [1, 58, 33, 33], [2, 59, 34, 34]]),
        ([0.1, 1, 0.5, 0.5], [[57, 0, 32, 32], [58, 1, 33, 33], [59, 2, 34, 34]]),
    ],
)
def test_a_layer_evicted_whole_goes_on_and_the_others_are_not_cropped_again(
    model: Any, ratios: list[float], steps: list[list[int]], num_rows: int, behind_bridge: bool
) -> None:
    ids = prompts()[0][:, :64].expand(num_rows, -1)
    cache = PagedCache.for_model(model)
    with attached(kvpress.PerLayerCompressionPress(kvpress.KnormPress(), ratios), behind_bridge)(model):
        run(model, ids, cache)
        assert cache.layer_lengths() == steps[0]
        empty = ratios.index(1)
        assert cache.live_columns(empty).shape[2] == 0
        for lengths in steps[1:]:
            assert run(model, ids[:, :1], cache).isfinite().all()
            assert cache.layer_lengths() == lengths
    cache.check()


HEADWISE: list[Any] = [
    pytest.param(lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r, window_size=16)), id="adakv"),
    pytest.param(lambda r: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(r, window_size=16)), id="critical adakv"),
]


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("press", HEADWISE)
def test_heads_free_what_kvpress_masks_with_equal_logits(
    model: Any, press: Callable[[float], Any], ratio: float
) -> None:
    a, b = prompts()
    ids = torch.cat([a, b, a.flip(1), b.flip(1)], dim=1)
    kept = int(512 * (1 - ratio))
    expected = kept_by_press(model, plain(press(ratio)), ids)
    masked = DynamicCache()
    with plain(press(ratio))(model):
        run(model, ids, masked)
    wanted = [run(model, token, masked) for token in b[:, :3].split(1, dim=1)]
    ours = PagedCache.for_model(model, lanes="head")
    whole = PagedCache.for_model(model, lanes="head")
    run(model, ids, whole)
    with bridge(press(ratio))(model):
        run(model, ids, ours)
    assert kept_by_us(ours) == expected
    lengths = [[len(head) for head in layer] for layer in expected]
    assert [sum(layer) for layer in lengths] == [4 * kept] * 4
    assert ours.num_pages() == sum(-(-length // 16) for layer in lengths for length in layer)
    # Half a page of every head is lost on average; with 4 heads and 512 tokens that is more than with long prompts.
    assert 1 - ours.num_pages() / whole.num_pages() >= ratio - 0.5 * 16 / 512 - 0.01
    for token, want in zip(b[:, :3].split(1, dim=1), wanted, strict=True):
        torch.testing.assert_close(run(model, token, ours), want, rtol=0, atol=1e-5)
    ours.check()


def test_long_questions_after_a_headwise_press_equal_single_tokens(model: Any) -> None:
    a, b = prompts()
    caches = [PagedCache.for_model(model, lanes="head") for _ in range(2)]
    for cache in caches:
        with bridge(kvpress.AdaKVPress(kvpress.KnormPress(0.75)))(model):
            run(model, a, cache)
    at_once = run(model, b[:, :60], caches[0])
    one_by_one = torch.cat([run(model, token, caches[1]) for token in b[:, :60].split(1, dim=1)], dim=1)
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-5)


def test_two_caches_on_one_model_do_not_disturb_each_other(model: Any) -> None:
    a, b = prompts()
    alone = PagedCache.for_model(model, lanes="head")
    press = bridge(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))
    with press(model):
        run(model, a, alone)
    want = run(model, b[:, :4], alone)
    first, second = (PagedCache.for_model(model, lanes="head") for _ in range(2))
    with press(model):
        run(model, a, first)
        run(model, b[:, :90], second)
    torch.testing.assert_close(run(model, b[:, :4], first), want, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["paged_kv", "kvpress"])
def test_it_does_not_matter_which_package_was_imported_first(
    model: Any, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # kvpress wraps what is registered when it is imported: ours if it was there already.
    ours = attention_patch(paged_attention) if first == "paged_kv" else paged_attention
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "paged_kv", ours)
    a, b = prompts()
    cache, masked = PagedCache.for_model(model, lanes="head"), DynamicCache()
    with bridge(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))(model):
        run(model, a, cache)
    got = [run(model, token, cache) for token in b[:, :3].split(1, dim=1)]
    model.set_attn_implementation("sdpa")
    with plain(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))(model):
        run(model, a, masked)
    for token, one in zip(b[:, :3].split(1, dim=1), got, strict=True):
        torch.testing.assert_close(one, run(model, token, masked), rtol=0, atol=1e-5)


def test_a_headwise_press_on_a_cache_with_one_table_per_layer_says_what_to_do(model: Any) -> None:
    cache = PagedCache.for_model(model)
    with (
        pytest.raises(UnsupportedMethod, match='lanes="head"'),
        bridge(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))(model),
    ):
        run(model, prompts()[0], cache)


def test_a_padded_row_inside_a_headwise_press_keeps_no_padding(model: Any) -> None:
    a, b = prompts()
    ids = torch.cat([b, torch.cat([torch.full((1, 28), 2), a[:, :100]], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :28] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = PagedCache.for_model(model, lanes="head")
    with bridge(kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, window_size=16)))(model), torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        more = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        out = model(
            a[:, :1].expand(2, -1), attention_mask=more, past_key_values=cache, position_ids=more.sum(1)[:, None] - 1
        )
    assert out.logits.isfinite().all()
    for layer in kept_by_us(cache, row=1):
        assert min(min(head) for head in layer) >= 28
    for layer in kept_by_us(cache, row=0):
        assert sum(map(len, layer)) == 4 * 64 + 4
    cache.check()


def test_the_bridge_leaves_the_model_as_it_was_also_after_an_error(model: Any) -> None:
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        assert not hasattr(module, "masked_key_indices")
    cache = PagedCache.for_model(model, num_pages=2)
    with pytest.raises(OutOfPages), bridge(kvpress.KnormPress(0.5))(model):
        run(model, prompts()[0], cache)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    detach(model)
    for module in [model.model, *modules]:
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not hasattr(module, "masked_key_indices")
    assert model.config._attn_implementation == "sdpa"
