"""The engine against `model.generate`, prompt by prompt."""

from __future__ import annotations

import pytest
import torch
from engine_models import CONFIGS, alone, prompts, tiny

from paged_kv.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def engine(model, **options):
    return LLM(model, **({"num_pages": 2000, "optimize": False, "page_size": 4} | options))


def tokens(results) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("family", CONFIGS)
def test_each_prompt_gives_what_generate_gives_for_it_alone(family):
    model, batch = tiny(family), prompts(9)
    expected = [alone(model, prompt, 20) for prompt in batch]
    with engine(model) as llm:
        results = llm.generate(batch, GREEDY, use_tqdm=False)
        llm.engine.check()
        assert llm.engine.stats().pages_used == 0
    assert tokens(results) == expected
    for result, output in zip(results, expected, strict=True):
        assert result.finish_reason == ("stop" if output[-1] == 2 else "length")


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("max_num_batched_tokens", [4, 13, 512])
def test_chunk_and_page_sizes_do_not_change_the_tokens(llama, page_size, max_num_batched_tokens):
    batch = prompts(6, seed=1)
    expected = [alone(llama, prompt, 20) for prompt in batch]
    options = {"page_size": page_size, "max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 4}
    with engine(llama, **options) as llm:
        assert tokens(llm.generate(batch, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_preempted_requests_give_the_same_tokens(family):
    model, batch = tiny(family), prompts(8, seed=2)
    expected = [alone(model, prompt, 30) for prompt in batch]
    layers = model.config.num_hidden_layers
    with engine(model, num_pages=1 + layers * 30, enable_prefix_caching=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30)
        assert tokens(llm.generate(batch, params, use_tqdm=False)) == expected
        assert llm.engine.stats().num_preemptions > 0
        assert llm.engine.stats().pages_used == 0


def test_requests_join_and_leave_between_steps(llama):
    first, second, third = prompts(3, seed=3)
    with engine(llama) as llm:
        core = llm.engine
        core.add_request("a", first, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        core.step()
        core.add_request("b", second, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        ended = core.step() + core.step()
        assert [result.request_id for result in ended] == ["a"]
        core.add_request("c", third, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        seen = {}
        while core.has_unfinished:
            seen |= {result.request_id: list(result.token_ids) for result in core.step()}
            core.check()
    assert list(seen) == ["c", "b"]
    assert seen["b"] == alone(llama, second, 9, eos_token_id=None)
    assert seen["c"] == alone(llama, third, 2, eos_token_id=None)


def test_an_abort_frees_the_pages_at_once_and_returns_what_there_is(llama):
    with engine(llama) as llm:
        core = llm.engine
        core.add_request("a", [5] * 10, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
        core.step()
        core.step()
        assert core.stats().pages_used > 0
        result = core.abort("a")
        assert result.finish_reason == "abort"
        assert len(result.token_ids) == 2
        assert core.stats().pages_used == 0
        assert core.abort("a") is None
        assert not core.has_unfinished


def test_the_prefix_of_an_earlier_request_is_not_computed_again(llama):
    prompt = prompts(1, seed=4)[0][:1] * 3 + list(range(10, 40))
    with engine(llama) as llm:
        first = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        second = llm.generate([[*prompt, 50]], GREEDY, use_tqdm=False)[0]
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 32
    assert list(second.token_ids) == alone(llama, [*prompt, 50], 20)


def test_requests_of_one_call_share_their_prefix(llama):
    shared = list(range(10, 50))
    batch = [[*shared, 60 + i, 70 + i] for i in range(6)]
    with engine(llama) as llm:
        results = llm.generate(batch, GREEDY, use_tqdm=False)
    assert [result.num_cached_tokens for result in results] == [0] + [40] * 5
    assert tokens(results) == [alone(llama, prompt, 20) for prompt in batch]


def test_scopes_do_not_share_prefixes(llama):
    prompt = list(range(10, 40))
    with engine(llama) as llm:
        core = llm.engine
        for name, scope in (("a", b"one"), ("b", b"two"), ("c", b"one")):
            core.add_request(name, prompt, GREEDY, scope=scope)
            while core.has_unfinished:
                results = core.step()
            assert results[0].num_cached_tokens == (28 if name == "c" else 0)


def test_an_exception_in_the_model_rolls_the_step_back(llama):
    prompt = prompts(1, seed=5)[0]
    with engine(llama) as llm:
        core = llm.engine
        core.add_request("a", prompt, GREEDY)
        core.step()

        def broken(*args, **kwargs):
            raise RuntimeError("no power")

        hook = llama.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="no power"):
            core.step()
        hook.remove()
        core.check()
        while core.has_unfinished:
            results = core.step()
    assert list(results[0].token_ids) == alone(llama, prompt, 20)


def test_closing_leaves_the_model_as_it_was(llama):
    llama.train()
    before = llama.config._attn_implementation
    with engine(llama, optimize=True) as llm:
        assert llama.config._attn_implementation == "paged_kv_packed"
        assert not llama.training
        llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert llama.config._attn_implementation == before
    assert llama.training
    llama.eval()
    assert torch.is_tensor(llama(torch.tensor([[5, 6]])).logits)
    llm.close()


def test_bf16_runs_and_ends(llama):
    model = tiny("llama").to(torch.bfloat16)
    with engine(model) as llm:
        results = llm.generate(prompts(4), GREEDY, use_tqdm=False)
    assert all(result.finish_reason in ("stop", "length") for result in results)
