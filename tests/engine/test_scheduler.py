"""The scheduler alone, over a real allocator: no torch, no model."""

from __future__ import annotations

import random

import pytest

from allocator import BlockAllocator, SeqId
from paged_kv.engine.crops import CropPlan
from paged_kv.engine.params import SamplingParams
from paged_kv.engine.plan import Limits
from paged_kv.engine.request import Request, Row
from paged_kv.engine.scheduler import Scheduler

PAGE = 4


class KeepOldest:
    """A policy that nothing here runs."""


class Pages:
    """`PagedMemory` without tensors: one allocator, and a log of what was opened."""

    def __init__(self, num_pages: int, num_layers: int = 2, cached: dict[tuple[int, ...], int] | None = None) -> None:
        self.allocator = BlockAllocator(num_pages, page_size=PAGE, num_layers=num_layers)
        self.opened: list[list[int] | None] = []

    def open(self, tokens=None, *, scope=b"", limit=None) -> tuple[SeqId, int]:
        self.opened.append(tokens)
        opened = self.allocator.open()
        return opened.seq, 0

    def can_append(self, seqs, counts):
        return self.allocator.can_append(seqs, counts)

    def close(self, seq):
        return self.allocator.close(seq)

    def preempt(self, seq):
        return self.allocator.close(seq)


def scheduler(num_pages: int = 1000, **limits) -> tuple[Scheduler, Pages]:
    pages = Pages(num_pages)
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": PAGE, "prefix_caching": False}
    return Scheduler(pages, Limits(**(defaults | limits))), pages


def request(number: int, length: int, *, max_tokens: int = 4, priority: int = 0, start: int = 0, **params) -> Request:
    tokens = list(range(start, start + length))
    return Request(
        f"r{number}", tokens, SamplingParams(max_tokens=max_tokens, **params), arrival=number, priority=priority
    )


def run_step(sched: Scheduler, pages: Pages) -> list[tuple[str, int]]:
    """Plan, append, and give a token to every row that has computed all of its own; ends rows at `max_tokens`."""
    plan = sched.plan()
    pages.allocator.append(plan.seqs, list(plan.counts)) if plan.rows else None
    sched.advance(plan)
    sched.check()
    pages.allocator.check()
    for row, _ in plan.unfit:
        sched.finish(row, "error")
    for row in plan.rows:
        if row.num_todo == 0:
            row.tokens.append(7)
            if row.num_output == row.request.params.max_tokens:
                sched.finish(row, "length")
    return [(row.request.request_id, count) for row, count in zip(plan.rows, plan.counts, strict=True)]


def run_all(sched: Scheduler, pages: Pages, limit: int = 10_000) -> int:
    steps = 0
    while sched.has_work:
        run_step(sched, pages)
        steps += 1
        assert steps < limit, "the scheduler does not end"
    return steps


def test_requests_join_and_leave_between_steps():
    sched, pages = scheduler()
    sched.add(request(0, 3, max_tokens=2))
    assert run_step(sched, pages) == [("r0", 3)]
    sched.add(request(1, 5, max_tokens=3))
    assert run_step(sched, pages) == [("r0", 1), ("r1", 5)]
    assert run_step(sched, pages) == [("r1", 1)]
    assert run_step(sched, pages) == [("r1", 1)]
    assert not sched.has_work
    assert pages.allocator.stats().active_pages == 0


def test_long_prompts_are_computed_in_chunks_beside_decodes():
    sched, pages = scheduler(max_num_batched_tokens=8)
    sched.add(request(0, 2))
    run_step(sched, pages)
    sched.add(request(1, 20))
    assert run_step(sched, pages) == [("r0", 1), ("r1", 7)]
    assert run_step(sched, pages) == [("r0", 1), ("r1", 7)]
    assert run_step(sched, pages) == [("r0", 1), ("r1", 6)]


def test_no_step_exceeds_the_token_budget_or_the_seats():
    sched, pages = scheduler(max_num_seqs=3, max_num_batched_tokens=9)
    for number in range(10):
        sched.add(request(number, 7))
    while sched.has_work:
        step = run_step(sched, pages)
        assert sum(count for _, count in step) <= 9
        assert len(step) <= 3


def test_smaller_priority_runs_earlier_and_equal_priority_is_first_come():
    sched, pages = scheduler(max_num_seqs=1)
    sched.add(request(0, 3, priority=5))
    sched.add(request(1, 3, priority=1))
    sched.add(request(2, 3, priority=1))
    order = []
    while sched.has_work:
        order += [name for name, _ in run_step(sched, pages) if name not in order]
    assert order == ["r1", "r2", "r0"]


def test_when_pages_run_out_the_youngest_row_is_preempted_and_recomputed_later():
    # 2 layers x (8 + 8 tokens) = 8 pages of 4: both prompts fit, their outputs do not.
    sched, pages = scheduler(num_pages=9)
    sched.add(request(0, 8, max_tokens=4))
    sched.add(request(1, 8, max_tokens=4))
    assert run_step(sched, pages) == [("r0", 8), ("r1", 8)]
    assert run_step(sched, pages) == [("r0", 1)]
    assert sched.num_waiting == 1
    assert sched.num_preemptions == 1
    run_all(sched, pages)
    assert pages.allocator.stats().active_pages == 0


