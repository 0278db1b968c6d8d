"""Guessed tokens: found in the row's own text, verified, and never seen in the output if they are wrong."""

from __future__ import annotations

import pytest
from engine_models import CONFIGS, alone, prompts, tiny

from paged_kv.engine import LLM, SamplingParams
from paged_kv.engine.draft import Guesser


def test_a_guess_is_what_followed_the_last_time():
    guesser = Guesser(8)
    assert guesser.guess([1, 2, 3, 4, 9, 2, 3, 4], room=8) == [9, 2, 3]
    assert guesser.guess([1, 2, 3, 4, 9, 2, 3, 4], room=2) == [9, 2]
    assert Guesser(8).guess([1, 2, 3, 4, 5], room=8) == []
    assert Guesser(8).guess([7, 7], room=8) == []
    assert Guesser(8).guess([], room=8) == []


def test_the_most_recent_occurrence_of_the_longest_context_counts():
    assert Guesser(1).guess([1, 2, 3, 50, 1, 2, 3, 60, 2, 3, 70, 1, 2, 3], room=1) == [60]
    assert Guesser(1).guess([1, 2, 3, 50, 9, 2, 3, 70, 8, 2, 3], room=1) == [70]


def test_an_index_grown_step_by_step_is_the_whole_one():
    tokens = [1, 2, 3] * 5 + [4, 1, 2, 3, 4]
    grown = Guesser(4)
    for end in range(1, len(tokens)):
        grown.guess(tokens[:end], room=4)
    assert grown.guess(tokens, room=4) == Guesser(4).guess(tokens, room=4)


def test_right_guesses_make_longer_ones_and_wrong_ones_shorter():
    guesser = Guesser(8)
    guesser.learn(3, 3)
    assert guesser.length == 6
    guesser.learn(6, 6)
    assert guesser.length == 8
    guesser.learn(8, 2)
    assert guesser.length == 2
    guesser.learn(2, 0)
    assert guesser.length == 1


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_guesses_change_the_number_of_steps_and_nothing_else(family, rows):
    model = tiny(family)
    batch = [prompt * 2 for prompt in prompts(rows, seed=12, longest=15)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    steps, results = {}, {}
    for number in (0, 7):
        with LLM(model, num_pages=2000, page_size=4, optimize=False, num_draft_tokens=number) as llm:
            results[number] = [list(result.token_ids) for result in llm.generate(batch, params, use_tqdm=False)]
            llm.engine.check()
            assert llm.engine.stats().pages_used == 0
            steps[number] = llm.engine.stats().num_steps
    assert results[7] == results[0] == [alone(model, prompt, 60, eos_token_id=None) for prompt in batch]
    assert steps[7] <= steps[0]


def test_loops_are_guessed_round_and_round():
    guesser = Guesser(8)
    guesser.length = 8
    assert guesser.guess([4, 1, 2, 1, 2, 1, 2], room=5) == [1, 2, 1, 2, 1]
    assert guesser.guess([4, 1, 2, 1, 2, 1, 2, 5, 5, 5], room=8) == [5] * 8


def test_repeated_text_takes_fewer_steps_than_tokens(llama):
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    with LLM(llama, num_pages=2000, page_size=4, optimize=False) as llm:
        [result] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert llm.engine.stats().num_steps < 110
        assert llm.engine.stats().num_output_tokens == 120
    assert list(result.token_ids) == alone(llama, [5, 6, 7], 120, eos_token_id=None)


def test_eos_and_stop_strings_inside_a_guess_end_the_row_there(llama, words):
    for stop in (
        {},
        {"stop_token_ids": [40]},
        {"stop": ["i"], "ignore_eos": True},
        {"max_tokens": 31, "ignore_eos": True},
    ):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 100} | stop))
        results = []
        for number in (0, 7):
            with LLM(
                llama, tokenizer=words, num_pages=2000, page_size=4, optimize=False, num_draft_tokens=number
            ) as llm:
                results += llm.generate([[5, 6, 7]], params, use_tqdm=False)
                assert llm.engine.stats().pages_used == 0
        assert results[0].token_ids == results[1].token_ids
        assert (results[0].text, results[0].finish_reason) == (results[1].text, results[1].finish_reason)


def test_a_tight_pool_drops_guesses_before_it_preempts(llama):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(llama, num_pages=1 + 3 * 11, page_size=4, optimize=False) as llm:
        [result] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert llm.engine.stats().num_preemptions == 0
    assert list(result.token_ids) == alone(llama, [5, 6, 7], 40, eos_token_id=None)
