"""Mistakes get a clear error that names the value, and the cache goes on working."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from allocator import KVError, OutOfPages, StaleHandle
from paged_kv import PagedCache
from paged_kv._compat import CROP_REMOVES
from paged_kv.compression import KeyNorm, StreamingLLM
from tests.tiny import padded, tiny_model, tokens


class _Gives:
    """A policy that gives the same keep-lists whatever it is asked."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def keep(self, live: Any, budget: int) -> Any:
        return self.kept


@pytest.fixture
def held() -> tuple[Any, PagedCache]:
    """A model and a cache that holds 20 tokens."""
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    return model, cache


CROPS: list[Any] = [
    pytest.param(lambda c: c.crop_layer(9, keep=[0]), "layer 9", id="layer out of range"),
    pytest.param(lambda c: c.crop_layer(-1, keep=[0]), "layer -1", id="negative layer"),
    pytest.param(lambda c: c.crop_layer(0, keep=[3, 2]), "3 before 2", id="out of order"),
    pytest.param(lambda c: c.crop_layer(0, keep=[2, 2]), "2 before 2", id="twice"),
    pytest.param(lambda c: c.crop_layer(0, keep=[0, 20]), "20 is outside the 20", id="past the end"),
    pytest.param(lambda c: c.crop_layer(0, keep=[-1, 3]), "-1 is outside", id="negative index"),
    pytest.param(lambda c: c.crop_layer(0, keep=np.array([0.5, 1.0])), "integers", id="not integers"),
    pytest.param(lambda c: c.crop_layer(0), "exactly one", id="nothing said"),
    pytest.param(lambda c: c.crop_layer(0, keep=[0], keep_last=2), "exactly one", id="both said"),
    pytest.param(lambda c: c.crop_layer(0, keep_last=-2), "-2", id="negative keep_last"),
    pytest.param(lambda c: c.crop_layer(0, keep=[0], row=1), "row 1", id="row out of range"),
    pytest.param(lambda c: c.crop_layer(0, keep=[[0], [1]]), "2 lists for 1 rows", id="more lists than rows"),
    pytest.param(lambda c: c.crop_heads(0, [[0], [1], [2], [3]]), 'lanes="head"', id="heads without lanes"),
    pytest.param(lambda c: c.crop_layers({0: 8}, _Gives(())), "_Gives gave 0 keep-lists for the 1 ", id="no keep-list"),
    pytest.param(
        lambda c: c.crop_layers({0: 8}, _Gives([range(8)] * 4)), "4 keep-lists for the 1 page tables", id="four for one"
    ),
    pytest.param(lambda c: c.crop_layers({0: 8}, _Gives([[3, 2]])), "increasing", id="a policy's list out of order"),
    pytest.param(lambda c: c.crop_layers({0: 8}, _Gives([[999]])), "999", id="a policy's list out of range"),
    pytest.param(lambda c: c.crop_layers({0: -1}, KeyNorm()), "-1", id="negative budget"),
    pytest.param(lambda c: c.crop_layers({0: 0.5}, KeyNorm()), "0.5", id="a ratio for a budget"),
    pytest.param(lambda c: c.crop_layers({0: 8}, StreamingLLM(rerotate=True)), "rerotate", id="keys that turn"),
    pytest.param(lambda c: c.crop_layers(None, KeyNorm()), "map layers", id="no budgets"),
    pytest.param(
        lambda c: c.crop_layers({0: 8}, "streaming"),
        "method `keep`, str has none, got 'streaming'",
        id="a policy by name",
    ),
    pytest.param(lambda c: c.crop_layers({7: 3}, KeyNorm()), "layer 7", id="budget of an unknown layer"),
    pytest.param(lambda c: c.crop_layers({0: 3, 7: 3}, KeyNorm()), "layer 7", id="one good, one unknown layer"),
]


@pytest.mark.parametrize(("call", "message"), CROPS)
def test_a_wrong_crop_names_what_is_wrong_and_changes_nothing(
    held: tuple[Any, PagedCache], call: Callable[[PagedCache], Any], message: str
) -> None:
    model, cache = held
    with pytest.raises(KVError, match=message):
        call(cache)
    assert cache.layer_lengths() == [20] * 4
    cache.check()
    with torch.no_grad():
        model(tokens(1, 1), past_key_values=cache)
    assert cache.layer_lengths() == [21] * 4


