"""Going on after a press: `generate` on a compressed cache, padded rows, forks, roll-back, crops while decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from paged_kv import PagedCache
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
