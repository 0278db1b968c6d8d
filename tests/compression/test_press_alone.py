"""`with press(model): ...` as kvpress is installed: nothing of ours is called but `PagedCache.for_model`."""

from __future__ import annotations

import copy
import importlib.metadata
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from bench.compression.presses import catalog, tokenizer_of
from paged_kv import PagedCache, attached, detach
from paged_kv._compat import CROP_REMOVES
from paged_kv.compression import UnsupportedMethod
from paged_kv.compression.kvpress import bridge
from tests.compression.press_models import kept_by_press, kept_by_us, plain, press_model, prompts, run

kvpress = pytest.importorskip("kvpress")

MASK = "masked_key_indices"
DECODING = {"compression_interval": 3, "target_size": 40, "hidden_states_buffer_size": 8}

GENERATING: list[Any] = [
    pytest.param(lambda: kvpress.KnormPress(0.5), id="key norm"),
    pytest.param(lambda: kvpress.SnapKVPress(0.5, window_size=16), id="snapkv"),
    pytest.param(lambda: kvpress.PyramidKVPress(0.5, window_size=8), id="pyramid"),
    pytest.param(lambda: kvpress.ComposedPress([kvpress.KnormPress(0.3), kvpress.KeyDiffPress(0.3)]), id="composed"),
    pytest.param(lambda: kvpress.AdaKVPress(kvpress.KnormPress(0.5)), id="adakv"),
    pytest.param(lambda: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(0.5, window_size=16)), id="critical adakv"),
    pytest.param(
        lambda: kvpress.DMSPress(kvpress.KnormPress(), threshold=-0.6, sliding_window_size=16, decoding=True), id="dms"
    ),
    pytest.param(lambda: kvpress.DecodingPress(kvpress.KnormPress(), **DECODING), id="decoding"),
    pytest.param(lambda: kvpress.DecodingPress(kvpress.AdaKVPress(kvpress.KnormPress()), **DECODING), id="by head"),
    pytest.param(
        lambda: kvpress.PrefillDecodingPress(
            kvpress.SnapKVPress(0.5, window_size=16), kvpress.DecodingPress(kvpress.KnormPress(), **DECODING)
        ),
        id="both",
    ),
]


def generate(model: Any, ids: Tensor, cache: Any, steps: int = 8) -> tuple[list[int], Tensor]:
    """Greedy tokens and their scores `[steps, vocabulary]`."""
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=2,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.scores)


