"""Results while a request runs: everything so far, what is new, or nothing before the end."""

from __future__ import annotations

import itertools

import pytest
from engine_models import prompts, tiny

from paged_kv import LLM, RequestOutputKind, SamplingParams
from paged_kv.engine import InvalidParams
from paged_kv.engine.detokenize import Detokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture
def llm(model, words):
    with LLM(model, tokenizer=words, num_pages=2000, page_size=4, optimize=False) as llm:
        yield llm


def results_of(llm, params, prompt="hello you there", **options):
    llm.engine.add_request("a", prompt, params, **options)
    results = []
    while llm.engine.has_unfinished:
        results += llm.engine.step()
    assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
    return results


def params_of(kind, **values):
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True, "seed": 1} | values), output_kind=kind)


@pytest.mark.parametrize("values", [{}, {"n": 3}, {"temperature": 0.0}, {"stop": ["9", "k"]}, {"logprobs": 1}], ids=str)
def test_deltas_joined_are_the_whole_result(llm, values):
    [whole] = results_of(llm, params_of(FINAL_ONLY, **values))
    pieces = results_of(llm, params_of(DELTA, **values))
    assert len(pieces) > 2
    for output in whole.outputs:
        mine = [piece for result in pieces for piece in result.outputs if piece.index == output.index]
        assert "".join(piece.text for piece in mine) == output.text
        assert [token for piece in mine for token in piece.token_ids] == list(output.token_ids)
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        assert mine[-1].stop_reason == output.stop_reason
        if "logprobs" in values:
            tops = [top for piece in mine for top in piece.logprobs]
            assert [list(top) for top in tops] == [list(top) for top in output.logprobs]
            for top, alike in zip(tops, output.logprobs, strict=True):
                assert list(top.values()) == pytest.approx(list(alike.values()), abs=1e-5)


@pytest.mark.parametrize(
    "values", [{"n": 3}, {"n": 2, "best_of": 3}, {"beam_width": 3, "n": 3, "temperature": 0.0}], ids=str
)
def test_cumulative_results_grow_to_the_whole_one(llm, values):
    [whole] = results_of(llm, params_of(FINAL_ONLY, **values))
    results = results_of(llm, params_of(CUMULATIVE, **values))
    assert len(results) > 2
    assert [output.token_ids for output in results[-1].outputs] == [output.token_ids for output in whole.outputs]
    if values == {"n": 3}:
        for earlier, later in itertools.pairwise(results):
            assert all(new.text.startswith(old.text) for old, new in zip(earlier.outputs, later.outputs, strict=False))


def test_a_result_comes_only_with_news(llm):
    long = prompts(1, seed=3, longest=40)[0] * 6
    options = {"num_pages": 2000, "max_num_batched_tokens": 16, "max_num_seqs": 4, "optimize": False}
    with LLM(tiny("llama"), **options) as small:
        results = results_of(small, params_of(CUMULATIVE, max_tokens=3), long[:60])
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 2, 3]


def test_the_prompts_log_probabilities_are_in_the_first_piece(llm):
    pieces = results_of(llm, params_of(DELTA, prompt_logprobs=1))
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_without_a_kind_the_call_decides(llm):
    assert len(results_of(llm, params_of(None))) == 1
    assert len(results_of(llm, params_of(None), stream=True)) > 2
    assert len(results_of(llm, params_of(DELTA), stream=False)) == 1
    assert len(results_of(llm, params_of(FINAL_ONLY), stream=True)) == 1


def test_generate_gives_whole_results_whatever_the_kind(llm):
    batch = ["hello", "you"]
    expected = llm.generate(batch, params_of(None), use_tqdm=False)
    for kind in RequestOutputKind:
        results = llm.generate(batch, params_of(kind), use_tqdm=False)
        assert [result.text for result in results] == [result.text for result in expected]


def test_a_stream_gives_pieces_of_those_that_ask_for_them(llm):
    work = [("hello", params_of(DELTA)), ("hello", params_of(None)), ("you", params_of(CUMULATIVE))]
    seen = {0: [], 1: [], 2: []}
    for number, result in llm.stream(work):
        seen[number].append(result)
    assert "".join(piece.text for piece in seen[0]) == seen[1][0].text
    assert (len(seen[1]), seen[2][-1].finished) == (1, True)
    assert len(seen[2]) > 2


def test_abandoned_pieces_leave_nothing_behind(llm):
    for _, result in llm.stream([("hello", params_of(DELTA, max_tokens=200))] * 3):
        assert not result.finished
        break
    assert list(llm.generate(["you"], params_of(None), use_tqdm=False))
    assert llm.engine.stats().pages_used == 0


def test_an_aborted_request_tells_what_was_not_told_yet(llm):
    llm.engine.add_request("a", "hello", params_of(DELTA))
    told = [piece for _ in range(4) for result in llm.engine.step() for piece in result.outputs]
    last = llm.engine.abort("a")
    assert told
    assert [(output.text, list(output.token_ids), output.finish_reason) for output in last.outputs] == [
        ("", [], "abort")
    ]


class Letters:
    """Decodes token n to the n-th of some strings."""

    def __init__(self, *strings: str) -> None:
        self.strings = strings

    def decode(self, ids, **_):
        return "".join(self.strings[token] for token in ids)


def test_settled_text_holds_back_what_may_become_a_stop_string():
    spelled = Detokenizer(Letters("on", "e st", "op", "s st", "ill st", "\ufffd", "STOP"), stop=["stop it", "STOP"])
    seen = []
    for token in (0, 1, 2, 3, 4, 5):
        assert spelled.append(token) is None
        seen.append(spelled.settled())
    assert seen == ["on", "one ", "one ", "one stops ", "one stops still ", "one stops still "]
    assert spelled.append(6) == "STOP"
    assert spelled.cut("STOP", keep=False) == "one stops still st\ufffd"


def test_a_stop_string_from_before_min_tokens_is_not_found_afterwards():
    spelled = Detokenizer(Letters("ab", "cd", "ef"), stop=["ab", "longer stop"])
    assert spelled.append(0, searchable=False) is None
    assert spelled.append(1) is None
    assert spelled.append(0) == "ab"
    assert spelled.cut("ab", keep=True) == "abcdab"


def test_deltas_make_no_sense_where_the_best_completions_are_chosen_at_the_end():
    for values in ({"best_of": 3}, {"beam_width": 2, "temperature": 0.0}):
        with pytest.raises(InvalidParams, match="output_kind cannot be DELTA"):
            SamplingParams(output_kind=DELTA, **values)
    with pytest.raises(InvalidParams, match="output_kind must be a RequestOutputKind, got 'delta'"):
        SamplingParams(output_kind="delta")


def test_a_stop_token_that_is_kept_is_in_streamed_text_too(llm, words):
    [free] = results_of(llm, params_of(FINAL_ONLY, temperature=0.0))
    stop = free.token_ids[5]
    values = {"temperature": 0.0, "stop_token_ids": [stop], "include_stop_str_in_output": True}
    [whole] = results_of(llm, params_of(FINAL_ONLY, **values))
    pieces = results_of(llm, params_of(DELTA, **values))
    assert "".join(piece.text for piece in pieces) == whole.text == words.decode(whole.token_ids)
