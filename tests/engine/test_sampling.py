"""Draws against transformers' own processors, and what they depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_kv.engine import SamplingParams
from paged_kv.engine.drawing import Limits, draw, draw_uniform, largest, likeliest
from paged_kv.engine.request import Request
from paged_kv.engine.sampling import Draw, Sampler

VOCAB = 1500


def row(params: SamplingParams, *, output=(), prompt=(5, 6, 7), seed=0, sampler=None) -> Any:
    request = Request("r", list(prompt), params, arrival=0)
    [made] = request.rows
    made.tokens += output
    made.sampler = (sampler or Sampler(eos_ids=[2])).prepare(params, params.seed if params.seed is not None else seed)
    return made


def logits(rows: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def reference(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities as transformers' warpers leave them, `[rows, vocab]`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(torch.zeros(len(scores), 1, dtype=torch.long), scores.clone()), -1)


CASES = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.001},
    {"top_k": VOCAB * 2},
    {},
]


@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_draws_follow_the_distribution_of_transformers_warpers(values, temperature):
    params = SamplingParams(temperature=temperature, **values)
    scores = logits(3)
    expected = reference(scores, params)
    # Walk the whole range of the uniform number: a token is met in proportion to its probability, no other token is.
    steps = 4000
    uniform = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    limits = Limits.of([params] * steps, VOCAB, scores.device)
    for line, probabilities in zip(scores, expected, strict=True):
        drawn = draw(line.expand(steps, -1), limits, uniform)
        share = torch.bincount(drawn, minlength=VOCAB) / steps
        assert not bool(((probabilities == 0) & (share > 0)).any())
        assert torch.allclose(share, probabilities, atol=1.01 / steps + 1e-5)


@pytest.mark.parametrize("columns", [7, 1500, 16 * 700, 49152, 50257])
@pytest.mark.parametrize("number", [1, 50, 128])
def test_the_largest_are_those_of_topk(columns, number):
    values = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).double()
    expected = values.topk(min(number, columns))
    best, where = largest(values, min(number, columns))
    assert torch.equal(best, expected.values)
    assert torch.equal(where, expected.indices)
    # All of them in the last columns, of all of which one lies beside the lines.
    values[:, -number:] += 100
    assert torch.equal(largest(values, min(number, columns))[1], values.topk(min(number, columns)).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 1500, 49152, 50257])
def test_the_likeliest_is_the_first_of_equal_ones(columns, dtype):
    values = (torch.randn(9, columns, generator=torch.Generator().manual_seed(1)) * 2).round().to(dtype)
    values[0] = -torch.inf
    values[1, columns // 2] = torch.nan
    assert likeliest(values).tolist() == values.argmax(-1).tolist()
    every_second = torch.randn(9, 2 * columns, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    assert likeliest(every_second).tolist() == every_second.argmax(-1).tolist()


def test_a_temperature_close_to_nothing_draws_the_likeliest():
    scores = logits(4)
    for values in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        rows = [row(SamplingParams(temperature=1e-300, **values), output=[9] * i) for i in range(4)]
        assert [each.token for each in Sampler()(scores.clone(), rows)] == scores.argmax(-1).tolist()


def test_plain_temperature_draws_follow_the_softmax():
    steps = 4000
    scores = logits(1).expand(steps, -1)
    params = SamplingParams(temperature=0.7)
    rows = [row(params, output=[9] * step, seed=3) for step in range(steps)]
    drawn = torch.tensor([draw.token for draw in Sampler()(scores.clone(), rows)])
    share = torch.bincount(drawn, minlength=VOCAB) / steps
    expected = torch.softmax(scores[0] / 0.7, -1)
    assert (share - expected).abs().sum() < 0.25
    assert (share - expected).abs().max() < 0.03


def test_draws_depend_on_seed_completion_and_step_alone():
    params = [SamplingParams(temperature=1.0, seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(8)]
    rows = [row(each, output=[9] * 3) for each in params]
    scores = logits(8)
    together = [draw.token for draw in Sampler()(scores.clone(), rows)]
    alone = [Sampler()(scores[i : i + 1].clone(), [rows[i]])[0].token for i in range(8)]
    backwards = [draw.token for draw in Sampler()(scores.flip(0).clone(), rows[::-1])][::-1]
    assert together == alone == backwards


def test_uniform_numbers_are_spread_and_repeatable():
    number = 20_000
    first = draw_uniform([7] * number, [0] * number, list(range(number)))
    again = draw_uniform([7] * number, [0] * number, list(range(number)))
    other = draw_uniform([8] * number, [0] * number, list(range(number)))
    assert torch.equal(first, again)
    assert abs(float(first.mean()) - 0.5) < 0.01
    assert abs(float((first * other).mean()) - 0.25) < 0.01
    assert float(first.min()) >= 0
    assert float(first.max()) < 1
    counts = torch.histc(first.float(), 20, 0, 1)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_greedy_rows_beside_sampled_ones_take_the_likeliest():
    scores = logits(4)
    rows = [row(SamplingParams(temperature=0.0 if i % 2 else 1.0)) for i in range(4)]
    draws = Sampler()(scores.clone(), rows)
    assert [draws[i].token for i in (1, 3)] == scores.argmax(-1)[[1, 3]].tolist()


def test_repetition_penalty_is_transformers_own_on_ragged_rows():
    scores = logits(3)
    outputs = [[3], [4, 4, 8, 9], []]
    rows = [row(SamplingParams(temperature=0.0, repetition_penalty=1.7), output=output) for output in outputs]
    mine = scores.clone()
    assert Sampler().process(mine, rows) == {}
    for i, each in enumerate(rows):
        theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([each.tokens]), scores[i : i + 1].clone())
        assert torch.equal(mine[i], theirs[0])


def test_bad_words_are_banned_as_by_transformers():
    words = {"a": [40], "b": [41, 42], "c": [5, 6, 7, 8], "d": [9] * 12}
    sampler = Sampler(encode=lambda text: words.get(text.strip(), []))
    params = SamplingParams(temperature=0.0, bad_words=list(words))
    rows = [row(params, output=output, sampler=sampler) for output in ([], [41], [3, 41], [9] * 30, [41, 42])]
    scores = logits(5)
    mine = scores.clone()
    assert sampler.process(mine, rows) == {}
    for i, each in enumerate(rows):
        theirs = NoBadWordsLogitsProcessor(list(words.values()))(torch.tensor([each.tokens]), scores[i : i + 1].clone())
        assert torch.equal(mine[i], theirs[0])
    assert bool((mine[0] == -torch.inf)[[40, 8]].all())


def test_penalties_of_many_rows_are_those_of_each_alone():
    values = [
        {"presence_penalty": 0.7, "frequency_penalty": -0.3},
        {"repetition_penalty": 1.3},
        {},
        {"repetition_penalty": 0.8, "presence_penalty": 1.5, "logit_bias": {5: 2.0, 9: -1.0}},
        {"frequency_penalty": 1.1, "min_tokens": 9, "allowed_token_ids": [1, 5, 8, 9]},
    ]
    outputs = [[8, 8, 9], [], [8], [5, 9, 9], [8, 5, 8]]
    rows = [row(SamplingParams(**each), output=output) for each, output in zip(values, outputs, strict=True)]
    scores = logits(5)
    together = scores.clone()
    Sampler(eos_ids=[2]).process(together, rows)
    for i, each in enumerate(rows):
        alone = scores[i : i + 1].clone()
        Sampler(eos_ids=[2]).process(alone, [each])
        assert torch.equal(together[i], alone[0])
    assert torch.equal(together[2], scores[2])


def test_a_row_without_a_token_left_or_without_numbers_is_its_own_failure():
    def blown(ids, scores):
        return scores * torch.nan

    values = [
        {"allowed_token_ids": [5], "logit_bias": {5: -float("inf")}},
        {"logits_processors": [blown]},
        {"temperature": 0.0, "allowed_token_ids": [5]},
    ]
    first, second, third = Sampler()(logits(3), [row(SamplingParams(**each)) for each in values])
    assert "no token is left that the grammar, min_tokens, biases, allowed tokens and bad words all allow" in str(first)
    assert str(second) == "the logits are no numbers (nan) after a logits processor"
    assert third.token == 5


def test_presence_and_frequency_penalties_count_the_output_only():
    scores = torch.zeros(1, VOCAB)
    each = row(
        SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.25), output=[8, 8, 9], prompt=[7]
    )
    Sampler().process(scores, [each])
    changed = {int(token): float(scores[0, token]) for token in scores[0].nonzero()[:, 0]}
    assert changed == {8: -1.5, 9: -1.25}


def test_logit_bias_and_min_tokens_change_single_logits():
    scores = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=0.0, logit_bias={4: 2.5, 5: -1}, min_tokens=2, stop_token_ids=[11])
    Sampler(eos_ids=[2]).process(scores, [row(params, output=[3])])
    changed = {int(token): float(scores[0, token]) for token in scores[0].nonzero()[:, 0]}
    assert changed == {4: 2.5, 5: -1.0, 2: -float("inf"), 11: -float("inf")}
    scores.zero_()
    Sampler(eos_ids=[2]).process(scores, [row(params, output=[3, 3])])
    assert float(scores[0, 2]) == 0.0


def test_bad_words_are_banned_where_they_would_be_completed():
    sampler = Sampler(encode=lambda text: [ord(letter) for letter in text])
    params = SamplingParams(temperature=0.0, bad_words=["ab", "c"])
    scores = torch.zeros(2, VOCAB)
    rows = [row(params, output=[ord("a")], sampler=sampler), row(params, output=[ord("x")] * 4, sampler=sampler)]
    sampler.process(scores, rows)
    banned = [sorted(chr(int(token)) for token in (line == -float("inf")).nonzero()[:, 0]) for line in scores]
    assert banned == [["b", "c"], ["c"]]
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        Sampler().prepare(params, 0)


def test_log_probabilities_are_of_the_raw_logits():
    scores = logits(2)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0})
    first, second = Sampler()(scores.clone(), [row(params), row(SamplingParams(temperature=0.0))])
    raw = torch.log_softmax(scores[0], -1)
    assert isinstance(first, Draw)
    assert first.token == 4
    assert first.logprob == pytest.approx(float(raw[4]), abs=1e-5)
    best = raw.topk(3)
    assert list(first.top) == [*best.indices.tolist(), 4]
    assert first.top[int(best.indices[0])] == pytest.approx(float(best.values[0]), abs=1e-5)
    assert second.logprob is None


def test_a_failing_processor_fails_its_own_row():
    def broken(ids, scores):
        raise RuntimeError("no")

    def forced(ids, scores):
        return torch.full_like(scores, -float("inf")).index_fill(1, torch.tensor([ids.shape[1]]), 0.0)

    rows = [
        row(SamplingParams(temperature=0.0, logits_processors=[broken])),
        row(SamplingParams(temperature=0.0, logits_processors=[forced]), output=[8]),
    ]
    failed, fine = Sampler()(logits(2), rows)
    assert isinstance(failed, RuntimeError)
    assert fine.token == 4