def test_a_prompt_that_the_pool_can_never_hold_is_reported_and_the_others_run():
    sched, _ = scheduler(num_pages=7)
    sched.add(request(0, 16))
    sched.add(request(1, 4, max_tokens=1))
    plan = sched.plan()
    [(row, answer)] = plan.unfit
    assert row.request.request_id == "r0"
    assert (answer.needed, answer.total) == (8, 6)
    sched.finish(row, "error")
    assert [row.request.request_id for row in plan.rows] == ["r1"]


def test_a_row_that_outgrows_the_pool_alone_is_reported_with_its_tokens():
    sched, pages = scheduler(num_pages=5)
    sched.add(request(0, 7, max_tokens=100))
    run_step(sched, pages)
    run_step(sched, pages)
    plan = sched.plan()
    [(row, _)] = plan.unfit
    assert row.num_output == 2
    assert plan.rows == ()
    sched.finish(row, "length")
    assert pages.allocator.stats().active_pages == 0


def test_admission_leaves_the_watermark_to_running_rows():
    sched, pages = scheduler(num_pages=13, watermark=4)
    sched.add(request(0, 12, max_tokens=8))
    run_step(sched, pages)
    sched.add(request(1, 8, max_tokens=1))
    assert run_step(sched, pages) == [("r0", 1)]
    sched, pages = scheduler(num_pages=13, watermark=0)
    sched.add(request(0, 12, max_tokens=8))
    run_step(sched, pages)
    sched.add(request(1, 4, max_tokens=1))
    assert run_step(sched, pages) == [("r0", 1), ("r1", 4)]


def test_two_long_prompts_are_not_started_on_the_room_for_one():
    sched, pages = scheduler(num_pages=17, max_num_batched_tokens=8)
    sched.add(request(0, 24, max_tokens=1))
    sched.add(request(1, 24, max_tokens=1))
    run_step(sched, pages)
    assert sched.num_waiting == 1
    run_all(sched, pages)
    assert sched.num_preemptions == 0


def test_a_prompt_waits_for_the_prefill_that_will_publish_its_prefix():
    sched, pages = scheduler(prefix_caching=True, max_num_batched_tokens=64)
    sched.add(request(0, 20))
    sched.add(request(1, 21))
    sched.add(request(2, 20, start=100))
    assert run_step(sched, pages) == [("r0", 20), ("r2", 20)]
    assert ("r1", 21) in run_step(sched, pages)


def test_a_short_common_prefix_is_not_waited_for():
    sched, pages = scheduler(prefix_caching=True, max_num_batched_tokens=64)
    sched.add(request(0, 4))
    sched.add(request(1, 20))
    assert run_step(sched, pages) == [("r0", 4), ("r1", 20)]


def test_aborting_a_waiting_and_a_running_row_gives_everything_back():
    sched, pages = scheduler(max_num_seqs=1)
    first, second = request(0, 4), request(1, 4)
    sched.add(first)
    sched.add(second)
    run_step(sched, pages)
    sched.finish(second.rows[0], "abort")
    sched.finish(first.rows[0], "abort")
    assert not sched.has_work
    assert sched.plan().rows == ()
    assert pages.allocator.stats().active_pages == 0


def test_a_request_takes_as_many_seats_as_it_asks_completions():
    sched, pages = scheduler(max_num_seqs=4)
    sched.add(request(0, 4, n=3))
    sched.add(request(1, 4, n=2))
    sched.add(request(2, 4))
    assert run_step(sched, pages) == [("r0", 4)]
    with pytest.raises(ValueError, match="5 completions asked for, at most 4"):
        sched.add(request(3, 4, n=5))


def test_forks_run_and_are_preempted_one_by_one():
    sched, pages = scheduler(num_pages=11)
    parent = request(0, 8, n=3, max_tokens=4)
    sched.add(parent)
    plan = sched.plan()
    pages.allocator.append(plan.seqs, list(plan.counts))
    sched.advance(plan)
    row = parent.rows[0]
    forks = pages.allocator.fork(row.seq, 2)
    sched.fork(row, [Row(parent, i + 1, list(row.tokens), seq, row.num_computed) for i, seq in enumerate(forks)])
    for each in parent.rows:
        each.tokens.append(each.index)
    run_all(sched, pages)
    assert len(parent.done) == 3
    assert [row.num_output for row in parent.done] == [4, 4, 4]
    assert pages.allocator.stats().active_pages == 0


