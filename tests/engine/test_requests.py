"""What the front takes, refuses and hands back."""

from __future__ import annotations

import itertools

import pytest
from engine_models import alone, prompts

from paged_kv.engine import LLM, InvalidParams, SamplingParams
from paged_kv.engine.intake import EngineClosed, InvalidRequest
from paged_kv.engine.loading import ModelNotFound

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(llama, words):
    with LLM(llama, tokenizer=words, num_pages=2000, page_size=4, optimize=False) as llm:
        yield llm


def test_results_come_in_input_order_one_per_prompt(llm, llama):
    batch = prompts(7)
    lengths = [5, 1, 9, 2, 7, 3, 4]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    results = llm.generate(batch, params, use_tqdm=False)
    assert [list(result.prompt_token_ids) for result in results] == batch
    assert [len(result.token_ids) for result in results] == lengths


def test_a_bad_row_is_a_result_and_the_others_run(llm, llama):
    good = prompts(1)[0]
    batch = [good, [], "", [200], list(range(3, 90)) * 4, {"text": "x"}, [1.5], good]
    results = llm.generate(batch, GREEDY, use_tqdm=False)
    assert [result.finish_reason for result in results] == ["length"] + ["error"] * 6 + ["length"]
    messages = [result.error for result in results]
    assert messages[1] == messages[2] == "the prompt is empty"
    assert "token id 200 is outside the model's vocabulary of 97" in messages[3]
    assert "the prompt has 348 tokens, the model takes at most 255" in messages[4]
    assert "prompt_token_ids" in messages[5]
    assert "got 1.5 in it" in messages[6]
    assert list(results[-1].token_ids) == alone(llama, good, 8, eos_token_id=None)


def test_a_prompt_longer_than_the_pool_is_an_error_that_names_the_pages(llama):
    with LLM(llama, num_pages=16, page_size=4, optimize=False) as llm:
        results = llm.generate([[5] * 40, [5] * 6], GREEDY, use_tqdm=False)
    assert results[0].finish_reason == "error"
    assert "40 tokens need 30 pages and the pool has 15" in results[0].error
    assert results[1].finish_reason == "length"


def test_an_output_that_outgrows_the_pool_ends_with_what_there_is(llama):
    with LLM(llama, num_pages=10, page_size=4, optimize=False) as llm:
        [result] = llm.generate(
            [[5] * 6], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True), use_tqdm=False
        )
        assert llm.engine.stats().pages_used == 0
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 7
    assert list(result.token_ids) == alone(llama, [5] * 6, 7, eos_token_id=None)


