"""Several completions of one prompt: forks, beams, ranking, log probabilities, crops."""

from __future__ import annotations

import pytest
import torch
from engine_models import alone, prompts, tiny

from paged_kv.compression.streaming import StreamingLLM
from paged_kv.engine import LLM, SamplingParams
from paged_kv.engine.compress import Compression


def engine(model, **options):
    return LLM(model, **({"num_pages": 2000, "optimize": False, "page_size": 4} | options))


def run(llm, batch, params):
    results = llm.generate(batch, params, use_tqdm=False)
    llm.engine.check()
    assert llm.engine.stats().pages_used == 0
    return results


SAMPLED = {"temperature": 1.2, "max_tokens": 12, "ignore_eos": True}


def test_completions_of_one_prompt_share_its_pages_and_draw_differently(llama):
    prompt = prompts(1, seed=6)[0] * 3
    with engine(llama) as llm:
        core = llm.engine
        core.add_request("a", prompt, SamplingParams(n=4, seed=1, **SAMPLED))
        core.step()
        pages_of_one = -(-(len(prompt) + 1) // 4) * 3
        core.step()
        assert core.stats().pages_used <= pages_of_one + 4 * 3
        while core.has_unfinished:
            results = core.step()
            core.check()
    outputs = [list(output.token_ids) for output in results[0].outputs]
    assert len({tuple(output) for output in outputs}) == 4
    assert [output.index for output in results[0].outputs] == [0, 1, 2, 3]


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_preemption(llama):
    batch = prompts(7, seed=7)
    params = [SamplingParams(seed=i, n=1 + i % 3, **SAMPLED) for i in range(7)]
    with engine(llama) as llm:
        expected = [run(llm, [prompt], each)[0] for prompt, each in zip(batch, params, strict=True)]
    tight = {"num_pages": 1 + 3 * 18, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    for options in ({}, tight, tight | {"enable_prefix_caching": False}):
        with engine(llama, **options) as llm:
            results = run(llm, batch, params)
            if options:
                assert llm.engine.stats().num_preemptions > 0
        for result, alike in zip(results, expected, strict=True):
            assert [o.token_ids for o in result.outputs] == [o.token_ids for o in alike.outputs]


def test_best_of_returns_the_likeliest(llama):
    prompt = prompts(1, seed=6)[0]
    with engine(llama) as llm:
        [all_of_them] = run(llm, [prompt], SamplingParams(n=5, seed=1, logprobs=0, **SAMPLED))
        [best] = run(llm, [prompt], SamplingParams(n=2, best_of=5, seed=1, **SAMPLED))
    ranked = sorted(all_of_them.outputs, key=lambda output: -output.cumulative_logprob)
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5])
def test_beam_search_gives_what_generate_gives(family, width, length_penalty):
    model = tiny(family)
    batch = prompts(3, seed=8)
    params = SamplingParams(beam_width=width, n=width, max_tokens=12, length_penalty=length_penalty, temperature=0.0)
    with engine(model) as llm:
        results = run(llm, batch, params)
    for prompt, result in zip(batch, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            length_penalty=length_penalty,
            pad_token_id=0,
        )
        theirs = [_until_padding(row[len(prompt) :].tolist()) for row in expected]
        assert [list(output.token_ids) for output in result.outputs] == theirs


def _until_padding(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(2) + 1] if 2 in tokens else tokens


def test_beams_survive_preemption(llama):
    batch = prompts(5, seed=9, longest=30)
    params = SamplingParams(beam_width=3, n=3, max_tokens=16, temperature=0.0)
    with engine(llama) as llm:
        expected = run(llm, batch, params)
    with engine(llama, num_pages=1 + 3 * 40, max_num_batched_tokens=16, max_num_seqs=12) as llm:
        results = run(llm, batch, params)
        assert llm.engine.stats().num_preemptions > 0
    assert [[o.token_ids for o in r.outputs] for r in results] == [[o.token_ids for o in r.outputs] for r in expected]


def test_beams_that_do_not_fit_the_pool_are_an_error(llama):
    with engine(llama, num_pages=1 + 3 * 6) as llm:
        params = SamplingParams(beam_width=4, n=1, max_tokens=40, temperature=0.0, ignore_eos=True)
        results = run(llm, [[5] * 9, [6] * 3], [params, SamplingParams(max_tokens=2, temperature=0.0)])
    assert results[0].finish_reason == "error"
    assert "pages and the pool has 18" in results[0].error
    assert results[1].finish_reason in ("length", "stop")


def test_log_probabilities_of_output_and_prompt_are_the_models(llama):
    prompt = prompts(1, seed=10, longest=40)[0] + [7] * 20
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for options in ({}, {"max_num_batched_tokens": 8, "max_num_seqs": 2}):
        with engine(llama, **options) as llm:
            for _ in range(2):  # the second time the prompt is in the prefix cache
                [result] = run(llm, [prompt], params)
                _check_logprobs(llama, prompt, result)


