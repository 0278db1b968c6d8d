"""Outputs kept to a schema, an expression, a choice or a grammar, with SmolLM2's tokenizer and a small random model."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paged_kv.engine import LLM, InvalidParams, SamplingParams, StructuredOutputsParams
from paged_kv.engine.grammar import GrammarError, Grammars

pytest.importorskip("llguidance")
pytestmark = pytest.mark.weights

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


def small_model() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def llm(tokenizer):
    with LLM(small_model(), tokenizer=tokenizer, num_pages=4000, page_size=4, optimize=False) as llm:
        yield llm


def held(seed: int = 0, *, n: int = 1, max_tokens: int = 80, extra: dict[str, Any] | None = None, **form: Any) -> Any:
    structure = StructuredOutputsParams(disable_any_whitespace=True, **form)
    return SamplingParams(seed=seed, n=n, max_tokens=max_tokens, structured_outputs=structure, **(extra or {}))


def complete(llm: LLM, params: list[SamplingParams]) -> Any:
    return llm.generate(["Hello"] * len(params), params, use_tqdm=False)


def test_json_is_valid_and_of_the_schema_for_every_seed_and_completion(llm):
    results = complete(llm, [held(seed, n=2, json=SCHEMA) for seed in range(20)])
    for result in results:
        for output in result.outputs:
            value = json.loads(output.text)
            assert output.finish_reason == "stop"
            assert list(value) == ["name", "count", "colour"]
            assert len(value["name"]) <= 12
            assert 0 <= value["count"] <= 99
            assert value["colour"] in ("red", "green")
    assert len({output.text for result in results for output in result.outputs}) > 20


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", 'a "quoted" | one']}, r'yes|no|a "quoted" \| one'),
        ({"grammar": 'start: "x" ("y" | "z")+ "!"'}, r"x[yz]+!"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_the_whole_output_has_the_form(llm, form, pattern):
    for result in complete(llm, [held(seed, **form) for seed in range(8)]):
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text), result.text


def test_greedy_rows_beside_them_are_not_touched_and_seeds_give_the_same_alone(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    [alone] = complete(llm, [plain])
    [held_alone] = complete(llm, [held(3, json=SCHEMA)])
    first, second, third = complete(llm, [plain, held(3, json=SCHEMA), held(4, choice=["a", "b"])])
    assert first.token_ids == alone.token_ids
    assert second.token_ids == held_alone.token_ids
    assert third.text in ("a", "b")


def test_a_preempted_row_goes_on_where_its_grammar_was(model, tokenizer):
    params = [held(seed, json=SCHEMA) for seed in range(6)]
    options = {"tokenizer": tokenizer, "page_size": 4, "optimize": False, "enable_prefix_caching": False}
    with LLM(model, num_pages=1000, **options) as llm:
        expected = [result.text for result in complete(llm, params)]
    with LLM(model, num_pages=1 + 2 * 14, **options) as llm:
        assert [result.text for result in complete(llm, params)] == expected
        assert llm.engine.stats().num_preemptions > 0


def test_a_grammar_that_is_wrong_or_leaves_no_token_ends_its_own_row_alone(llm):
    results = complete(
        llm,
        [
            held(regex="[a-"),
            held(json={"type": "nonsense"}),
            held(choice=["ab"], extra={"bad_words": ["ab", "a"]}),
            held(choice=["good"]),
        ],
    )
    assert "structured_outputs.regex: " in results[0].error
    assert "invalid regex" in results[0].error
    assert results[1].error == "structured_outputs.json: Invalid type: nonsense"
    assert "no token is left" in results[2].error
    assert (results[3].error, results[3].text) == (None, "good")


def test_a_token_outside_of_the_grammar_is_an_error_of_one_line(tokenizer):
    grammars = Grammars(tokenizer, vocab_size=49152, eos_ids=[2])
    constraint = grammars.begin(grammars.compile(StructuredOutputsParams(choice=["yes"])))
    with pytest.raises(GrammarError, match="cannot go on with token 5") as caught:
        constraint.advance(5)
    assert len(str(caught.value)) < 200


def test_it_is_said_what_to_install_and_what_is_needed(model, tokenizer, monkeypatch):
    with LLM(model, num_pages=100, optimize=False) as llm:
        [result] = llm.generate([[5]], held(choice=["a"]), use_tqdm=False)
        assert result.error == "structured_outputs needs a tokenizer; this engine has none"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(model, tokenizer=tokenizer, num_pages=100, optimize=False) as llm:
        [result] = llm.generate([[5]], held(choice=["a"]), use_tqdm=False)
        assert result.error == "structured_outputs needs llguidance: pip install 'paged-kv[structured]'"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "needs one of json, regex, choice, grammar, json_object, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": 5}, "structured_outputs.json is a JSON schema, got 5"),
        ({"choice": "yes"}, "structured_outputs.choice is a list of strings, got 'yes'"),
        ({"choice": ["a", ""]}, "structured_outputs.choice holds strings that are not empty, got ''"),
        ({"regex": 5}, "structured_outputs.regex is text, got 5"),
        ({"schema": {}}, "unknown field 'schema' of structured_outputs"),
    ],
    ids=str,
)
def test_forms_that_make_no_sense_are_named(form, message):
    with pytest.raises(InvalidParams, match=message):
        SamplingParams(structured_outputs=form)


def test_beam_search_takes_no_grammar():
    with pytest.raises(InvalidParams, match="beam search takes no structured_outputs"):
        SamplingParams(beam_width=2, structured_outputs={"choice": ["a"]})
