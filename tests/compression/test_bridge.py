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
from paged_kv._compat import CROP_REMOVES
from paged_kv.attention.attach import paged_attention
from paged_kv.compression import UnsupportedMethod
from paged_kv.compression.kvpress import bridge
from tests.compression.press_models import kept_by_press, kept_by_us, plain, press_model, prompts, run

kvpress = pytest.importorskip("kvpress")
from kvpress.attention_patch import attention_patch  # noqa: E402 - after the check that it is there


@pytest.fixture
def model() -> Any:
    return press_model()


def attached(press: Any, behind_bridge: bool) -> Any:
    return bridge(press) if behind_bridge else press


BOTH_WAYS = pytest.mark.parametrize(
    "behind_bridge",
    [
        pytest.param(
            False, id="press alone", marks=pytest.mark.skipif(CROP_REMOVES, reason="kvpress needs the bridge")
        ),
        pytest.param(True, id="bridge"),
    ],
)

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
    for module in [model.model, *modules]:
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not hasattr(module, "masked_key_indices")
    detach(model)
    assert model.config._attn_implementation == "sdpa"


@BOTH_WAYS
@pytest.mark.parametrize(
    ("press", "lengths"),
    [
        pytest.param(lambda: kvpress.KnormPress(0.5), [73] * 4, id="key norm"),
        pytest.param(lambda: kvpress.PyramidKVPress(0.5, window_size=8), [129, 92, 54, 17], id="pyramid"),
    ],
)
def test_generate_resumes_on_a_compressed_cache(
    model: Any, press: Callable[[], Any], lengths: list[int], behind_bridge: bool
) -> None:
    a, b = prompts()
    ids = torch.cat([a, b[:, :7]], dim=1)
    cache, by_hand = PagedCache.for_model(model), PagedCache.for_model(model)
    for each in (cache, by_hand):
        with attached(press(), behind_bridge)(model):
            run(model, a, each)
    fed: list[tuple[int, int]] = []
    watch = model.register_forward_pre_hook(
        lambda m, args, kwargs: fed.append((kwargs["input_ids"].shape[1], int(kwargs["position_ids"][0, 0]))),
        with_kwargs=True,
    )
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=3,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    watch.remove()
    assert fed == [(7, 128), (1, 135), (1, 136)]
    logits = run(model, ids[:, 128:], by_hand, first=128)[:, -1]
    for step, score in enumerate(out.scores):
        torch.testing.assert_close(score, logits, rtol=0, atol=1e-5)
        token = logits.argmax(dim=-1, keepdim=True)
        if step < 2:
            logits = run(model, token, by_hand, first=135 + step)[:, -1]
    assert cache.layer_lengths() == lengths
    assert cache.get_seq_length() == 137


def test_left_padded_rows_equal_each_row_alone(model: Any) -> None:
    a, b = prompts()
    ids = torch.cat([b, torch.cat([torch.full((1, 28), 2), a[:, :100]], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :28] = 0
    both, alone = PagedCache.for_model(model), PagedCache.for_model(model)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=both).logits[:, -1]
        model(a[:, :100], past_key_values=alone)
        for cache in (both, alone):
            for layer in range(4):
                cache.crop_layer(layer, keep_last=64)
        assert both.num_pages() == 2 * 4 * 4
        for step in range(4):
            token = logits.argmax(dim=-1, keepdim=True)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            positions = (mask.cumsum(1) - 1)[:, -1:]
            logits = model(token, attention_mask=mask, position_ids=positions, past_key_values=both).logits[:, -1]
            lone = run(model, token[1:], alone, first=100 + step)[:, -1]
            torch.testing.assert_close(logits[1:], lone, rtol=0, atol=1e-5)


@BOTH_WAYS
def test_forks_of_a_compressed_cache_answer_as_fresh_runs(model: Any, behind_bridge: bool) -> None:
    a, b = prompts()

    def compressed() -> PagedCache:
        cache = PagedCache.for_model(model)
        with attached(kvpress.PyramidKVPress(0.5, window_size=8), behind_bridge)(model):
            run(model, a, cache)
        return cache

    parent = compressed()
    pages = parent.num_pages()
    parent.batch_repeat_interleave(3)
    assert parent.num_pages() == pages, "shared pages are counted once"
    questions = torch.cat([b[:, :9], b[:, 20:29], b[:, 40:49]])
    positions = torch.arange(128, 137).expand(3, -1)
    with torch.no_grad():
        got = model(questions, past_key_values=parent, position_ids=positions).logits
    for row in range(3):
        torch.testing.assert_close(
            got[row : row + 1], run(model, questions[row : row + 1], compressed()), rtol=0, atol=1e-5
        )
    parent.check()


def test_rolled_back_drafts_leave_the_compressed_cache_as_it_was(model: Any) -> None:
    a, b = prompts()
    cache = PagedCache.for_model(model, lanes="head")
    with bridge(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))(model):
        run(model, a, cache)
        lengths, want = cache.layer_lengths(), run(model, b[:, :1], cache)
        cache.crop(-1)
        run(model, b[:, 50:57], cache)
        cache.crop(-7)
        assert cache.layer_lengths() == lengths
        torch.testing.assert_close(run(model, b[:, :1], cache), want, rtol=0, atol=1e-6)