def _check_logprobs(model, prompt, result) -> None:
    ids = torch.tensor([[*prompt, *result.token_ids]])
    expected = torch.log_softmax(model(ids).logits[0].detach().float(), -1)
    assert result.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        here = result.prompt_logprobs[position]
        for token, value in here.items():
            assert value == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
        assert prompt[position] in here
    [output] = result.outputs
    for step, (token, here) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        line = expected[len(prompt) + step - 1]
        assert next(iter(here)) == token == int(line.argmax())
        assert here[token] == pytest.approx(float(line[token]), abs=1e-4)
    assert output.cumulative_logprob == pytest.approx(
        sum(here[t] for t, here in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_a_failing_processor_is_its_own_requests_error(llama):
    def broken(ids, scores):
        if ids.shape[1] > 8:
            raise RuntimeError("out of ideas")
        return scores

    batch = [[5] * 6, [6] * 6, [7] * 6]
    fine = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    bad = SamplingParams(temperature=0.5, max_tokens=6, ignore_eos=True, n=2, logits_processors=[broken])
    with engine(llama) as llm:
        results = run(llm, batch, [fine, bad, fine])
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error == "a logits processor raised RuntimeError: out of ideas"
    assert list(results[2].token_ids) == alone(llama, batch[2], 6, eos_token_id=None)


# -- crops -------------------------------------------------------------------------------------------------------------


def cropped(budget, every=None, **values):
    compression = Compression(StreamingLLM(sinks=2), budget, every)
    return SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, compression=compression, **values)


def test_a_crop_gives_the_same_tokens_in_any_batch_and_after_preemption(llama):
    batch = [prompt + [9] * 20 for prompt in prompts(6, seed=11)]
    params = cropped((20, 12, 6), every=5)
    with engine(llama) as llm:
        expected = [list(run(llm, [prompt], params)[0].token_ids) for prompt in batch]
        assert llm.engine.stats().pages_freed_by_crops > 0
        assert max(llm.engine.stats().mean_live_len) < 26
    with engine(llama) as llm:
        assert [list(result.token_ids) for result in run(llm, batch, params)] == expected
    tight = {"num_pages": 1 + 3 * 34, "max_num_batched_tokens": 24, "max_num_seqs": 8, "watermark": 0.0}
    with engine(llama, **tight) as llm:
        assert [list(result.token_ids) for result in run(llm, batch, params)] == expected
    uncropped = [alone(llama, prompt, 20, eos_token_id=None) for prompt in batch]
    assert expected != uncropped


def test_cropped_pages_let_more_rows_run(llama):
    batch = [list(range(3, 67)) for _ in range(6)]
    most = {}
    for name, params in (("whole", cropped(1000)), ("cropped", cropped(8))):
        with engine(llama, num_pages=1 + 3 * 44, enable_prefix_caching=False) as llm:
            for i, prompt in enumerate(batch):
                llm.engine.add_request(str(i), prompt, params)
            most[name] = 0
            while llm.engine.has_unfinished:
                llm.engine.step()
                most[name] = max(most[name], llm.engine.stats().num_running)
    assert most["cropped"] >= most["whole"] + 2


def test_a_cropped_request_leaves_the_shared_prefix_to_others(llama):
    prompt = list(range(3, 63))
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(llama) as llm:
        run(llm, [prompt], plain)
        results = run(llm, [prompt, [*prompt, 70]], [cropped(8), plain])
        assert [result.num_cached_tokens for result in results] == [56, 60]
    assert list(results[1].token_ids) == alone(llama, [*prompt, 70], 8, eos_token_id=None)


def test_forks_of_a_cropped_prompt_share_what_is_left(llama):
    with engine(llama) as llm:
        compression = Compression(StreamingLLM(), 8)
        params = SamplingParams(n=3, seed=1, compression=compression, **SAMPLED)
        [result] = run(llm, [list(range(3, 63))], params)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3


def test_a_failing_policy_is_its_own_requests_error(llama):
    class Broken:
        def keep(self, tokens, budget):
            raise RuntimeError("no idea")

    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    broken = SamplingParams(max_tokens=6, n=2, compression=Compression(Broken(), 4))
    with engine(llama) as llm:
        results = run(llm, [[5] * 9, [6] * 9, [7] * 9], [plain, broken, plain])
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error == "the crop raised RuntimeError: no idea"
    assert list(results[2].token_ids) == alone(llama, [7] * 9, 6, eos_token_id=None)


def test_budgets_must_fit_the_layers(llama):
    with engine(llama) as llm:
        [result] = llm.generate([[5, 6]], cropped((4, 4)), use_tqdm=False)
    assert result.error == "the model has 3 paged layers, got 2 budgets"
