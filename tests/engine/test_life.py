"""An engine from opening to closing: one model, many threads, interrupts, use after the end."""

from __future__ import annotations

import gc
import signal
import threading

import pytest
from engine_models import alone, prompts, tiny

from paged_kv.engine import LLM, SamplingParams
from paged_kv.engine.engine import Engine
from paged_kv.engine.intake import EngineClosed
from paged_kv.engine.loading import ModelNotFound, dtype_of
from paged_kv.engine.switch import ModelInUse
from paged_kv.optimize import optimize_for_cpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def open_llm(model, **options) -> LLM:
    return LLM(model, **({"num_pages": 2000, "page_size": 4, "optimize": False} | options))


def tokens(results) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


def test_threads_share_an_engine_and_each_gets_its_own_results(llama):
    batches = [prompts(6, seed=seed) for seed in range(4)]
    expected = [[alone(llama, prompt, 12) for prompt in batch] for batch in batches]
    got: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        got[number] = tokens(llm.generate(batches[number], GREEDY, use_tqdm=False))

    with open_llm(llama) as llm:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Steps serve all threads together: one after the other they would take four times as many.
        assert llm.engine.stats().num_steps < 4 * 12
    assert [got[number] for number in range(4)] == expected


def test_calls_inside_the_loop_over_a_stream_lose_nothing(llama):
    batch = prompts(7, seed=5)
    expected = [alone(llama, prompt, 12) for prompt in batch]
    seen = {}
    with open_llm(llama) as llm:
        for number, result in llm.stream(iter(batch), GREEDY, max_in_flight=3):
            [again] = llm.generate([batch[number]], GREEDY, use_tqdm=False)
            assert again.token_ids == result.token_ids
            seen[number] = list(result.token_ids)
    assert [seen[number] for number in range(7)] == expected


def test_leaving_a_stream_early_frees_its_pages(llama):
    with open_llm(llama) as llm:
        stream = llm.stream(iter(prompts(5)), GREEDY, max_in_flight=4)
        next(stream)
        stream.close()
        assert llm.engine.num_unfinished == 0
        assert llm.engine.stats().pages_used == 0


def test_a_processor_that_calls_the_engine_it_runs_in_is_told_so(llama):
    def calls_back(ids, scores):
        llm.generate([[5]], GREEDY, use_tqdm=False)

    with open_llm(llama) as llm:
        bad, good = llm.generate(
            [[5, 6], [5, 6]],
            [SamplingParams(max_tokens=2, logits_processors=(calls_back,)), GREEDY],
            use_tqdm=False,
        )
    assert "called from within a step" in bad.error
    assert list(good.token_ids) == alone(llama, [5, 6], 12)


def test_an_engine_stepped_by_two_threads_says_what_to_use(llama):
    inside, go_on = threading.Event(), threading.Event()

    def waits(ids, scores):
        inside.set()
        go_on.wait(10)
        return scores

    with Engine(llama, options=None) as engine:
        engine.add_request("a", [5, 6], SamplingParams(max_tokens=1, logits_processors=(waits,)))
        thread = threading.Thread(target=engine.step)
        thread.start()
        inside.wait(10)
        try:
            for call in (engine.step, lambda: engine.add_request("b", [5])):
                with pytest.raises(RuntimeError, match="use LLM or AsyncEngine"):
                    call()
        finally:
            go_on.set()
            thread.join()


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests were started in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_step_and_leaves_a_working_engine(llama):
    prompt = prompts(1, seed=6)[0]

    def interrupts(ids, scores):
        signal.raise_signal(signal.SIGINT)
        return scores

    with open_llm(llama) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], SamplingParams(logits_processors=(interrupts,)), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.engine.stats().pages_used == 0
        llm.engine.check()
        assert tokens(llm.generate([prompt], GREEDY, use_tqdm=False)) == [alone(llama, prompt, 12)]


def test_a_second_engine_on_a_model_is_refused_until_the_first_is_closed():
    model = tiny("llama")
    first = open_llm(model, optimize=True)
    with pytest.raises(ModelInUse, match="close that LLM first"):
        open_llm(model)
    first.close()
    with open_llm(model, optimize=True) as llm:
        assert tokens(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)) == [alone(tiny("llama"), [5, 6, 7], 12)]


def test_an_engine_that_is_dropped_gives_its_model_back():
    model = tiny("llama").train()
    before = (model.config._attn_implementation, [type(module) for module in model.modules()])
    llm = open_llm(model, optimize=True)
    assert model.config._attn_implementation != before[0]
    del llm
    gc.collect()
    assert (model.config._attn_implementation, [type(module) for module in model.modules()]) == before
    assert model.training


def test_optimizing_twice_changes_nothing_more_and_is_undone_in_order():
    model = tiny("llama")
    before = [type(module) for module in model.modules()]
    first, second = optimize_for_cpu(model), optimize_for_cpu(model)
    assert (second.num_packed, second.num_fused) == (0, 0)
    second.undo()
    first.undo()
    assert [type(module) for module in model.modules()] == before


def test_everything_but_close_raises_after_close(llama):
    llm = open_llm(llama)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate([[5]], GREEDY, use_tqdm=False),
        lambda: list(llm.stream([[5]], GREEDY)),
        lambda: llm.score([5], [[6]]),
        lambda: llm.engine.step(),
        lambda: llm.engine.add_request("a", [5]),
    ):
        with pytest.raises(EngineClosed):
            call()


def test_closing_ends_what_another_thread_waits_for(llama):
    ended: list[EngineClosed] = []
    started = threading.Event()

    def tells(ids, scores):
        started.set()
        return scores

    def work() -> None:
        try:
            llm.generate([[5]], SamplingParams(max_tokens=250, ignore_eos=True, logits_processors=(tells,)))
        except EngineClosed as error:
            ended.append(error)

    llm = open_llm(llama)
    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    llm.close()
    thread.join(10)
    assert [type(error) for error in ended] == [EngineClosed]
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/where", "there is no folder './no/where'"),
        ("deep/er/still", "there is no folder 'deep/er/still'"),
        ("org/name", "no model of that name in the Hub's cache"),
        ("{file}", "is a file: a model is a folder"),
        ("{folder}", "no model could be loaded from the folder"),
    ],
)
def test_a_path_without_a_model_is_named_with_what_is_wrong(path, message, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=message) as caught:
        LLM(path.format(file=tmp_path / "file", folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_options_are_taken_under_their_names_in_vllm(llama):
    with LLM(
        llama, block_size=8, kv_cache_memory_bytes=1 << 20, enforce_eager=True, tensor_parallel_size=1, optimize=False
    ) as llm:
        assert (llm.engine.options.page_size, llm.engine.options.kv_cache_bytes) == (8, 1 << 20)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not supported"):
        LLM(llama, tensor_parallel_size=2)
    with pytest.raises(TypeError, match="block_size is another name of page_size"):
        LLM(llama, page_size=4, block_size=4)


@pytest.mark.parametrize(("name", "found"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes_are_taken_by_name(name, found):
    assert str(dtype_of(name)) == f"torch.{found}"
    assert dtype_of("auto") is None
    for wrong in ("int8", "fast", "load"):
        with pytest.raises(ValueError, match="dtype must be"):
            dtype_of(wrong)