def test_a_composed_press_leaves_what_both_left(model: Any) -> None:
    cache = PagedCache.for_model(model)
    press = kvpress.ComposedPress([kvpress.KnormPress(0.25), kvpress.KeyDiffPress(0.075)])
    expected = kept_by_press(model, plain(press), prompts()[0])
    cache = PagedCache.for_model(model, lanes="head")
    with bridge(press)(model):
        run(model, prompts()[0], cache)
    assert kept_by_us(cache) == expected


def test_keys_turned_to_positions_from_zero_are_turned_on(model: Any) -> None:
    a, b = prompts()
    press = kvpress.KeyRerotationPress(kvpress.KnormPress(0.5))
    restarted, ours = DynamicCache(), PagedCache.for_model(model)
    model.set_attn_implementation("sdpa")
    with plain(press)(model):
        run(model, a, restarted)
    want = run(model, b[:, :1], restarted, first=64)
    model.set_attn_implementation("paged_kv")
    with bridge(press)(model):
        run(model, a, ours)
    torch.testing.assert_close(run(model, b[:, :1], ours, first=128), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("inner", "is_equal"),
    [
        pytest.param(lambda: kvpress.KnormPress(), True, id="key norm"),
        # kvpress may choose a slot again whose key it has overwritten before, and then attends to what it wrote there.
        pytest.param(lambda: kvpress.SnapKVPress(window_size=2), False, id="snapkv"),
    ],
)
def test_heads_cropped_again_while_decoding_do_not_grow(model: Any, inner: Callable[[], Any], is_equal: bool) -> None:
    a, b = prompts()

    def feed(cache: Any) -> list[torch.Tensor]:
        press = kvpress.DecodingPress(
            kvpress.AdaKVPress(inner()), compression_interval=5, target_size=40, hidden_states_buffer_size=8
        )
        with bridge(press)(model):
            run(model, a, cache)
            return [run(model, token, cache) for token in b[:, :17].split(1, dim=1)]

    want = feed(DynamicCache())
    cache = PagedCache.for_model(model, lanes="head")
    for one, other in zip(feed(cache), want, strict=True):
        assert one.isfinite().all()
        if is_equal:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for layer in range(4):
        live = int((cache.live_columns(layer) >= 0).sum())
        assert live <= 4 * 40 + 4 * 2, "cropped at the fifth, tenth and fifteenth token, two more since"
    cache.check()


def test_dms_forgets_by_threshold_in_the_prompt_and_while_decoding(model: Any) -> None:
    a, b = prompts()

    def press() -> Any:
        return kvpress.DMSPress(kvpress.KnormPress(), threshold=-1.0, sliding_window_size=16, decoding=True)

    masked, ours = DynamicCache(), PagedCache.for_model(model, lanes="head")
    probe = DynamicCache()
    run(model, a, probe)
    threshold = -float(probe.layers[0].keys.norm(dim=-1).median())

    def feed(cache: Any, attached_press: Any) -> list[torch.Tensor]:
        attached_press.press.threshold = threshold
        with attached_press(model):
            run(model, a, cache)
            return [run(model, token, cache) for token in b[:, :20].split(1, dim=1)]

    got = feed(ours, bridge(press()))
    model.set_attn_implementation("sdpa")
    want = feed(masked, bridge(press()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert ours.num_pages() < 4 * 4 * 10
    ours.check()
