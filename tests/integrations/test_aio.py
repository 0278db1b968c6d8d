"""The engine from asyncio."""

from __future__ import annotations

import asyncio

import pytest

from paged_kv.engine import SamplingParams
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import EngineClosed, InvalidRequest
from paged_kv.engine.llm import LLM
from paged_kv.engine.options import EngineOptions
from paged_kv.integrations.aio import AsyncEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"num_pages": 1000, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "optimize": False}


@pytest.fixture(scope="module")
def loaded(model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)


def run(loaded, work, **options):
    async def main():
        async with AsyncEngine(Engine(*loaded, EngineOptions(**(OPTIONS | options)))) as engine:
            return await asyncio.wait_for(work(engine), 60)

    return asyncio.run(main())


async def collect(engine, prompt, params=GREEDY, **options):
    return [result async for result in engine.generate(prompt, params, **options)]


async def settled(engine):
    for _ in range(200):
        stats = await engine.stats()
        if stats.pages_used == 0 and stats.num_running == stats.num_waiting == 0:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError("pages are still held")


def test_many_requests_at_once_give_what_they_give_alone(loaded):
    batch = [f"prompt number {i}"[: 8 + i] for i in range(9)]

    async def work(engine):
        return await asyncio.gather(*(collect(engine, prompt) for prompt in batch))

    streams = run(loaded, work)
    with LLM(loaded[0], tokenizer=loaded[1], **OPTIONS) as llm:
        expected = [result.text for result in llm.generate(batch, GREEDY, use_tqdm=False)]
    assert [stream[-1].text for stream in streams] == expected
    for stream in streams:
        assert [result.finished for result in stream] == [False] * (len(stream) - 1) + [True]
        assert len(stream) > 1


def test_no_more_requests_than_allowed_are_in_the_engine(loaded):
    async def work(engine):
        most = 0

        async def watch():
            nonlocal most
            while True:
                stats = await engine.stats()
                most = max(most, stats.num_running + stats.num_waiting)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(collect(engine, [5, 6, 7 + i]) for i in range(10)))
        watcher.cancel()
        return most

    async def main():
        async with AsyncEngine(Engine(*loaded, EngineOptions(**OPTIONS)), max_waiting=2) as engine:
            return await work(engine)

    assert 1 <= asyncio.run(main()) <= 2


def test_leaving_a_generator_or_cancelling_its_task_frees_the_pages(loaded):
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def work(engine):
        async for _ in engine.generate([5, 6, 7], long):
            break
        task = asyncio.create_task(collect(engine, [8, 9, 10], long))
        while (await engine.stats()).num_running == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(engine)
        return await collect(engine, [5, 6])

    assert run(loaded, work)[-1].finish_reason == "length"


def test_a_refused_request_raises_in_its_own_generator(loaded):
    async def work(engine):
        fine = asyncio.create_task(collect(engine, [5, 6]))
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await collect(engine, [])
        first = asyncio.create_task(collect(engine, [5, 6], request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="'same' is in use"):
            await collect(engine, [5, 6], request_id="same")
        return await fine, await first

    fine, first = run(loaded, work)
    assert fine[-1].finished
    assert first[-1].finished


def test_an_exception_in_the_model_reaches_every_request(loaded):
    def broken(*args, **kwargs):
        raise RuntimeError("no power")

    async def work(engine):
        hook = loaded[0].model.layers[0].register_forward_pre_hook(broken)
        try:
            return await asyncio.gather(*(collect(engine, [5, 6]) for _ in range(2)), return_exceptions=True)
        finally:
            hook.remove()

    assert [str(error) for error in run(loaded, work)] == ["no power"] * 2


def test_a_closed_engine_refuses(loaded):
    async def main():
        engine = AsyncEngine(Engine(*loaded, EngineOptions(**OPTIONS)))
        await engine.close()
        with pytest.raises(EngineClosed):
            await collect(engine, [5, 6])

    asyncio.run(main())
    assert loaded[0].config._attn_implementation != "paged_kv_packed"
