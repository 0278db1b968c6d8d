"""Prompts far longer than their budget: computed in pieces with crops between, within pages near the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import VOCAB, alone

from paged_kv import PagedCache, detach
from paged_kv.compression import KeyNorm, SnapKV, StreamingLLM, compress, record_queries
from paged_kv.engine.compress import Compression
from paged_kv.engine.engine import Engine
from paged_kv.engine.options import EngineOptions
from paged_kv.engine.params import SamplingParams

PAGE, LAYERS, BUDGET, CHUNK = 4, 3, 24, 16
PROMPT = [3 + (step * step + 5 * step) % (VOCAB - 3) for step in range(230)]


def greedy(compression: Any = None, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, compression=compression)


def run(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    for number, (ids, params) in enumerate(work):
        engine.add_request(str(number), ids, params)
    results = {}
    while engine.has_unfinished:
        results.update({result.request_id: result for result in engine.step()})
        engine.check()
    return [results[str(number)] for number in range(len(work))]


def piece_by_piece(model: Any, policy: Any, count: int) -> list[int]:
    """Greedy tokens through the drop-in cache, cropped after every piece of the prompt."""
    cache = PagedCache.for_model(model)
    record_queries(cache, policy)
    made: list[int] = []
    with torch.no_grad():
        for start in range(0, len(PROMPT), CHUNK):
            piece = torch.tensor([PROMPT[start : start + CHUNK]])
            positions = torch.arange(start, start + piece.shape[1])[None]
            logits = model(piece, past_key_values=cache, position_ids=positions).logits
            compress(cache, policy, BUDGET)
        for step in range(count):
            token = logits[:, -1:].argmax(-1)
            made.append(int(token))
            position = torch.tensor([[len(PROMPT) + step]])
            logits = model(token, past_key_values=cache, position_ids=position).logits
    detach(model)
    return made


@pytest.mark.parametrize(
    "policy", [pytest.param(StreamingLLM(), id="streaming"), pytest.param(SnapKV(window=7), id="snapkv")]
)
def test_pages_stay_near_the_budget_and_tokens_are_those_of_crops_piece_by_piece(llama: Any, policy: Any) -> None:
    want = piece_by_piece(llama, policy, 12)
    compression = Compression(policy, BUDGET, chunk=CHUNK)
    peaks = {}
    for name, asked in (("whole", policy), ("pieces", compression)):
        params = greedy(asked if asked is compression else Compression(asked, BUDGET))
        with Engine(llama, None, EngineOptions(num_pages=999, page_size=PAGE, max_num_batched_tokens=256)) as engine:
            [result] = run(engine, [(PROMPT, params)])
            peaks[name] = max(engine.stats().peak_pages, 0) // LAYERS
    assert list(result.token_ids) == want
    assert peaks == {"whole": -(-len(PROMPT) // PAGE), "pieces": (BUDGET + CHUNK) // PAGE}


def test_a_pool_far_smaller_than_the_prompt_is_enough(llama: Any) -> None:
    small = EngineOptions(num_pages=1 + LAYERS * 11, page_size=PAGE, max_num_batched_tokens=256, watermark=0.0)
    want = piece_by_piece(llama, KeyNorm(), 12)
    with Engine(llama, None, small) as engine:
        compression = Compression(KeyNorm(), BUDGET, every=8, chunk=CHUNK)
        long, whole = run(engine, [(PROMPT, greedy(compression, 8)), (PROMPT, greedy(Compression(KeyNorm(), BUDGET)))])
        assert engine.stats().num_preemptions == 0
    assert list(long.token_ids) == want[:8]
    assert "the pool has 33" in whole.error, "without pieces the prompt does not fit"


def test_many_long_prompts_run_side_by_side(llama: Any) -> None:
    """Admission counts what a prompt in pieces comes to hold, not its length."""
    params = greedy(Compression(StreamingLLM(), BUDGET, every=8, chunk=CHUNK), 40)
    most = 0
    with Engine(llama, None, EngineOptions(num_pages=1 + LAYERS * 80, page_size=PAGE, num_draft_tokens=0)) as engine:
        for number in range(6):
            engine.add_request(str(number), PROMPT[number:], params)
        while engine.has_unfinished:
            engine.step()
            most = max(most, engine.stats().num_running)
        assert engine.stats().num_preemptions == 0
    assert most == 6, "two of them uncropped would fill the pool"


def test_a_crop_moves_off_shared_pages_and_leaves_them_to_others(llama: Any) -> None:
    shared = PROMPT[:80]
    with Engine(llama, None, EngineOptions(num_pages=999, page_size=PAGE)) as engine:
        run(engine, [(shared, greedy())])
        work: list[Any] = [
            ([*shared, 5, 6], greedy(Compression(KeyNorm(), BUDGET, every=4))),
            ([*shared, 7], greedy()),
            ([*shared, 8], greedy(Compression(SnapKV(window=6), BUDGET, chunk=48))),
            ([*shared, 9], greedy(Compression(StreamingLLM(), floor=BUDGET))),
        ]
        results = run(engine, work)
        assert [result.num_cached_tokens for result in results] == [80, 80, 40, 80]
        [again] = run(engine, [([*shared, 7], greedy())])
        assert again.num_cached_tokens == 80, "the shared blocks are still there, and still right"
    for result, own in ((results[1], 7), (again, 7), (results[3], 9)):
        assert list(result.token_ids) == alone(llama, [*shared, own], 12, eos_token_id=None)
