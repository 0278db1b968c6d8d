"""What comes after a press: several questions on one context, learnt tokens, heads that are cropped again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from bench.compression.presses import RESTORED, catalog, tokenizer_of
from paged_kv import PagedCache
from tests.compression.press_models import kept_by_us, plain, prompts, run

kvpress = pytest.importorskip("kvpress")

ANSWERED: list[Any] = [
    pytest.param(lambda: kvpress.KnormPress(0.5), id="key norm"),
    pytest.param(lambda: kvpress.PyramidKVPress(0.5, window_size=8), id="pyramid"),
    pytest.param(lambda: kvpress.AdaKVPress(kvpress.KnormPress(0.5)), id="adakv"),
    pytest.param(lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.75, window_size=16)), id="adakv, a quarter"),
]


@pytest.mark.parametrize("press", ANSWERED)
def test_several_questions_on_one_context_as_the_pipeline_asks_them(model: Any, press: Callable[[], Any]) -> None:
    a, b = prompts()
    questions = [b[:, :9], b[:, 20:43], b[:, 50:53]]

    def compressed() -> PagedCache:
        cache = PagedCache.for_model(model, lanes="head")
        with press()(model):
            run(model, a, cache)
        return cache

    cache = compressed()
    lengths, kept = [cache.get_seq_length(layer) for layer in range(4)], kept_by_us(cache)
    for question in questions:
        want = run(model, question, compressed(), first=128)
        torch.testing.assert_close(run(model, question, cache, first=128), want, rtol=0, atol=1e-5)
        for layer, length in enumerate(lengths):
            cache.layers[layer].keys = cache.layers[layer].keys[:, :, :length]
            cache.layers[layer].values = cache.layers[layer].values[:, :, :length]
        assert kept_by_us(cache) == kept
    cache.check()


@pytest.mark.parametrize("press", [ANSWERED[0], ANSWERED[2]])
def test_kvpress_s_own_pipeline_answers_every_question_as_if_it_were_the_only_one(
    model: Any, press: Callable[[], Any]
) -> None:
    with tokenizer_of(model):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
        tokenizer.bos_token = "."
        pipeline = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        context = "A context of some length, in which every letter is a token of its own. " * 3
        questions = ["Which?", "And what of the second one?", "Why"]

        def ask(some: list[str]) -> list[str]:
            cache = PagedCache.for_model(model, lanes="head")
            return pipeline(context, questions=some, press=press(), cache=cache, max_new_tokens=12)["answers"]

        assert ask(questions) == [ask([question])[0] for question in questions]


def test_padded_rows_lose_their_newest_tokens_alike_when_their_end_is_assigned_away(model: Any) -> None:
    a, b = prompts()
    ids = torch.cat([b, torch.cat([torch.full((1, 28), 2), a[:, :100]], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :28] = 0
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=cache)
        for layer in range(4):
            cache.crop_layer(layer, list(range(10, 20)), row=0)
            cache.crop_layer(layer, list(range(30, 35)), row=1)
        before = [kept_by_us(cache, row) for row in range(2)]
        mask = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], dim=1)
        positions = (mask.cumsum(1) - 1)[:, -6:]
        model(a[:, :6].expand(2, -1), attention_mask=mask, position_ids=positions, past_key_values=cache)
    for layer in range(4):
        cache.layers[layer].keys = cache.layers[layer].keys[:, :, :10]
        cache.layers[layer].values = cache.layers[layer].values[:, :, :10]
    assert [kept_by_us(cache, row) for row in range(2)] == before
    cache.check()


def test_restored_tokens_stay_and_single_heads_give_way_to_them(model: Any) -> None:
    a, b = prompts()
    entry = next(entry for entry in catalog() if entry.name == "RestoreKVPress")
    cache, masked = PagedCache.for_model(model, lanes="head"), DynamicCache()
    with tokenizer_of(model):
        with entry.make(model)(model):
            run(model, a, cache)
        assert cache.get_seq_length() == 128 + RESTORED
        got = [run(model, token, cache) for token in b[:, :3].split(1, dim=1)]
        model.set_attn_implementation("sdpa")
        with plain(entry.make(model))(model):
            run(model, a, masked)
    kept = kept_by_us(cache)
    assert all(set(range(128, 131 + RESTORED)) <= set(head) for layer in kept for head in layer)
    # The budget is met with the restored tokens in it.
    assert sum(len(head) for layer in kept for head in layer) - 3 * 16 == 16 * 128 - int(16 * 128 * 0.5)
    for step, (token, logits) in enumerate(zip(b[:, :3].split(1, dim=1), got, strict=True)):
        want = run(model, token, masked, first=128 + RESTORED + step)
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)


class _Forgetful(kvpress.AdaKVPress):  # type: ignore[misc]
    """AdaKV under which pairs that were masked once stay masked."""

    stays_masked = True
    taken_back = 0

    def compress(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        before = module.masked_key_indices
        result = super().compress(module, *args, **kwargs)
        if before is not None:
            gone, now = (set(zip(*(part.tolist() for part in m), strict=True)) for m in (before, _masked(module)))
            self.taken_back += len(gone - now)
            if self.stays_masked:
                module.masked_key_indices = tuple(torch.tensor(sorted(gone | now)).T)
        return result


def _masked(module: Any) -> Any:
    return module.masked_key_indices


def test_heads_cropped_again_while_decoding_are_as_with_kvpress_but_for_slots_that_it_takes_back(model: Any) -> None:
    """kvpress masks pairs anew at every crop, and may take slots back whose keys it has overwritten in between."""
    a, b = prompts()

    def feed(cache: Any, inner: Any) -> list[Tensor]:
        press = kvpress.DecodingPress(inner, compression_interval=5, target_size=40, hidden_states_buffer_size=8)
        is_paged = isinstance(cache, PagedCache)
        model.set_attn_implementation("paged_kv" if is_paged else "sdpa")
        with (press if is_paged else plain(press))(model):
            run(model, a, cache)
            return [run(model, token, cache, first=128 + at) for at, token in enumerate(b[:, :17].split(1, dim=1))]

    def snap() -> Any:
        return kvpress.SnapKVPress(window_size=2)

    ours = feed(PagedCache.for_model(model, lanes="head"), kvpress.AdaKVPress(snap()))
    forgetful, as_it_is = _Forgetful(snap()), _Forgetful(snap())
    as_it_is.stays_masked = False
    want, other = feed(DynamicCache(), forgetful), feed(DynamicCache(), as_it_is)
    for one, exact in zip(ours, want, strict=True):
        torch.testing.assert_close(one, exact, rtol=0, atol=1e-5)
    assert as_it_is.taken_back > 0
    assert max(float((one - loose).abs().max()) for one, loose in zip(want, other, strict=True)) > 1e-4
