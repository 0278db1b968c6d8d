"""Who runs in the next step: continuous batching in integers.

Owns: the waiting queue, the running rows, admission, chunking of prompts, preemption.
Does not know: torch, what a token means, what is in a page.

A step computes at most `max_num_batched_tokens` tokens: one of each row that decodes, then chunks of prompts in order
of priority and arrival, then newly admitted rows. Whether pages suffice is asked of `can_append`; when they do not, the
youngest row gives its pages back and is recomputed later (its published blocks make that cheap). The oldest row is
never preempted for a younger one and admission is strictly in order, so that every request ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allocator import Admission, Verdict
from paged_kv.engine.hints import PrefixHints
from paged_kv.engine.plan import Limits, Memory, Relief, StepPlan
from paged_kv.engine.queue import WaitingQueue
from paged_kv.engine.request import Request, Row


class Scheduler:
    """Decides each step's rows and token counts; deterministic."""

    def __init__(self, memory: Memory, limits: Limits, relief: Relief | None = None) -> None:
        """Schedule rows of `memory`; `relief` frees pages of running rows before any is preempted."""
        self._memory = memory
        self._relief = relief
        self.limits = limits
        self._prefixes = PrefixHints(limits.page_size if limits.prefix_caching else None)
        self._waiting = WaitingQueue()
        self._running: dict[Row, None] = {}
        self._blocked = False
        self.num_preemptions = 0

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Rows without pages."""
        return len(self._waiting)

    @property
    def running(self) -> list[Row]:
        """Rows with pages, in order of admission."""
        return list(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any row is left."""
        return bool(self._running) or bool(self._waiting)

    def check(self) -> None:
        """Assert that running rows have pages and waiting ones none.

        Raises:
            AssertionError: They do not.
        """
        for row in self._running:
            assert row.seq is not None, f"running row of {row.request.request_id} has no pages"
            assert row in row.request.rows, f"running row of {row.request.request_id} is not among its rows"
            assert 0 <= row.num_computed <= len(row.tokens), f"row of {row.request.request_id} is ahead of its tokens"
        for row in self._waiting:
            assert row.seq is None, f"waiting row of {row.request.request_id} has pages"
        assert sum(self._seats(row) for row in self._running) <= self.limits.max_num_seqs, "more rows than seats"

    # -- changes from outside ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            ValueError: It asks for more rows than may ever run at once.
        """
        if request.seats > self.limits.max_num_seqs:
            raise ValueError(f"{request.seats} completions asked for, at most {self.limits.max_num_seqs} run at once")
        for row in request.rows:
            self._waiting.push(row)

    def advance(self, plan: StepPlan) -> None:
        """Note that the step's tokens are in the pages."""
        for row, count in zip(plan.rows, plan.counts, strict=True):
            row.num_computed += count
            row.num_live += count

    def fork(self, row: Row, others: Iterable[Row]) -> None:
        """Let forks of a running row run as well; they hold their own sequence already."""
        row.request.forked = True
        for other in others:
            row.request.rows.append(other)
            self._running[other] = None

    def finish(self, row: Row, reason: str) -> None:
        """Take a row out, running or waiting, and give its pages back."""
        row.finish_reason = reason
        row.request.rows.remove(row)
        row.request.done.append(row)
        self._release(row)

    def drop(self, row: Row) -> None:
        """Take a row out without a result (a beam that lost)."""
        row.request.rows.remove(row)
        row.finish_reason = "dropped"
        self._release(row)

    def pages_freed(self) -> None:
        """Note that pages came back by another way (a crop): blocked admission is tried again."""
        self._blocked = False

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step; `append` of its sequences and counts will not run out of pages."""
        work = self._running_work()
        preempted: list[Row] = []
        unfit: dict[Row, Admission] = {}
        self._make_room(work, preempted, unfit)
        if self._waiting and not preempted and not self._blocked:
            self._admit(work, unfit)
        if not work and not preempted and not unfit and self._running:
            self._break_stall(preempted, unfit)
        return StepPlan(tuple(work), tuple(work.values()), tuple(preempted), tuple(unfit.items()))

    def _running_work(self) -> dict[Row, int]:
        """Tokens of the running rows: decodes, then prompt chunks by priority and arrival, within the budget."""
        budget = self.limits.max_num_batched_tokens
        work: dict[Row, int] = {}
        prefill: list[Row] = []
        for row in self._running:
            if row.num_todo > 1:
                prefill.append(row)
            elif count := min(self._wanted(row), budget):
                work[row] = count
                budget -= count
        for row in sorted(prefill, key=_age):
            if count := min(self._wanted(row), budget):
                work[row] = count
                budget -= count
        return work

    @staticmethod
    def _wanted(row: Row) -> int:
        """Tokens that a row would compute next if the budget allowed."""
        todo = row.num_todo
        request = row.request
        if request.crops is not None:
            # Crops fall on the same tokens when a row is recomputed in chunks, or guesses ahead.
            until = request.crops.until_due(row.num_prompt, row.num_computed, row.num_live)
            if until is not None:
                return min(todo + len(row.draft), until)
        if request.lockstep and request.forked:
            if todo > 1:
                return todo - 1
            return int(all(other.seq is not None and other.num_todo == 1 for other in request.rows))
        return todo + len(row.draft)

    def _make_room(self, work: dict[Row, int], preempted: list[Row], unfit: dict[Row, Admission]) -> None:
        """Take rows out of `work` until it fits: drafts first, then what may be cropped, then pages of the youngest."""
        reserve = 0 if self._relief is None else self._relief.reserve(self._running)
        while work:
            seqs = [row.seq for row in work if row.seq is not None]
            answer = self._memory.can_append(seqs, list(work.values()))
            fits = answer.verdict is Verdict.OK
            if fits and answer.available - answer.needed >= reserve:
                return
            if any(row.draft for row in work):
                for row in work:
                    work[row] -= min(len(row.draft), work[row] - 1)
                    row.draft = []
                continue
            if self._relief is not None and self._relief.relieve(self.running):
                continue
            if fits:
                return
            victim = max((row for row in self._running if row not in unfit), key=_age)
            group = [row for row in victim.request.rows if row.seq is not None] if victim.request.lockstep else [victim]
            alone = len(self._running) - len(unfit) == len(group)
            for row in group:
                work.pop(row, None)
                if alone:
                    unfit[row] = answer
                else:
                    self._preempt(row)
                    preempted.append(row)

    def _break_stall(self, preempted: list[Row], unfit: dict[Row, Admission]) -> None:
        """No row can go on: beams hold pages while their siblings wait for some. The youngest request gives way."""
        youngest = max(self._running, key=_age).request
        group = [row for row in self._running if row.request is youngest]
        if len(group) == len(self._running):
            answer = self._memory.can_append([row.seq for row in group if row.seq is not None], [1] * len(group))
            unfit.update(dict.fromkeys(group, answer))
            return
        for row in group:
            self._preempt(row)
            preempted.append(row)
        self._blocked = False

    def _admit(self, work: dict[Row, int], unfit: dict[Row, Admission]) -> None:
        """Start waiting rows in order, as far as tokens, seats and pages go."""
        budget = self.limits.max_num_batched_tokens - sum(work.values())
        seats = self.limits.max_num_seqs - sum(self._seats(row) for row in self._running)
        # Every prompt that has begun is counted in full, so that two long ones are not started on the room for one, and
        # so is what a row grows by until its next scheduled crop.
        pending = {row: max(work.get(row, 0), row.to_come) for row in self._running}
        in_flight = self._prefixes.in_flight(self._running)
        deferred: list[Row] = []
        while budget > 0 and seats > 0 and len(deferred) < 4 * self.limits.max_num_seqs:
            row = self._waiting.pop()
            if row is None:
                break
            if self._seats(row) > seats:
                self._waiting.push(row)
                break
            if self._prefixes.is_worth_waiting(row, in_flight):
                deferred.append(row)
                continue
            refusal = self._start(row, pending)
            if refusal is not None and not self._running:
                unfit[row] = refusal
                continue
            if refusal is not None:
                self._waiting.push(row)
                self._blocked = True
                break
            seats -= self._seats(row)
            pending[row] = row.to_come
            if row.request.lockstep and row.request.forked and row.num_todo == 1:
                continue  # its siblings may be ready, but are not planned: all of them step next time
            if count := min(self._wanted(row), budget):
                work[row] = count
                budget -= count
            in_flight |= self._prefixes.in_flight([row])
        for row in deferred:
            self._waiting.push(row)

    def _start(self, row: Row, pending: dict[Row, int]) -> Admission | None:
        """Open a waiting row's sequence if its tokens fit beside the pending ones and the watermark, or say why not."""
        request = row.request
        known = row.tokens if self.limits.prefix_caching else None
        seq, cached = self._memory.open(known, scope=request.scope, limit=request.most_cached)
        row.num_computed = row.num_live = cached
        seqs = [other.seq for other in pending if other.seq is not None]
        needed = row.to_come if pending else row.to_hold
        answer = self._memory.can_append([*seqs, seq], [*pending.values(), needed])
        spare = answer.available - answer.needed
        crowded = spare < self.limits.watermark or not self._floors_fit([*pending, row], answer.total)
        if answer.verdict is not Verdict.OK or (pending and crowded):
            self._memory.close(seq)
            row.num_computed = row.num_live = 0
            return answer
        row.seq = seq
        if not row.num_output:
            request.num_cached_tokens = cached
        self._running[row] = None
        return None

    def _floors_fit(self, rows: Sequence[Row], num_pages: int) -> bool:
        """Whether the pool holds all rows once pressure has cropped those that allow it, with room to go on."""
        if not self.limits.num_tables or all(row.floor is None for row in rows):
            return True
        size = self.limits.page_size
        least = sum(-(-row.least_live // size) + 1 for row in rows)
        return least <= num_pages // self.limits.num_tables

    # -- pages back -------------------------------------------------------------------------------------------------

    def _preempt(self, row: Row) -> None:
        assert row.seq is not None
        self._memory.preempt(row.seq)
        del self._running[row]
        row.seq = None
        row.num_computed = row.num_live = row.num_cropped = 0
        row.crop_pending = False
        row.draft = []
        row.request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(row)

    def _release(self, row: Row) -> None:
        """Give a row's pages back, or leave its entry in the queue to be skipped."""
        self._blocked = False
        if row in self._running:
            del self._running[row]
            if row.seq is not None:
                self._memory.close(row.seq)
                row.seq = None
        else:
            self._waiting.forget(row)

    @staticmethod
    def _seats(row: Row) -> int:
        return 1 if row.request.forked else row.request.params.width


def _age(row: Row) -> tuple[tuple[int, int], int]:
    """Sorts rows from oldest to youngest."""
    return (row.request.key, row.index)
