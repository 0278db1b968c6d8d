"""Code written for vLLM's offline API: the same names mean the same things."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from engine_models import alone, prompts, tiny

import paged_kv
from paged_kv import LLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from paged_kv.engine import InvalidParams
from paged_kv.engine.request import Logprob

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def llm(model, words):
    with LLM(model, tokenizer=words, num_pages=2000, block_size=4, optimize=False) as llm:
        yield llm


def test_a_script_for_vllm_runs_after_changing_its_import(llm, words):
    params = SamplingParams(n=1, temperature=0.0, top_p=0.95, max_tokens=5, seed=1, ignore_eos=True)
    outputs = llm.generate(prompts=["hello", "you there"], sampling_params=params)
    for output, prompt in zip(outputs, ["hello", "you there"], strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].text == words.decode(output.outputs[0].token_ids)
        assert output.finished
        assert output.outputs[0].finished()
        assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time
    assert llm.get_tokenizer() is words
    [chatted] = llm.chat([{"role": "user", "content": "hi"}], sampling_params=GREEDY, use_tqdm=False)
    assert chatted.prompt == "user:hi;"


def test_prompts_are_taken_as_typed_mappings(llm):
    as_text, as_ids = llm.generate(
        [TextPrompt(prompt="hello"), TokensPrompt(prompt_token_ids=llm.get_tokenizer()("hello")["input_ids"])],
        GREEDY,
        use_tqdm=False,
    )
    assert as_text.outputs[0].token_ids == as_ids.outputs[0].token_ids


def test_log_probabilities_have_rank_and_text_and_are_numbers(llm, model, words):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    [result] = llm.generate(["abc"], params, use_tqdm=False)
    ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    expected = torch.log_softmax(model(ids).logits[0].double(), -1)
    for position, (token, top) in enumerate(zip(result.token_ids, result.outputs[0].logprobs, strict=True)):
        line = expected[len(result.prompt_token_ids) - 1 + position]
        assert [entry.rank for entry in top.values()] == [1, 2]
        assert top[token].logprob == pytest.approx(float(line[token].detach()), abs=1e-4)
        assert top[token].decoded_token == words.decode([token])
        assert math.exp(top[token]) <= 1
    for position in (1, 2):
        [(token, entry)] = result.prompt_logprobs[position].items()
        line = expected[position - 1]
        assert token == result.prompt_token_ids[position]
        assert entry.rank == int((line > line[token]).sum()) + 1
    copy = pickle.loads(pickle.dumps(top[token := next(iter(top))]))
    assert (copy, copy.rank, copy.decoded_token) == (top[token], 1, words.decode([token]))
    assert json.loads(json.dumps({"x": Logprob(-0.5, 1)})) == {"x": -0.5}


def test_minus_one_asks_for_the_whole_vocabulary(llm):
    [result] = llm.generate(["abc"], SamplingParams(max_tokens=1, logprobs=-1), use_tqdm=False)
    [top] = result.outputs[0].logprobs
    assert len(top) == 97
    assert sum(math.exp(entry) for entry in top.values()) == pytest.approx(1.0, abs=1e-4)
    assert [entry.rank for entry in top.values()] == list(range(1, 98))


def test_only_allowed_tokens_are_drawn(llm):
    allowed = [10, 40, 77]
    params = SamplingParams(max_tokens=40, allowed_token_ids=allowed, seed=3)
    [result] = llm.generate(["abc"], params, use_tqdm=False)
    assert set(result.token_ids) == set(allowed)
    [refused] = llm.generate(["abc"], SamplingParams(allowed_token_ids=[500]), use_tqdm=False)
    assert "token id 500 is outside the model's vocabulary of 97" in refused.error


def test_a_truncated_prompt_is_its_newest_tokens(llm, model):
    [prompt] = prompts(1, seed=9, longest=40)
    prompt = (prompt * 10)[:30]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, truncate_prompt_tokens=7)
    [result] = llm.generate([prompt], params, use_tqdm=False)
    assert list(result.prompt_token_ids) == prompt[-7:]
    assert list(result.token_ids) == alone(model, prompt[-7:], 6, eos_token_id=None)
    fits = SamplingParams(temperature=0.0, max_tokens=1, truncate_prompt_tokens=-1)
    [long] = llm.generate([prompt * 20], fits, use_tqdm=False)
    assert (long.error, len(long.prompt_token_ids)) == (None, 255)


def test_results_without_text_have_their_tokens(llm):
    [result] = llm.generate(["abc"], SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True), use_tqdm=False)
    assert (result.text, len(result.token_ids)) == ("", 4)


def test_without_parameters_the_models_generation_config_is_asked(words):
    model = tiny("llama")
    with LLM(model, tokenizer=words, num_pages=200, optimize=False) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        model.generation_config.update(do_sample=True, temperature=0.3, top_k=1, max_new_tokens=9)
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.top_k, default.max_tokens) == (0.3, 1, 9)
        [result] = llm.generate([[5, 6, 7]], use_tqdm=False)
    # With top_k=1 a draw is the likeliest token.
    assert list(result.token_ids) == alone(tiny("llama"), [5, 6, 7], 9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1, got 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids must name token ids, got 'x'"),
        ({"stop": "a", "detokenize": False}, "detokenize=False leaves none"),
        ({"logprobs": -2}, "logprobs must be an integer of at least -1, got -2"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_named(values, message):
    with pytest.raises(InvalidParams, match=message):
        SamplingParams(**values)


def test_parameters_have_the_fields_of_vllms():
    fields = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids bad_words ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output truncate_prompt_tokens logit_bias allowed_token_ids
    extra_args structured_outputs"""
    assert set(fields.split()) <= set(SamplingParams.__dataclass_fields__)
    for name in ("LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "TextPrompt", "TokensPrompt"):
        assert name in paged_kv.__all__


@pytest.mark.parametrize("length_penalty", [1.0, 0.0])
def test_beam_search_finds_the_sequences_of_generate(llm, model, words, length_penalty):
    batch = prompts(4, seed=11)
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=length_penalty)
    outputs = llm.beam_search([TokensPrompt(prompt_token_ids=prompt) for prompt in batch], params, concurrency_limit=2)
    for prompt, output in zip(batch, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=length_penalty,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for beam, theirs, score in zip(output.sequences, expected.sequences, expected.sequences_scores, strict=True):
            length = len(beam.tokens) - len(prompt)
            assert beam.tokens == theirs[: len(beam.tokens)].tolist()
            assert set(theirs[len(beam.tokens) :].tolist()) <= {0}
            assert beam.cum_logprob / length**length_penalty == pytest.approx(float(score), abs=1e-4)
            ended = beam.tokens[-1] == 2
            assert beam.finish_reason == ("stop" if ended else "length")
            assert beam.text == words.decode(beam.tokens[:-1] if ended else beam.tokens, skip_special_tokens=False)


def test_a_beam_search_that_cannot_run_says_why_and_stops_no_other(llm):
    params = BeamSearchParams(2, 4, ignore_eos=True)
    good, bad = llm.beam_search(["hello", TokensPrompt(prompt_token_ids=[500])], params)
    assert [len(beam.tokens) for beam in good.sequences] == [9, 9]
    assert (bad.sequences, bad.error) == ([], "token id 500 is outside the model's vocabulary of 97")
    with pytest.raises(InvalidParams, match="beam_width must be an integer of at least 1, got 0"):
        BeamSearchParams(0, 4)
    with pytest.raises(
        TypeError, match=r"takes BeamSearchParams\(beam_width, max_tokens, \.\.\.\), got SamplingParams"
    ):
        llm.beam_search(["hello"], GREEDY)


def test_a_progress_bar_of_ones_own_is_used(llm):
    made = []

    class Bar:
        def __init__(self, **options):
            made.append(options)
            self.number = 0

        def __enter__(self):
            made.append(self)
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            self.number += 1

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert (made[0]["total"], made[1].number) == (2, 2)


def test_a_conversation_that_cannot_be_run_stops_no_other(llm):
    good = [{"role": "user", "content": "hi"}]
    bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    first, second, third = llm.chat([good, bad, good], GREEDY, use_tqdm=False, chat_template_content_format="string")
    assert first.text == third.text
    assert (second.finish_reason, second.error) == (
        "error",
        "content parts of type 'image_url' are not supported: this engine takes text",
    )
    with pytest.raises(TypeError, match="chat takes no lora_request"):
        llm.chat(good, GREEDY, lora_request=object())
    assert llm.chat([good], GREEDY, use_tqdm=False, lora_request=None)[0].error is None


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("encode", "it pools nothing"),
        ("llm_engine", r"it is LLM\.engine"),
        ("sleep", r"LLM\.close"),
        ("nonsense", "'nonsense'"),
    ],
)
def test_methods_of_vllm_that_are_not_here_say_so(llm, name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None


def test_without_its_tokenizer_a_model_takes_token_ids(model, words, tmp_path):
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True, num_pages=100, optimize=False, hf_overrides={}) as llm:
        assert llm.get_tokenizer() is None
        [result] = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert (result.text, len(result.token_ids)) == ("", 6)