def test_rows_in_lockstep_step_together_or_not_at_all():
    sched, pages = scheduler()
    beams = request(0, 4, beam_width=2)
    sched.add(beams)
    run_step(sched, pages)
    row = beams.rows[0]
    [fork] = pages.allocator.fork(row.seq)
    sched.fork(row, [Row(beams, 1, [*row.tokens, 1, 2], fork, row.num_computed)])
    # The second beam is ahead by tokens: it catches up to one token before its end while the first one waits.
    assert run_step(sched, pages) == [("r0", 2)]
    assert run_step(sched, pages) == [("r0", 1), ("r0", 1)]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4 is below max_num_seqs=8"),
        ({"watermark": -1}, "watermark must be at least 0, got -1"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_and_the_oldest_is_never_preempted_on_a_tight_pool(seed):
    dice = random.Random(seed)
    sched, pages = scheduler(num_pages=dice.randrange(21, 60), max_num_seqs=dice.randrange(1, 8))
    live: dict[str, Request] = {}
    for number in range(30):
        new = request(number, dice.randrange(1, 20), max_tokens=dice.randrange(1, 18))
        live[new.request_id] = new
        sched.add(new)
    preempted_before = 0
    while sched.has_work:
        plan_oldest = min(sched.running, key=lambda row: row.request.arrival, default=None)
        run_step(sched, pages)
        if sched.num_preemptions > preempted_before and plan_oldest is not None:
            assert plan_oldest.finish_reason is not None or plan_oldest.seq is not None
        preempted_before = sched.num_preemptions
        if dice.random() < 0.05:
            victim = dice.choice(list(live.values()))
            for row in list(victim.rows):
                sched.finish(row, "abort")
    assert all(not each.rows for each in live.values())
    assert pages.allocator.stats().active_pages == 0


def cropping(number: int, crops: CropPlan | None, length: int = 40, max_tokens: int = 100) -> Request:
    asked = request(number, length, max_tokens=max_tokens)
    asked.crops = crops
    return asked


def run_cropped(sched: Scheduler, pages: Pages) -> int:
    """Run to the end with scheduled crops that keep the oldest tokens; returns the most rows that ran at once."""
    most = 0
    while sched.has_work:
        before = sched.running
        run_step(sched, pages)
        for row in {*before, *sched.running}:
            crops = row.request.crops
            if row.seq is None or row not in sched.running or crops is None:
                continue
            if crops.is_due(row.num_prompt, row.num_computed, row.num_live):
                budget = crops.budgets[0]
                live = int(pages.allocator.live_lens([row.seq]).max())
                pages.allocator.crop(row.seq, {layer: range(min(live, budget)) for layer in crops.budgets})
                row.num_live = min(live, budget)
                sched.pages_freed()
        most = max(most, len(sched.running))
    return most


@pytest.mark.parametrize("when", [{"every": 16}, {"longest": 24}, {"every": 16, "chunk": 16}], ids=str)
def test_admission_counts_what_cropped_rows_grow_by_until_their_next_crop(when: dict[str, int]) -> None:
    # Beside one prompt of 40 the pool holds 7 rows that have just been cropped to 8, but no more than 4 at their peak.
    sched, pages = scheduler(2 * 36, max_num_seqs=32, max_num_batched_tokens=64)
    crops = CropPlan(KeepOldest(), {0: 8, 1: 8}, **when)
    for number in range(12):
        sched.add(cropping(number, crops))
    most = run_cropped(sched, pages)
    assert sched.num_preemptions == 0
    assert most >= 4


def test_a_row_alone_starts_even_if_its_peak_would_not_fit() -> None:
    sched, pages = scheduler(1 + 2 * 11, max_num_seqs=8, max_num_batched_tokens=64)
    sched.add(cropping(0, CropPlan(KeepOldest(), {0: 40, 1: 40}, every=40), length=30, max_tokens=8))
    run_cropped(sched, pages)
    assert pages.allocator.stats().active_pages == 0
    assert sched.num_preemptions == 0


@pytest.mark.parametrize(
    ("crops", "computed", "output", "expected"),
    [
        pytest.param(None, 0, 0, 40, id="no crops: the prompt"),
        pytest.param(None, 40, 1, 1, id="no crops: the next token"),
        pytest.param({"every": 16}, 0, 0, 40, id="the prompt is the peak"),
        pytest.param({"every": 64}, 0, 0, 72, id="growth is the peak"),
        pytest.param({"every": 16}, 44, 5, 12, id="what is left until the next crop"),
        pytest.param({"every": 64}, 138, 99, 2, id="no more than its last tokens"),
        pytest.param({"longest": 20}, 44, 5, 8, id="up to a length"),
        pytest.param({"every": 16, "is_partial": True}, 44, 5, 1, id="some layers keep all"),
        pytest.param({}, 44, 5, 1, id="one crop alone"),
    ],
)
def test_tokens_that_a_row_may_come_to_hold(
    crops: dict[str, int] | None, computed: int, output: int, expected: int
) -> None:
    plan = None if crops is None else CropPlan(KeepOldest(), {0: 8, 1: 8}, **crops)
    row = cropping(0, plan).rows[0]
    row.tokens += [7] * output
    row.num_computed = computed
    row.num_live = computed if computed <= 40 else 8 + (computed - 40) % (crops or {}).get("every", 1000)
    assert row.to_come == expected
