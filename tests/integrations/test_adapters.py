"""Adapters: Ray Data, lm-eval, metrics."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from paged_kv.engine import SamplingParams
from paged_kv.engine.intake import InvalidRequest
from paged_kv.engine.llm import LLM
from paged_kv.integrations.lm_eval import Answers, harness_model
from paged_kv.integrations.metrics import prometheus
from paged_kv.integrations.ray_data import RayStage

OPTIONS = {"num_pages": 1000, "page_size": 4, "optimize": False}


@pytest.fixture(scope="module")
def llm(model_folder):
    with LLM(model_folder, max_model_len=40, **OPTIONS) as llm:
        yield llm


def test_a_ray_stage_adds_columns_and_keeps_bad_rows(model_folder):
    stage = RayStage(model_folder, params={"temperature": 0, "max_tokens": 4, "ignore_eos": True}, **OPTIONS)
    batch = {"prompt": np.array(["abc", "", "hello"], dtype=object), "id": np.arange(3)}
    out = stage(batch)
    assert out["id"].tolist() == [0, 1, 2]
    assert out["finish_reason"].tolist() == ["length", "error", "length"]
    assert out["num_output_tokens"].tolist() == [4, 0, 4]
    assert out["error"].tolist() == ["", "the prompt is empty", ""]
    chat = stage({"messages": np.array([[{"role": "user", "content": "hi"}]], dtype=object)})
    assert chat["num_output_tokens"].tolist() == [4]
    ids = np.empty(1, dtype=object)
    ids[0] = np.array([5, 6, 7])
    assert stage({"prompt": ids})["num_output_tokens"].tolist() == [4]
    with pytest.raises(KeyError, match="'prompt' or 'messages'"):
        stage({"text": np.array(["a"])})


def logprobs(llm, ids):
    with torch.inference_mode():
        attention = llm.model.config._attn_implementation
        llm.model.set_attn_implementation("sdpa")
        try:
            return torch.log_softmax(llm.model(torch.tensor([ids])).logits[0], -1)
        finally:
            llm.model.set_attn_implementation(attention)


def test_harness_requests_are_answered_with_the_models_probabilities(llm):
    answers = Answers(llm)
    encode = lambda text: llm.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731 - short
    [(value, _), (spaced, _), (first, _)] = answers.loglikelihood([("abc", "de"), ("abc ", "de"), ("", "de")])
    context, rest = encode("abc"), encode("de")
    table = logprobs(llm, context + rest)
    assert value == pytest.approx(float(table[2, rest[0]] + table[3, rest[1]]), abs=1e-3)
    table = logprobs(llm, encode("abc de"))
    assert spaced == pytest.approx(sum(float(table[i - 1, encode("abc de")[i]]) for i in (3, 4, 5)), abs=1e-3)
    table = logprobs(llm, [1, *rest])
    assert first == pytest.approx(float(table[0, rest[0]] + table[1, rest[1]]), abs=1e-3)


def test_rolling_probabilities_cover_every_token_once_in_windows(llm):
    answers = Answers(llm)
    text = "abcdefghij" * 10
    windows = answers._windows(text)
    assert sum(len(ids) - start for ids, start in windows) == 100
    assert all(len(ids) <= 40 for ids, _ in windows)
    [short] = answers.rolling(["abc"])
    ids = llm.tokenizer("abc", add_special_tokens=False)["input_ids"]
    table = logprobs(llm, [1, *ids])
    assert short == pytest.approx(sum(float(table[i, token]) for i, token in enumerate(ids)), abs=1e-3)


def test_generation_stops_at_the_harness_strings(llm):
    [text] = Answers(llm).generate_until([("abc", {"until": ["a"], "max_gen_toks": 10})])
    assert "a" not in text
    with pytest.raises(InvalidRequest, match="empty"):
        Answers(llm).generate_until([("", {})])


def test_the_harness_model_hands_requests_on(llm, monkeypatch):
    module = ModuleType("lm_eval.api.model")
    module.LM = type("LM", (), {})
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    model = harness_model(llm)
    [(value, greedy)] = model.loglikelihood([SimpleNamespace(args=("abc", "de"))])
    assert value < 0
    assert greedy in (True, False)
    assert len(model.loglikelihood_rolling([SimpleNamespace(args=("abc",))])) == 1
    assert len(model.generate_until([SimpleNamespace(args=("abc", {"max_gen_toks": 2}))])) == 1


def test_metrics_are_prometheus_text(llm):
    llm.generate(["abc"], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), use_tqdm=False)
    text = prometheus(llm.engine.stats())
    assert "# TYPE paged_kv_pages_used gauge\npaged_kv_pages_used 0\n" in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(len(line.split()) == 2 and float(line.split()[1]) >= 0 for line in lines)
    assert f"paged_kv_output_tokens_total {llm.engine.stats().num_output_tokens}" in lines
