"""When the pool runs out: requests that allow it are cropped, so that nobody is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import VOCAB, alone, tiny

from paged_kv.compression import AdaKV, KeyNorm, SnapKV, StreamingLLM
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams

PAGE, LAYERS, NEW = 4, 3, 60
#: Prompts of which the pool below holds three with their outputs.
PROMPTS = [[3 + (7 * number + step * step) % (VOCAB - 3) for step in range(40)] for number in range(8)]


def options(lanes: str = "layer", **changes: Any) -> EngineOptions:
    tables = LAYERS * (2 if lanes == "head" else 1)
    values: dict[str, Any] = {"num_pages": 1 + tables * 3 * 25, "page_size": PAGE, "num_draft_tokens": 0}
    return EngineOptions(lanes=lanes, **(values | {"max_num_seqs": 8, "max_num_batched_tokens": 64} | changes))


def greedy(compression: Any = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, compression=compression)


def run(model: Any, chosen: EngineOptions, params: list[SamplingParams]) -> tuple[list[Any], Any]:
    """Results in order, and the engine's statistics once all are back; sound after every step."""
    with Engine(model, None, chosen) as engine:
        for number, each in enumerate(params):
            engine.add_request(str(number), PROMPTS[number], each)
        results = {}
        while engine.has_unfinished:
            results.update({result.request_id: result for result in engine.step()})
            engine.check()
        stats = engine.stats()
    assert stats.pages_used == 0
    return [results[str(number)] for number in range(len(params))], stats


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no caching"])
@pytest.mark.parametrize(
    ("policy", "lanes"),
    [
        pytest.param(StreamingLLM(), "layer", id="streaming"),
        pytest.param(SnapKV(window=6), "layer", id="snapkv"),
        pytest.param(AdaKV(KeyNorm()), "head", id="adakv by head"),
    ],
)
def test_a_load_that_preempts_uncompressed_recomputes_nothing_under_pressure_compression(
    llama: Any, policy: Any, lanes: str, caching: bool
) -> None:
    chosen = options(lanes, enable_prefix_caching=caching)
    plain, before = run(llama, chosen, [greedy()] * 8)
    assert before.num_preemptions > 0
    assert before.num_computed_tokens > 8 * (40 + NEW), "some tokens were computed twice"
    squeezed, after = run(llama, chosen, [greedy(Compression(policy, floor=16))] * 8)
    assert after.num_preemptions == 0
    assert after.num_computed_tokens == 8 * (40 + NEW - 1), "every token once; the last is not fed back"
    assert after.num_pressure_crops > 0
    for result in [*plain, *squeezed]:
        assert result.finish_reason == "length"
        assert len(result.token_ids) == NEW


def test_pressure_leaves_alone_what_it_is_not_allowed_to_crop(llama: Any) -> None:
    mixed = [greedy(Compression(StreamingLLM(), floor=12)) if number % 2 else greedy() for number in range(8)]
    results, stats = run(llama, options(), mixed)
    assert stats.num_pressure_crops > 0
    for number in range(0, 8, 2):
        assert list(results[number].token_ids) == alone(llama, PROMPTS[number], NEW, eos_token_id=None)


def test_without_pressure_a_floor_changes_nothing(llama: Any) -> None:
    roomy = options(num_pages=1 + LAYERS * 8 * 25)
    results, stats = run(llama, roomy, [greedy(Compression(StreamingLLM(), floor=12))] * 8)
    assert stats.num_pressure_crops == stats.num_preemptions == 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == alone(llama, prompt, NEW, eos_token_id=None)


def test_the_longest_row_is_cropped_first_and_only_as_many_as_the_step_needs(llama: Any) -> None:
    with Engine(llama, None, options(num_pages=1 + LAYERS * 36, enable_prefix_caching=False)) as engine:
        params = greedy(Compression(StreamingLLM(), floor=8))
        engine.add_request("long", PROMPTS[0] * 2, params)
        engine.add_request("short", PROMPTS[1], params)
        cropped: list[str] = []
        while engine.has_unfinished and not cropped:
            engine.step()
            cropped = [row.request.request_id for row in engine._scheduler.running if row.num_cropped]
    assert cropped == ["long"]


def test_a_policy_that_fails_under_pressure_is_its_own_requests_error(llama: Any) -> None:
    class Broken:
        def keep(self, tokens: Any, budget: int) -> Any:
            raise RuntimeError("no idea")

    results, _ = run(llama, options(), [greedy(Compression(Broken(), floor=12)), *[greedy()] * 5])
    assert results[0].error == "the crop raised RuntimeError: no idea"
    for number in range(1, 6):
        assert list(results[number].token_ids) == alone(llama, PROMPTS[number], NEW, eos_token_id=None)


def test_forks_are_cropped_apart_under_pressure() -> None:
    model = tiny("llama", seed=4)
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=NEW, ignore_eos=True, compression=Compression(KeyNorm(), floor=12)
    )
    results, stats = run(model, options(num_pages=1 + LAYERS * 60), [params, params])
    assert stats.num_pressure_crops > 0
    assert stats.num_preemptions == 0
    for result in results:
        assert [len(output.token_ids) for output in result.outputs] == [NEW] * 4
