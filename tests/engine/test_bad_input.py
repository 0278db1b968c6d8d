"""What a user may get wrong: each mistake is answered with what is wrong, and leaves a working engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import alone, tiny

from paged_kv import LLM, SamplingParams
from paged_kv.engine import InvalidParams
from paged_kv.engine.intake import InvalidRequest
from paged_kv.engine.loading import ModelNotFound

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def llm(model, words):
    with LLM(model, tokenizer=words, num_pages=400, optimize=False) as llm:
        yield llm
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].token_ids == alone(model, [5, 6, 7], 4)
        assert llm.engine.stats().pages_used == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": "x"}, "page_size must be an integer, got 'x'"),
        ({"page_size": 1.5}, "page_size must be an integer, got 1.5"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"kv_cache_bytes": "2GB"}, "kv_cache_bytes must be an integer, got '2GB'"),
        ({"gpu_memory_utilization": "half"}, "memory_fraction must be a number, got 'half'"),
        ({"max_model_len": "1"}, "max_model_len must be an integer, got '1'"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"backend": 5}, "backend must be a string, got 5"),
        ({"tokenizer": 5}, "tokenizer is a transformers tokenizer or its path, got 5"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_named_and_leave_the_model_alone(model, options, message):
    before = model.config._attn_implementation
    with pytest.raises(TypeError, match=message):
        LLM(model, **({"optimize": False} | options))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("wrong", [None, 5, torch.nn.Linear(2, 2)], ids=lambda value: type(value).__name__)
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match="model is a loaded transformers model, or the path of one, got"):
        LLM(wrong)


def test_an_empty_path_and_a_tokenizer_that_is_not_there_are_named(model, tmp_path):
    with pytest.raises(ModelNotFound, match="the path is empty"):
        LLM("")
    with pytest.raises(ModelNotFound, match="no tokenizer could be loaded from"):
        LLM(model, tokenizer=tmp_path / "none")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": [1.5]}, "stop_token_ids must name token ids, got 1.5"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias must name token ids, got 1.5"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must name token ids, got -1"),
        ({"ignore_eos": "false"}, "ignore_eos must be True or False, got 'false'"),
        ({"detokenize": None}, "detokenize must be True or False, got None"),
        ({"logits_processors": [5]}, "logits_processors must be callable, got 5"),
        ({"extra_args": 5}, "extra_args is a mapping, got 5"),
        ({"beam_width": 2, "stop": "x"}, "beam search takes no stop"),
        ({"beam_width": 2, "logprobs": 1}, "beam search takes no logprobs"),
        ({"beam_width": 2, "top_p": 0.5}, "beam search takes no top_p"),
    ],
    ids=str,
)
def test_parameters_of_the_wrong_kind_or_without_effect_are_named(values, message):
    with pytest.raises(InvalidParams, match=message):
        SamplingParams(**values)


def test_numbers_of_numpys_are_numbers(llm, model):
    params = SamplingParams(temperature=0.0, max_tokens=np.int64(4), seed=np.int64(2**62), ignore_eos=True)
    ids = np.array([5, 6, 7])
    expected = alone(model, [5, 6, 7], 4, eos_token_id=None)
    for prompt in (ids, list(ids), [list(ids)], {"prompt_token_ids": ids}):
        [result] = llm.generate(prompt, params, use_tqdm=False)
        assert list(result.token_ids) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"bytes", "a prompt is text or a list of token ids, got bytes"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "unknown field 'multi_modal_data' of a prompt; known are prompt",
        ),
        ({"prompt_token_ids": [5], "logits_from": "a"}, "logits_from is a position of the prompt's 1 tokens, got 'a'"),
        ({"prompt_token_ids": [5], "logits_from": -3}, "logits_from is a position of the prompt's 1 tokens, got -3"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_a_result_and_stops_no_other(llm, prompt, message):
    bad, good = llm.generate([prompt, "hello"], GREEDY, use_tqdm=False)
    assert message in bad.error
    assert good.error is None


def test_a_bad_priority_or_scope_never_enters_the_queue(llm):
    bad, good = llm.generate(["a", "hello"], GREEDY, use_tqdm=False, priority=["x", 0])
    assert (bad.error, good.error) == ("priority is an integer, got 'x'", None)
    with pytest.raises(InvalidRequest, match="scope is bytes or text, got 5"):
        llm.engine.add_request("a", "x", GREEDY, scope=5)
    with pytest.raises(TypeError, match=r"params is a SamplingParams, got \{'n': 1\}"):
        llm.engine.add_request("a", "x", {"n": 1})
    assert not llm.engine.has_unfinished


def test_tenants_may_be_named_by_text(llm):
    prompt = list(range(3, 60))
    for scope, cached in (("one", 0), (b"one", 48), ("two", 0)):
        llm.engine.add_request("a", prompt, GREEDY, scope=scope)
        while llm.engine.has_unfinished:
            for result in llm.engine.step():
                assert result.num_cached_tokens == cached


@pytest.mark.parametrize("wrong", [None, 5, torch.tensor(5)], ids=str)
def test_what_is_neither_a_prompt_nor_many_is_refused(llm, wrong):
    with pytest.raises(
        TypeError, match=r"prompts is a prompt \(text, token ids, a mapping\) or a list of prompts, got"
    ):
        llm.generate(wrong, GREEDY, use_tqdm=False)


def test_a_stream_of_one_text_and_windows_below_one_are_refused(llm):
    with pytest.raises(TypeError, match="stream takes an iterable of prompts, got one prompt: 'abc'"):
        next(llm.stream("abc", GREEDY))
    for bound in (0, -1, "a"):
        with pytest.raises(ValueError, match=f"max_in_flight must be an integer of at least 1, got {bound!r}"):
            next(llm.stream(["abc"], GREEDY, max_in_flight=bound))


def test_conversations_that_are_none_are_told_from_messages(llm):
    for wrong in ("hello", None):
        with pytest.raises(TypeError, match="chat takes a list of messages"):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    good, bad, worse = llm.chat([[{"role": "user", "content": "hi"}], None, [{"role": "user"}]], GREEDY, use_tqdm=False)
    assert good.error is None
    assert bad.error == "a conversation is a list of messages, got NoneType"
    assert worse.error == "the chat template refused the messages: one of them has no 'content'"


def test_a_source_that_raises_ends_the_stream_with_its_own_error_and_frees_the_pages(llm):
    def source():
        yield "hello"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(llm.stream(source(), GREEDY))
    assert llm.engine.stats().pages_used == 0


def test_a_stop_string_is_found_across_the_borders_of_tokens(llm, words):
    [free] = llm.generate(["hello"], SamplingParams(max_tokens=30, ignore_eos=True, seed=4), use_tqdm=False)
    stop = free.text[5:9]
    [cut] = llm.generate(["hello"], SamplingParams(max_tokens=30, ignore_eos=True, seed=4, stop=stop), use_tqdm=False)
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