class _GoodForTheFirst(_Gives):
    """A policy whose second answer is out of range."""

    def keep(self, live: Any, budget: int) -> Any:
        answer, self.kept = self.kept, [[99]] * live.num_lanes
        return answer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda c: c.crop_heads(0, [[0], [1], [2]]), "keep names 3 heads, layer 0 has 4 lanes", id="few"),
        pytest.param(lambda c: c.crop_heads(0, [[0]] * 5), "keep names 5 heads, layer 0 has 4 lanes", id="many"),
        pytest.param(lambda c: c.crop_heads(0, [[0], [1], [2], [20]]), "20 is outside the 20", id="one out of range"),
        pytest.param(lambda c: c.crop_heads(0, [[0], [4, 1], [2], [3]]), "4 before 1", id="one out of order"),
        pytest.param(
            lambda c: c.crop_heads(0, [[0], [[1], [2], [3]], [2], [3]]), "3 lists for 2 rows", id="too many rows"
        ),
        pytest.param(lambda c: c.crop_layers({0: 8}, _Gives([[0]] * 3)), "3 keep-lists for the 4 page", id="policy"),
        pytest.param(
            lambda c: c.crop_layers({0: 8}, _GoodForTheFirst([[0, 1]] * 4)), "99 is outside .*row 1", id="second row"
        ),
    ],
)
def test_a_wrong_crop_of_heads_names_what_is_wrong_and_changes_nothing(
    call: Callable[[PagedCache], Any], message: str
) -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4, lanes="head")
    with torch.no_grad():
        model(tokens(2, 20), past_key_values=cache)
    with pytest.raises(KVError, match=message):
        call(cache)
    assert [cache.layer_lengths(row) for row in range(2)] == [[20] * 4] * 2
    cache.check()


def test_running_out_of_pages_says_how_many_and_writes_nothing() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4, num_pages=1 + 4 * 5)
    with torch.no_grad():
        before = model(tokens(1, 20), past_key_values=cache).logits
        keys = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(OutOfPages) as caught:
            model(tokens(1, 1), past_key_values=cache)
        assert (caught.value.needed, caught.value.available, caught.value.total) == (4, 0, 20)
        assert cache.layer_lengths() == [20] * 4
        assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, keys, strict=True))
        cache.check()
        cache.crop_layers(dict.fromkeys(range(4), 8), StreamingLLM())
        model(tokens(1, 1), past_key_values=cache)
        assert cache.layer_lengths() == [9] * 4
        cache.reset()
        again = model(tokens(1, 20), past_key_values=cache).logits
    torch.testing.assert_close(again, before, rtol=0, atol=1e-6)


def test_a_first_forward_that_does_not_fit_leaves_the_cache_empty() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model, page_size=4, num_pages=9)
    with torch.no_grad():
        with pytest.raises(OutOfPages):
            model(tokens(1, 20), past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert cache.num_pages() == 0
        model(tokens(1, 8), past_key_values=cache)
    assert cache.layer_lengths() == [8] * 4


def test_another_batch_size_is_refused_and_the_rows_stay(held: tuple[Any, PagedCache]) -> None:
    model, cache = held
    with torch.no_grad():
        with pytest.raises(KVError, match="holds 1 rows and was given 2"):
            model(tokens(2, 1), past_key_values=cache)
        assert cache.layer_lengths() == [20] * 4
        model(tokens(1, 1), past_key_values=cache)
    cache.check()


def test_a_crop_of_a_closed_sequence_is_an_error(held: tuple[Any, PagedCache]) -> None:
    _, cache = held
    memory = cache.memory
    seq, _ = memory.open()
    memory.append([seq], [4])
    memory.close(seq)
    with pytest.raises(StaleHandle):
        memory.crop(seq, {0: [0]})
    cache.reset()
    with pytest.raises(KVError, match="no tokens"):
        cache.crop_layer(0, keep=[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"page_size": 0}, "page_size"),
        ({"lanes": "rows"}, "lanes"),
        ({"num_pages": 1}, "num_pages"),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"num_pages": 9, "memory_fraction": 0.5}, "at most one"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCache.for_model(tiny_model("llama"), **arguments)