def by_hand(model: Any, press: Any, ids: Tensor, steps: int = 8) -> tuple[list[int], Tensor]:
    """The same with kvpress's own means: a plain cache, positions said."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    cache, scores, token, at = DynamicCache(), [], ids, 0
    with plain(press)(model):
        for _ in range(steps):
            scores.append(run(model, token, cache, first=at)[:, -1])
            at, token = at + token.shape[1], scores[-1].argmax(dim=-1, keepdim=True)
    for layer in model.model.layers:
        vars(layer.self_attn).pop(MASK, None)
    model.set_attn_implementation(before)
    return [int(score.argmax()) for score in scores], torch.cat(scores)


def is_marked(model: Any) -> bool:
    return any(getattr(layer.self_attn, MASK, None) is not None for layer in model.model.layers)


def hooks_on(model: Any) -> int:
    modules = [model.model, *(layer.self_attn for layer in model.model.layers)]
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


@pytest.mark.parametrize("press", GENERATING)
def test_generate_inside_a_press_goes_as_with_kvpress_alone(model: Any, press: Callable[[], Any]) -> None:
    ids, _ = prompts()
    tokens, scores = by_hand(model, press(), ids)
    cache = PagedCache.for_model(model, lanes="head")
    with press()(model):
        ours = generate(model, ids, cache)
    assert ours[0] == tokens
    torch.testing.assert_close(ours[1], scores, rtol=0, atol=1e-5)
    assert hooks_on(model) == 2, "what for_model put on the decoder"
    assert not is_marked(model)
    cache.check()


@pytest.mark.parametrize("press", [p for p in GENERATING if p.id in ("key norm", "adakv", "decoding")])
def test_each_generate_of_a_block_is_compressed_afresh(model: Any, press: Callable[[], Any]) -> None:
    a, b = prompts()
    want = [by_hand(model, press(), a)[0], by_hand(model, press(), b)[0]]
    first, second = (PagedCache.for_model(model, lanes="head") for _ in range(2))
    with press()(model):
        got = [generate(model, a, first)[0]]
    with press()(model):
        got.append(generate(model, b, second)[0])
    assert got == want
    assert first.layer_lengths() == second.layer_lengths() or first.num_pages() > 0


@pytest.mark.parametrize("cache_first", [True, False], ids=["cache, then press", "press, then cache"])
def test_the_order_of_press_and_cache_does_not_matter(model: Any, cache_first: bool) -> None:
    a, _ = prompts()
    expected = kept_by_press(model, plain(kvpress.AdaKVPress(kvpress.KnormPress(0.5))), a)
    model.set_attn_implementation("sdpa")
    cache = PagedCache.for_model(model, lanes="head") if cache_first else None
    with kvpress.AdaKVPress(kvpress.KnormPress(0.5))(model):
        cache = cache or PagedCache.for_model(model, lanes="head")
        run(model, a, cache)
    assert kept_by_us(cache) == expected


def test_two_caches_and_two_generations_in_one_block(model: Any) -> None:
    a, b = prompts()
    press = kvpress.AdaKVPress(kvpress.KnormPress(0.5))
    want = [by_hand(model, press, ids)[0] for ids in (a, b)]
    caches = [PagedCache.for_model(model, lanes="head") for _ in range(2)]
    with press(model):
        got = [generate(model, ids, cache)[0] for ids, cache in zip((a, b), caches, strict=True)]
        longer = torch.cat([a, torch.tensor([got[0]])], dim=1)
        more = generate(model, longer, caches[0], steps=3)[0]
    assert got == want
    assert more == by_hand(model, press, a, steps=11)[0][8:]
    for cache in caches:
        cache.check()


def test_two_models_do_not_hear_of_each_other(model: Any) -> None:
    a, _ = prompts()
    other = press_model()
    cache, whole = PagedCache.for_model(model), PagedCache.for_model(other)
    with kvpress.KnormPress(0.5)(model):
        run(other, a, whole)
        run(model, a, cache)
    assert whole.layer_lengths() == [128] * 4
    assert cache.layer_lengths() == [64] * 4


def test_presses_one_inside_the_other_both_crop(model: Any) -> None:
    a, b = prompts()
    outer, inner = kvpress.KnormPress(0.5), kvpress.AdaKVPress(kvpress.KeyDiffPress(0.5))
    masked, cache = DynamicCache(), PagedCache.for_model(model, lanes="head")
    with outer(model), inner(model):
        run(model, a, cache)
    got = run(model, b[:, :1], cache)
    model.set_attn_implementation("sdpa")
    with plain(outer)(model), plain(inner)(model):
        run(model, a, masked)
    torch.testing.assert_close(got, run(model, b[:, :1], masked, first=128), rtol=0, atol=1e-5)
    assert [sum(map(len, layer)) for layer in kept_by_us(cache)] == [4 * 32 + 4] * 4


@pytest.mark.skipif(CROP_REMOVES, reason="kvpress alone raises on plain caches of this transformers")
def test_plain_caches_on_the_same_model_are_left_to_kvpress(model: Any) -> None:
    a, b = prompts()
    press = kvpress.AdaKVPress(kvpress.KnormPress(0.5))

    def feed(with_ours: bool) -> tuple[DynamicCache, list[Tensor]]:
        net = press_model()
        cache, ours = DynamicCache(), PagedCache.for_model(net, lanes="head") if with_ours else None
        net.set_attn_implementation("sdpa")
        with press(net):
            run(net, a, cache)
            masks = [layer.self_attn.masked_key_indices for layer in net.model.layers]
            if ours is not None:
                net.set_attn_implementation("paged_kv")
                run(net, b, ours)
                net.set_attn_implementation("sdpa")
                assert sum(map(len, kept_by_us(ours)[0])) == 256
            assert [layer.self_attn.masked_key_indices for layer in net.model.layers] == masks
            out = [run(net, b[:, :1], cache, first=128)]
        return cache, [*out, run(net, b[:, 1:2], cache, first=129)]

    (alone, logits), (beside, others) = feed(False), feed(True)
    assert all(torch.equal(one, other) for one, other in zip(logits, others, strict=True))
    assert all(torch.equal(one.keys, other.keys) for one, other in zip(alone.layers, beside.layers, strict=True))


def test_a_plain_cache_meets_the_error_that_it_meets_without_us(model: Any) -> None:
    if not CROP_REMOVES:
        pytest.skip("kvpress works on plain caches of this transformers")
    PagedCache.for_model(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(KeyError, match="past_key_values"), kvpress.KnormPress(0.5)(model):
        run(model, prompts()[0], DynamicCache())


class _FailsAtLayer(kvpress.KnormPress):  # type: ignore[misc]
    def score(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == 2:
            raise ArithmeticError("midway")
        return super().score(module, *args, **kwargs)


def test_a_press_that_fails_midway_leaves_the_model_to_the_next_one(model: Any) -> None:
    a, _ = prompts()
    cache = PagedCache.for_model(model, lanes="head")
    with pytest.raises(ArithmeticError), _FailsAtLayer(0.5)(model):
        run(model, a, cache)
    assert hooks_on(model) == 2
    assert not is_marked(model)
    cache.reset()
    press = kvpress.AdaKVPress(kvpress.KnormPress(0.5))
    expected = by_hand(model, press, a)[0]
    with press(model):
        assert generate(model, a, cache)[0] == expected
    cache.check()


def test_an_interrupt_midway_is_cleared_up_by_the_next_forward(model: Any) -> None:
    a, _ = prompts()
    cache = PagedCache.for_model(model)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].self_attn.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), kvpress.KnormPress(0.5)(model):
        run(model, a, cache)
    handle.remove()
    cache.reset()
    run(model, a, cache)
    assert cache.layer_lengths() == [128] * 4
    assert hooks_on(model) == 2


def at_exit(name: str, model: Any) -> Any:
    return next(entry for entry in catalog() if entry.name == name).make(model)


@pytest.mark.parametrize("look", ["num_pages", "get_seq_length", "layer_lengths", "deepcopy", "keys", "forward"])
@pytest.mark.parametrize("name", ["FastKVzipPress", "KVzipPress"])
def test_what_a_press_does_at_the_end_of_its_block_is_there_when_the_cache_is_looked_at(
    model: Any, name: str, look: str
) -> None:
    a, b = prompts()
    cache, behind = (PagedCache.for_model(model, lanes="head") for _ in range(2))
    with tokenizer_of(model):
        with bridge(at_exit(name, model))(model):
            run(model, a, behind)
        with at_exit(name, model)(model):
            run(model, a, cache)
    if look == "num_pages":
        assert cache.num_pages() == behind.num_pages()
    elif look == "get_seq_length":
        assert cache.get_seq_length() == 128
    elif look == "layer_lengths":
        assert cache.layer_lengths() == behind.layer_lengths()
    elif look == "keys":
        assert torch.equal(cache.layers[1].keys, behind.layers[1].keys)
    elif look == "deepcopy":
        cache = copy.deepcopy(cache)
    torch.testing.assert_close(
        run(model, b[:, :5], cache, first=128), run(model, b[:, :5], behind, first=128), rtol=0, atol=1e-6
    )
    assert not is_marked(model)
    assert cache.num_pages() == behind.num_pages() < 4 * 4 * 8
    cache.check()


def test_marks_for_a_cache_that_is_gone_or_reset_are_dropped(model: Any) -> None:
    a, _ = prompts()
    for keeps in (True, False):
        cache = PagedCache.for_model(model, lanes="head")
        with at_exit("FastKVzipPress", model)(model):
            run(model, a, cache)
        if keeps:
            cache.reset()
        del cache
        whole = PagedCache.for_model(model, lanes="head")
        run(model, a, whole)
        assert whole.layer_lengths() == [128] * 4
        assert not is_marked(model)


def test_kvcompose_leaves_one_context_and_not_two(model: Any) -> None:
    a, b = prompts()
    cache = PagedCache.for_model(model, lanes="head")
    with kvpress.KVComposePress(True, 0.5)(model):
        run(model, a, cache)
    assert cache.get_seq_length() == 128
    assert sum(cache.layer_lengths()) == 256
    first = run(model, b[:, :1], cache)
    cache.crop(-1)
    torch.testing.assert_close(run(model, b[:, :1], cache, first=128), first, rtol=0, atol=1e-6)


def test_a_press_that_cannot_work_on_pages_is_refused_by_name(model: Any) -> None:
    cache = PagedCache.for_model(model, lanes="head")
    with tokenizer_of(model):
        for press in (kvpress.KVgradPress(0.5), type("Mine", (kvpress.KVgradPress,), {})(0.5)):
            with pytest.raises(UnsupportedMethod, match=f"{type(press).__name__} cannot work with pages"), press(model):
                run(model, prompts()[0], cache)
    assert cache.get_seq_length() == 0


def test_an_untested_release_is_refused_unless_the_bridge_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    cache, a = PagedCache.for_model(model), prompts()[0]
    with pytest.raises(UnsupportedMethod, match=r"kvpress 9\.9 .*untested=True"), kvpress.KnormPress(0.5)(model):
        run(model, a, cache)
    assert cache.get_seq_length() == 0
    run(model, a, cache)
    cache.reset()
    with bridge(kvpress.KnormPress(0.5), untested=True)(model):
        run(model, a, cache)
    assert cache.layer_lengths() == [64] * 4


def test_single_heads_of_one_table_are_refused_also_when_the_block_has_ended(model: Any) -> None:
    cache = PagedCache.for_model(model)
    with (
        pytest.raises(UnsupportedMethod, match='lanes="head"'),
        kvpress.AdaKVPress(kvpress.KnormPress(0.5))(model),
    ):
        run(model, prompts()[0], cache)
    cache.reset()
    with at_exit("FastKVzipPress", model)(model):
        run(model, prompts()[0], cache)
    with pytest.raises(UnsupportedMethod, match='lanes="head"'):
        cache.num_pages()


def test_an_attention_that_is_given_no_hidden_states_by_name_cannot_be_pressed(model: Any) -> None:
    def by_position(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return (kwargs.pop("hidden_states"), *args), kwargs

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(by_position, with_kwargs=True)
    cache = PagedCache.for_model(model)
    with pytest.raises(UnsupportedMethod, match="LlamaAttention is given none"), kvpress.KnormPress(0.5)(model):
        run(model, prompts()[0], cache)


def test_detach_takes_the_hooks_off_and_a_model_has_them_once(model: Any) -> None:
    for _ in range(3):
        PagedCache.for_model(model)
    assert hooks_on(model) == 2
    with bridge(kvpress.KnormPress(0.5))(model):
        pass
    assert hooks_on(model) == 2
    detach(model)
    assert hooks_on(model) == 0
    with bridge(kvpress.KnormPress(0.5))(model):
        assert hooks_on(model) == 6
    assert hooks_on(model) == 0


def test_a_cache_made_of_a_config_is_pressed_while_its_model_is_attached(model: Any) -> None:
    a, _ = prompts()
    expected = kept_by_press(model, plain(kvpress.AdaKVPress(kvpress.KnormPress(0.5))), a)
    cache = PagedCache(config=model.config, lanes="head")
    with attached(model), kvpress.AdaKVPress(kvpress.KnormPress(0.5))(model):
        run(model, a, cache)
    assert kept_by_us(cache) == expected
    assert hooks_on(model) == 0


def test_models_are_copied_and_saved_with_their_hooks(model: Any) -> None:
    a, _ = prompts()
    run(model, a, PagedCache.for_model(model))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        cache = PagedCache.for_model(twin, lanes="head")
        assert hooks_on(twin) == 2
        with kvpress.AdaKVPress(kvpress.KnormPress(0.5))(twin):
            run(twin, a, cache)
        assert sum(map(len, kept_by_us(cache)[0])) == 256
        detach(twin)
        assert hooks_on(twin) == 0
    assert hooks_on(model) == 2
