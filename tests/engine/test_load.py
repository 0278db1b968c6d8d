"""Many requests under pressure: random schedules, random aborts, small pools."""

from __future__ import annotations

import random

import pytest
import torch
from engine_models import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from paged_kv.compression import StreamingLLM
from paged_kv.engine import LLM, SamplingParams
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions

LAYERS = 3


class Looking:
    """Keeps the ends, and insists on the queries of the newest tokens: choices by scores could tie."""

    needs_queries = 3
    num_protected = 2

    def keep(self, tokens, budget):
        assert tokens.queries is not None
        assert tokens.queries.states.shape[1] == min(3, tokens.seen_len)
        return StreamingLLM(2).keep(tokens, budget)


@st.composite
def requests(draw):
    """A few requests, some with common prefixes, of every kind."""
    shared = [3 + i for i in range(draw(st.integers(0, 20)))]
    made = []
    for number in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.integers(3, 90), min_size=1, max_size=20))
        prompt = [*shared, *own] if draw(st.booleans()) else own
        values = {"max_tokens": draw(st.integers(1, 14)), "ignore_eos": draw(st.booleans())}
        kind = draw(st.sampled_from(["greedy", "greedy", "sampled", "many", "beam", "cropped"]))
        if kind == "sampled":
            values |= {"temperature": 1.1, "seed": number, "top_p": 0.9}
        elif kind == "many":
            values |= {"temperature": 1.1, "seed": number, "n": 3}
        else:
            values |= {"temperature": 0.0}
        if kind == "beam":
            values |= {"beam_width": 2, "n": 2}
        if kind == "cropped":
            policy = draw(st.sampled_from([StreamingLLM(2), Looking()]))
            budget = draw(st.integers(3, 12))
            when = draw(st.sampled_from([{}, {"every": 3}, {"longest": budget + 4}, {"chunk": 5}]))
            values |= {"compression": Compression(policy, budget, **when)}
        made.append((tuple(prompt), SamplingParams(**values), draw(st.integers(0, 2)), draw(st.integers(0, 6))))
    return made


@st.composite
def engines(draw):
    """Options of an engine that can just hold the largest request."""
    seats = draw(st.integers(3, 10))
    return {
        "num_pages": 1 + LAYERS * draw(st.integers(45, 120)),
        "page_size": draw(st.sampled_from([1, 3, 4])),
        "max_num_seqs": seats,
        "max_num_batched_tokens": draw(st.integers(seats, 40)),
        "enable_prefix_caching": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.05])),
        "num_draft_tokens": draw(st.sampled_from([0, 5])),
    }


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=3)


def outputs(result) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in result.outputs]


def run_schedule(model, made, options, alone) -> None:
    """Requests arrive at their steps; every one must give what it gives alone in a large engine."""
    with Engine(model, options=EngineOptions(**options, optimize=False)) as engine:
        step, results = 0, {}
        waiting = sorted(enumerate(made), key=lambda item: item[1][3])
        while waiting or engine.has_unfinished:
            while waiting and waiting[0][1][3] <= step:
                number, (prompt, params, priority, _) = waiting.pop(0)
                engine.add_request(str(number), list(prompt), params, priority=priority)
            for result in engine.step():
                results[int(result.request_id)] = result
            engine.check()
            step += 1
            assert step < 3000, "the schedule does not end"
        assert engine.stats().pages_used == 0
    assert len(results) == len(made)
    for number, (prompt, params, _, _) in enumerate(made):
        if results[number].error is None and not _ended_by_the_pool(results[number], params):
            assert outputs(results[number]) == alone(prompt, params)


def _ended_by_the_pool(result, params) -> bool:
    """Whether a request alone was too large for the pool (several rows, or pages of one token)."""
    return any(o.finish_reason == "length" and len(o.token_ids) < params.max_tokens for o in result.outputs)


@pytest.fixture(scope="module")
def alone(model):
    """What a request gives alone in a large engine, remembered."""
    known: dict[str, list[tuple[int, ...]]] = {}

    def give(prompt, params):
        key = repr((prompt, params))
        if key not in known:
            with LLM(model, num_pages=6000, page_size=4, optimize=False, num_draft_tokens=0) as llm:
                [result] = llm.generate([list(prompt)], params, use_tqdm=False)
            known[key] = outputs(result)
        return known[key]

    return give


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=requests(), options=engines())
def test_tokens_are_the_same_alone_and_in_any_schedule(model, alone, made, options):
    run_schedule(model, made, options, alone)


@pytest.mark.nightly
@settings(max_examples=175, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=requests(), options=engines())
def test_tokens_are_the_same_in_many_more_schedules(model, alone, made, options):
    run_schedule(model, made, options, alone)


def test_two_thousand_requests_with_aborts_on_a_pool_for_a_twentieth_of_them():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    dice = random.Random(0)
    requests = 2000
    # 2000 requests of 24 tokens on average in 2 layers of 4-token pages would take 24,000 pages.
    options = EngineOptions(
        num_pages=1 + 1200, page_size=4, max_num_seqs=128, max_num_batched_tokens=512, optimize=False
    )
    with Engine(LlamaForCausalLM(config).eval(), options=options) as engine:
        for number in range(requests):
            prompt = [dice.randrange(3, 50) for _ in range(dice.randrange(1, 32))]
            if number % 3 == 0:
                prompt = list(range(3, 20)) + prompt
            params = SamplingParams(
                temperature=dice.choice([0.0, 1.0]), max_tokens=dice.randrange(1, 16), seed=number, ignore_eos=True
            )
            engine.add_request(str(number), prompt, params, priority=dice.randrange(3))
        ended: dict[str, str] = {}
        while engine.has_unfinished:
            for result in engine.step():
                assert result.request_id not in ended
                ended[result.request_id] = result.finish_reason
            engine.check()
            for _ in range(dice.randrange(4)):
                victim = str(dice.randrange(requests))
                aborted = engine.abort(victim)
                assert (aborted is None) == (victim in ended)
                if aborted is not None:
                    ended[victim] = aborted.finish_reason
        assert len(ended) == requests
        assert {"length", "abort"} <= set(ended.values()) <= {"length", "abort"}
        assert engine.stats().num_preemptions > 0
        assert engine.stats().pages_used == 0


@pytest.mark.parametrize("fork_first", [False, True])
def test_no_request_starves_behind_a_stream_of_younger_ones(model, fork_first):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=0, n=2 if fork_first else 1)
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    options = EngineOptions(
        num_pages=1 + LAYERS * 24, page_size=4, max_num_seqs=4, max_num_batched_tokens=32, optimize=False
    )
    with Engine(model, options=options) as engine:
        for number in range(3):
            engine.add_request(f"short{number}", [5, 6, 7], short)
        engine.add_request("long", list(range(3, 43)), params)
        number, steps = 3, 0
        while True:
            engine.add_request(f"short{number}", [5, 6, number % 50 + 3], short)
            number, steps = number + 1, steps + 1
            if any(result.request_id == "long" for result in engine.step()):
                break
            assert steps < 100