def test_unknown_arguments_and_offloading_are_refused() -> None:
    with pytest.raises(TypeError, match="max_pages"):
        PagedCache(max_pages=3)
    with pytest.raises(ValueError, match="offloading"):
        PagedCache(offloading=True)


def test_another_model_is_refused_by_the_shape_of_its_keys(held: tuple[Any, PagedCache]) -> None:
    _, cache = held
    other = tiny_model("llama", num_key_value_heads=2)
    other.set_attn_implementation("paged_kv")
    with torch.no_grad(), pytest.raises(ValueError, match="one cache per model"):
        other(tokens(1, 1), past_key_values=cache)
    assert (cache.get_seq_length(), cache.layer_lengths()) == (20, [20] * 4)


def test_a_padded_batch_grows_its_pool_on_demand_within_its_budget() -> None:
    model = tiny_model("llama")
    cache = PagedCache.for_model(model)
    with torch.no_grad():
        model(**padded(4, 300, [0, 100, 200, 299]), past_key_values=cache)
    assert [cache.layer_lengths(row)[0] for row in range(4)] == [300, 200, 100, 1]
    cache.check()


def test_importing_adds_our_attentions_and_changes_nothing_else() -> None:
    program = """
import threading
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
before = [dict(table._global_mapping) for table in (attentions, masks)]
local = [dict(table._local_mapping) for table in (attentions, masks)]
threads = threading.active_count()
import paged_kv
after = [dict(table._global_mapping) for table in (attentions, masks)]
assert local == [dict(table._local_mapping) for table in (attentions, masks)]
assert set(after[0]) - set(before[0]) == {"paged_kv", "paged_kv_packed"}, set(after[0]) - set(before[0])
assert set(after[1]) - set(before[1]) == {"paged_kv"}
assert all(after[i][name] is function for i in (0, 1) for name, function in before[i].items())
assert threading.active_count() == threads
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_what_is_no_model_and_a_config_in_the_wrong_place_are_named() -> None:
    with pytest.raises(TypeError, match="got 'gpt2'"):
        PagedCache.for_model("gpt2")
    with pytest.raises(TypeError, match=r"config=model\.config"):
        PagedCache(tiny_model("llama").config)
    with pytest.raises(ValueError, match="backend must be one of auto"):
        PagedCache.for_model(tiny_model("llama"), backend="x")


def test_generating_without_a_cache_through_a_cache_is_refused() -> None:
    model = tiny_model("llama")
    inputs = padded(1, 8, [0])
    for cache in (PagedCache(config=model.config), PagedCache.for_model(model)):
        with pytest.raises(KVError, match="use_cache=True"):
            model.generate(**inputs, past_key_values=cache, use_cache=False, max_new_tokens=4)
        assert cache.get_seq_length() == 8
        cache.check()
    model.generation_config.use_cache = False
    with pytest.raises(ValueError, match=r"generation_config\.use_cache = True"):
        PagedCache.for_model(model)


def test_generate_with_another_batch_or_no_new_text_says_so_and_the_cache_stays(held: tuple[Any, PagedCache]) -> None:
    model, cache = held
    if CROP_REMOVES:  # the older release's `generate` itself fails on an input that is cut to nothing
        with pytest.raises(KVError, match="reset"):
            model.generate(**padded(2, 5, [0, 0]), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(KVError, match="holds 1 rows and was given 2"):
        model.generate(**padded(2, 24, [0, 0]), past_key_values=cache, max_new_tokens=2)
    assert cache.layer_lengths() == [20] * 4
    model.generate(**padded(1, 24, [0]), past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.check()


def test_another_device_is_refused_and_the_cache_is_as_before(held: tuple[Any, PagedCache]) -> None:
    _, cache = held
    away = torch.zeros(1, 4, 1, 16, device="meta")
    with pytest.raises(ValueError, match="on meta"):
        cache.update(away, away, 0)
    assert (cache.get_seq_length(), cache.layer_lengths()) == (20, [20] * 4)
    cache.check()


def test_a_layer_that_reads_anothers_keys_cannot_be_cropped() -> None:
    model = tiny_model("gemma3n")
    cache = PagedCache.for_model(model, page_size=4)
    with torch.no_grad():
        model(tokens(1, 10), past_key_values=cache)
    with pytest.raises(KVError, match="keys and values of another layer"):
        cache.crop_layer(5, keep_last=2)
    cache.check()