def test_positions_end_the_output(llama):
    with LLM(llama, num_pages=2000, page_size=4, max_model_len=20, optimize=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        [result] = llm.generate([[5] * 6], params, use_tqdm=False)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 14


def test_one_prompt_and_no_prompts_are_fine(llm):
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_list_of_parameters_must_fit(llm):
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params is a SamplingParams or a list of them, got"):
        llm.generate(["a"], {"temperature": 0}, use_tqdm=False)


def test_stop_strings_end_the_text_before_them_across_tokens(llm, words):
    [whole] = llm.generate(
        ["hello there"], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    stop = whole.text[10:13]
    first = whole.text.find(stop)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop])
    [cut] = llm.generate(["hello there"], params, use_tqdm=False)
    assert (cut.text, cut.finish_reason, cut.outputs[0].stop_reason) == (whole.text[:first], "stop", stop)
    assert cut.text + stop == words.decode(cut.token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    [kept] = llm.generate(["hello there"], params, use_tqdm=False)
    assert kept.text == whole.text[:first] + stop


def test_stop_tokens_and_eos_end_the_output_and_are_not_in_the_text(llm, llama, words):
    [whole] = llm.generate(
        ["hello there"], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    token = whole.token_ids[6]
    first = list(whole.token_ids).index(token)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    [cut] = llm.generate(["hello there"], params, use_tqdm=False)
    assert (len(cut.token_ids), cut.finish_reason, cut.outputs[0].stop_reason) == (first + 1, "stop", token)
    assert cut.text == words.decode(whole.token_ids[:first])


def test_min_tokens_holds_stop_tokens_back(llm):
    [whole] = llm.generate(
        ["hello there"], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    token = whole.token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=5, ignore_eos=True, stop_token_ids=[token])
    [held] = llm.generate(["hello there"], params, use_tqdm=False)
    assert token not in held.token_ids[:5]


def test_streams_are_read_only_as_far_as_there_is_room(llm):
    read = []

    def source():
        for number in range(20):
            read.append(number)
            yield [5 + number, 6], SamplingParams(temperature=0.0, max_tokens=2 + number % 3, ignore_eos=True)

    most = 0
    seen = {}
    for index, result in llm.stream(source(), max_in_flight=4):
        seen[index] = result
        most = max(most, len(read) - len(seen))
    assert sorted(seen) == list(range(20))
    assert most <= 4
    assert not llm.engine.has_unfinished


def test_leaving_a_stream_early_aborts_the_rest(llm):
    for _ in llm.stream([[5, 6]] * 10, GREEDY):
        break
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().pages_used == 0


def test_chat_goes_through_the_template(llm, words):
    messages = [{"role": "user", "content": "hi"}]
    [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "user:hi;"
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_scores_are_the_models_log_probabilities(llm, llama):
    import torch

    prompt, continuations = prompts(1, seed=8)[0], [[5, 6, 7], [9], list(range(10, 30))]
    scores = llm.score(prompt, continuations)
    for continuation, score in zip(continuations, scores, strict=True):
        ids = torch.tensor([prompt + continuation])
        logprobs = torch.log_softmax(llama(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
        chosen = logprobs[range(len(continuation)), continuation]
        assert torch.tensor(score.token_logprobs) == pytest.approx(chosen.tolist(), abs=1e-4)
        assert score.is_greedy == bool((logprobs.argmax(-1) == ids[0, len(prompt) :]).all())
    best = alone(llama, prompt, 4, eos_token_id=None)
    assert llm.score(prompt, [best])[0].is_greedy
    with pytest.raises(InvalidRequest, match="continuation 0: the continuation is empty"):
        llm.score(prompt, [[]])


def test_partial_results_of_a_streaming_request_grow(llm):
    core = llm.engine
    core.add_request("a", "hello", GREEDY, stream=True)
    texts = []
    while core.has_unfinished:
        texts += [(result.text, result.finished) for result in core.step()]
    assert [finished for _, finished in texts] == [False] * (len(texts) - 1) + [True]
    assert len(texts) > 2
    assert all(later.startswith(earlier) for (earlier, _), (later, _) in itertools.pairwise(texts))


def test_an_id_in_use_and_a_closed_engine_are_refused(llama):
    llm = LLM(llama, num_pages=100, optimize=False)
    llm.engine.add_request("a", [5], GREEDY)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        llm.engine.add_request("a", [5], GREEDY)
    llm.close()
    with pytest.raises(EngineClosed):
        llm.engine.add_request("b", [5], GREEDY)


def test_text_without_a_tokenizer_is_refused(llama):
    with LLM(llama, num_pages=100, optimize=False) as llm:
        [result] = llm.generate(["hello"], GREEDY, use_tqdm=False)
        assert "needs a tokenizer" in result.error
        [result] = llm.generate([[5]], SamplingParams(stop="x"), use_tqdm=False)
        assert "stop strings need a tokenizer" in result.error
        [result] = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert "messages need a tokenizer with a chat template" in result.error


def test_an_unknown_path_or_option_is_named(llama, tmp_path):
    with pytest.raises(ModelNotFound, match="no-such-model"):
        LLM(tmp_path / "no-such-model")
    with pytest.raises(TypeError, match="page_sise"):
        LLM(llama, page_sise=4)
    with pytest.raises(ValueError, match="max_model_len=999 is above the model's 256 positions"):
        LLM(llama, max_model_len=999)
    with pytest.raises(ValueError, match="backend"):
        LLM(llama, backend="none")


def test_a_refused_engine_leaves_the_model_alone(llama):
    before = llama.config._attn_implementation
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(llama, max_num_seqs=0)
    assert llama.config._attn_implementation == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0.0 and inf, got -1"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"top_p": 0}, "top_p must be above 0, got 0"),
        ({"top_p": 1.5}, "top_p must be between 0.0 and 1.0, got 1.5"),
        ({"top_k": -2}, "top_k must be an integer of at least -1, got -2"),
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": True}, "n must be an integer of at least 1, got True"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4 is above max_tokens=3"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n=3, got 2"),
        ({"temperature": 0, "n": 2}, "greedy sampling gives one completion, not 2"),
        ({"beam_width": 2, "n": 3}, "n=3 is above beam_width=2"),
        ({"stop": [""]}, "stop must hold non-empty strings, got ''"),
        ({"logit_bias": {"x": 1}}, "logit_bias must name token ids, got 'x'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"tempreture": 1}, "unknown sampling parameter 'tempreture'; known are allowed_token_ids"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_sampling_values_are_named(values, message):
    with pytest.raises(InvalidParams, match=message):
        SamplingParams.from_mapping(values)


def test_parameters_from_json_keep_the_base_and_read_token_names():
    base = SamplingParams(max_tokens=7)
    params = SamplingParams.from_mapping({"temperature": 0, "logit_bias": {"5": 1.0}, "stop": "x"}, base=base)
    assert (params.max_tokens, params.logit_bias, params.stop, params.greedy) == (7, {5: 1.0}, ("x",), True)


def test_text_parts_of_messages_are_joined_and_other_parts_refused_by_name(llm):
    def ask(content):
        return llm.chat_prompt([{"role": "user", "content": content}])["prompt"]

    assert ask([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]) == "user:one\ntwo;"
    with pytest.raises(InvalidRequest, match="content parts of type 'image_url' are not supported"):
        ask([{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}])
    with pytest.raises(InvalidRequest, match="needs a field text, got None"):
        ask([{"type": "text"}])
    with pytest.raises(InvalidRequest, match="content is text or a list of parts, got int"):
        ask(5)
