"""Lines of a batch file: what they mean, and what is wrong with them."""

from __future__ import annotations

import json

import pytest

from paged_kv.engine import SamplingParams
from paged_kv.integrations.rows import BadLine, failure, is_failure, parse

BASE = SamplingParams(max_tokens=7, temperature=0.0, seed=100)
CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}


def row(values):
    return parse(json.dumps(values).encode(), 5, BASE)


def test_a_short_line_keeps_the_base_and_draws_from_its_number():
    parsed = row({"prompt": "hi", "temperature": 0.5, "id": 9, "priority": 2})
    assert (parsed.prompt, parsed.custom_id, parsed.priority) == ("hi", 9, 2)
    assert (parsed.params.max_tokens, parsed.params.temperature, parsed.params.seed) == (7, 0.5, 105)


def test_a_line_may_bring_its_own_seed():
    assert row({"prompt": "hi", "seed": 1}).params.seed == 1


def test_an_openai_line_is_read_with_its_own_names():
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3, "logprobs": True}
    parsed = row(CHAT | {"body": body | {"top_logprobs": 2, "logit_bias": {"5": -1}, "top_k": 4}})
    assert (parsed.custom_id, parsed.url, parsed.model) == ("a", "/v1/chat/completions", "m")
    params = parsed.params
    assert (params.max_tokens, params.logprobs, params.logit_bias, params.top_k) == (3, 2, {5: -1}, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "a line needs one of prompt, prompt_token_ids, messages, got none"),
        ({"prompt": "a", "messages": []}, "got prompt, messages"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is a list of token ids, got text"),
        ({"prompt": 5}, "a prompt is text or a list of token ids, got int"),
        ({"messages": []}, "messages must be a list of messages, and not empty"),
        ({"messages": [{"role": "user"}]}, 'needs role and content, got {"role": "user"}'),
        (
            {"prompt": "a", "temprature": 1},
            "unknown field 'temprature'; known are prompt, prompt_token_ids, messages, id, priority, allowed_token_ids",
        ),
        ({"prompt": "a", "top_p": 2}, "top_p must be between 0.0 and 1.0, got 2"),
        ({"prompt": "a", "stop": 5}, "stop must be a list, got 5"),
        ({"prompt": "a", "bad_words": 5}, "bad_words must be a list, got 5"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias maps token ids to numbers, got [1]"),
        ({"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, "needs one of json, regex, choice"),
        ({"prompt": "a", "structured_outputs": {"schema": {}}}, "unknown field 'schema' of structured_outputs"),
        (CHAT | {"body": {"messages": [{"role": "user", "content": ""}], "response_format": {"type": "xml"}}}, "'xml'"),
        ({"prompt": "a", "priority": "x"}, "priority must be an integer, got 'x'"),
        (CHAT | {"url": "/v1/embeddings", "body": {}}, "url must be /v1/chat/completions or /v1/completions"),
        (CHAT | {"method": "GET", "body": {}}, "method must be POST, got 'GET'"),
        (CHAT | {"body": {}}, "needs messages"),
        (
            CHAT | {"body": {"messages": [{"role": "user", "content": ""}], "x": 1}},
            "unknown body field 'x'; known are bad_words, best_of",
        ),
        ([1], "a line is a JSON object, got list"),
    ],
    ids=str,
)
def test_a_bad_line_says_what_is_wrong(values, message):
    with pytest.raises(BadLine) as caught:
        row(values)
    assert message in str(caught.value)


def test_text_that_is_not_json_says_so():
    for raw, message in (
        (b'{"prompt": \n', "not JSON: Expecting value at column 11"),
        (b'{"prompt": "a\n', "not JSON: Unterminated string starting at at column 12"),
        (b"[" * 100_000, "not JSON: "),
    ):
        with pytest.raises(BadLine, match=message):
            parse(raw, 1, BASE)


@pytest.mark.parametrize("raw", [b"nonsense", b'{"prompt": 1, "id": 4}', json.dumps(CHAT).encode()])
def test_a_failure_names_its_line_in_the_form_of_the_line(raw):
    line = failure(12, "broken", raw=raw)
    assert is_failure(line)
    assert "line 12: broken" in json.dumps(line)
    assert ("custom_id" in line) == (b"custom_id" in raw)
    assert line.get("id") == {b"n": None, b"{": 4}[raw[:1]] or "custom_id" in line
