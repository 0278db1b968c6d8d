"""A state machine over every operation: the allocator, a memory that really applies its plans, and the plain model.

`machine_state` holds what is checked after every step, `machine_tokens` the operations on tokens; here are those on
sequences, prefixes and the pool, and the choice among all of them.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from allocator import BlocksCleared, InvalidArgument, LayerKind, OutOfPages, PagesPinned, StaleHandle
from tests.allocator.machine_tokens import TokenOperations
from tests.allocator.model import Sequence, chain, tables_of
from tests.allocator.strategies import tokens

# What a step does, and how often. A step that needs a sequence (or a pin) where none is opens one instead.
WEIGHTS = {"append": 8, "open": 4, "commit": 4, "crop": 4, "truncate": 3, "close": 3, "fork": 2, "slide": 1}
RARE = ("write_cross", "reserve", "pin", "unpin", "pin_prefix", "grow", "shrink", "restore", "refuse", "clear_prefix")
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)] + list(RARE)
# Where the configuration gives them something to do, these come as often as appends.
SPECIAL = {
    "windows": ["slide"] * 7,
    "cross": ["write_cross"] * 7,
    "prefix": ["open"] * 4 + ["commit", "close", "fork"] * 2,
}
WITHOUT_SEQUENCES = {"open", "pin_prefix", "grow", "shrink", "restore", "refuse", "clear_prefix"}


class AllocatorMachine(TokenOperations):
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.operations()), label="operation")
        if not (self.seqs or operation in WITHOUT_SEQUENCES) or (operation == "unpin" and not self.pins):
            operation = "open"
        getattr(self, operation)(data)

    def operations(self) -> list[str]:
        has = {
            "windows": any(window is not None for window in self.windows),
            "cross": LayerKind.CROSS in self.kinds,
            "prefix": self.config.prefix,
        }
        return OPERATIONS + [name for what, names in SPECIAL.items() if has[what] for name in names]

    # Sequences come and go

    def open(self, data: st.DataObject) -> None:
        prompt = data.draw(tokens())
        scope = data.draw(st.sampled_from([b"", b"salt"]))
        limit = data.draw(st.sampled_from([None, None, None, 3, 0]))
        if self.published and data.draw(st.sampled_from([True, True, False])):
            scope, known = self.meanings[data.draw(st.sampled_from(sorted(self.published)))]
            prompt = known + prompt
        elif self.meanings and data.draw(st.booleans()):
            scope, known = self.meanings[data.draw(st.sampled_from(sorted(self.meanings)))]
            prompt = known + prompt
        before, reserved = self.available, self.reserved
        most = max(0, len(prompt) - 1) if limit is None else min(limit, max(0, len(prompt) - 1))
        hashes = chain(scope, prompt[:most], self.size)
        whole = 0
        while self.config.prefix and whole + 1 < len(hashes) and hashes[whole + 1] in self.published:
            whole += 1
        assert self.allocator.peek(prompt, scope=scope, limit=limit) == whole * self.size
        opened = self.allocator.open(prompt, scope=scope, limit=limit)
        self.memory.apply(opened.plan)
        cached = opened.num_cached_tokens
        if cached:
            event("a prefix was hit" if cached >= self.size else "a part of a block was copied")
        assert cached <= most
        if reserved == 0:
            assert cached // self.size == whole
            self.check_partial(hashes[whole], prompt[whole * self.size : most], cached - whole * self.size, before)
        rows = [[(p, self.content(scope, prompt[: p + 1], row)) for p in range(cached)] for row in range(self.num_rows)]
        assert opened.seq not in self.seqs
        assert opened.seq not in self.closed
        self.seqs[opened.seq] = Sequence(
            scope, rows, prompt[:cached], diverged=not all(self.grows), committed=cached // self.size
        )
        assert self.available >= reserved
        if data.draw(st.booleans()):
            self.append_tokens([opened.seq], [prompt[cached:]])
            self.commit_one(opened.seq, 0)

    def check_partial(self, parent: bytes, rest: list[int], partial: int, available: int) -> None:
        if not self.config.partial:
            assert partial == 0
            return
        best = 0
        for digest in self.published:
            scope, meaning = self.meanings[digest]
            if chain(scope, meaning, self.size)[-2] == parent:
                same = 0
                for mine, other in zip(rest, meaning[-self.size :], strict=False):
                    if mine != other:
                        break
                    same += 1
                best = max(best, same)
        assert partial == best or (partial == 0 and available < 3 * self.num_rows + self.num_rows * len(rest))

    def close(self, data: st.DataObject) -> None:
        preempt = data.draw(st.booleans())
        seq = self.draw(data, st.sampled_from)
        before = self.available
        plan = self.allocator.preempt(seq) if preempt else self.allocator.close(seq)
        self.carry_out(plan, before)
        del self.seqs[seq]
        self.closed.append(seq)

    def fork(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, 2))
        seq = self.draw(data, st.sampled_from)
        before = self.available
        for child in self.allocator.fork(seq, n):
            assert child not in self.seqs
            self.seqs[child] = self.seqs[seq].clone()
        assert self.available == before

    # Prefixes

    def commit(self, data: st.DataObject) -> None:
        self.commit_one(self.draw(data, st.sampled_from), data.draw(st.integers(0, 3)))

    def commit_one(self, seq: Any, priority: int) -> None:
        model = self.seqs[seq]
        self.read_events()  # an append of the same step may have evicted blocks
        hashes = chain(model.scope, model.tokens, self.size)[1:]
        for at, digest in enumerate(hashes):
            self.meanings[digest] = (model.scope, model.tokens[: (at + 1) * self.size])
        new = [digest for digest in hashes[model.committed :] if digest not in self.published]
        published = self.allocator.commit(seq, model.tokens, priority=priority)
        if self.config.prefix and not model.diverged:
            assert published == len(new)
            if len(hashes) - model.committed > len(new):
                event("a commit met published blocks")
            model.committed = max(model.committed, len(hashes))
        else:
            assert published == 0
        assert self.available >= self.reserved

    def clear_prefix(self, data: st.DataObject) -> None:
        before, count = self.available, len(self.published)
        assert self.allocator.clear_prefix() == count
        assert self.allocator.stats().cached_pages == 0
        assert self.available == before

    # The pool's life

    def reserve(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, 9))
        seq = self.draw(data, st.sampled_from)
        [needed] = self.pages_needed([seq], [n])
        others = self.reserved - self.seqs[seq].reserved
        if needed > self.available - others:
            with self.refused(OutOfPages):
                self.allocator.reserve(seq, n)
        else:
            assert self.allocator.reserve(seq, n) == needed
            self.seqs[seq].reserved = needed
            assert self.allocator.stats().reserved_pages == others + needed

    def pin(self, data: st.DataObject) -> None:
        seq = self.draw(data, st.sampled_from)
        before = self.available
        pin, pages = self.allocator.pin(seq)
        assert pages.tolist() == [page for table in tables_of(self.allocator, seq) for page in table]
        assert self.available == before
        self.pins[pin] = (pages.tolist(), self.memory.pages[pages].copy())

    def pin_prefix(self, data: st.DataObject) -> None:
        prompt = data.draw(tokens())
        scope = data.draw(st.sampled_from([b"", b"salt"]))
        hashes = chain(scope, prompt, self.size)[1:]
        hits = 0
        while hits < len(hashes) and hashes[hits] in self.published:
            hits += 1
        before = self.available
        try:
            pin, covered = self.allocator.pin_prefix(prompt, scope=scope)
        except OutOfPages:
            assert self.reserved > 0
            return
        assert covered == hits * self.size
        pages = self.allocator._core.pins[pin].tolist()
        self.pins[pin] = (pages, self.memory.pages[pages].copy())
        assert before >= self.available >= self.reserved

    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        before = self.available
        plan = self.allocator.unpin(pin)
        assert self.available == before + plan.freed
        del self.pins[pin]
        with self.refused(StaleHandle):
            self.allocator.unpin(pin)

    def grow(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, 9))
        before = self.available
        self.allocator.grow(n)
        assert self.available == before + n
        self.memory.resize(self.allocator.num_pages)

    def shrink(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 12))
        left = self.allocator.num_pages - n
        if left < 2:
            with self.refused(InvalidArgument):
                self.allocator.shrink(n)
            return
        active = len(self.owners())
        pinned = {page for pages, _ in self.pins.values() for page in pages}
        if active + self.reserved > left - 1:
            with self.refused(OutOfPages) as caught:
                self.allocator.shrink(n)
            assert (caught.value.needed, caught.value.available) == (active + self.reserved, left - 1)
        elif any(page >= left for page in pinned):
            with self.refused(PagesPinned):
                self.allocator.shrink(n)
        else:
            plan = self.allocator.shrink(n)
            assert (plan.copies.src >= left).all()
            assert (plan.copies.dst < left).all()
            self.memory.apply(plan)
            self.memory.resize(left)
            assert self.allocator.num_pages == left

    def restore(self, data: st.DataObject) -> None:
        data = self.allocator.snapshot()
        self.read_events()
        self.allocator = self.config.build(self.allocator.num_pages)
        self.allocator.restore(data)
        assert self.allocator.snapshot() == data
        if self.config.prefix:
            assert self.allocator.drain_events() == [BlocksCleared()]

    # What must be refused

    def refuse(self, data: st.DataObject) -> None:
        if self.closed:
            stale = data.draw(st.sampled_from(self.closed))
            for call in (self.allocator.close, self.allocator.seen_len, self.allocator.fork, self.allocator.pin):
                with self.refused(StaleHandle):
                    call(stale)
            with self.refused(StaleHandle):
                self.allocator.append([*self.seqs, stale], 1)
        if self.seqs:
            seq = self.draw(data, st.sampled_from)
            live = len(self.seqs[seq].rows[0])
            with self.refused(InvalidArgument):
                self.allocator.append([seq], -1)
            with self.refused(InvalidArgument):
                self.allocator.append([seq, seq], 1)
            with self.refused(InvalidArgument):
                self.allocator.crop(seq, {0: [live]})
            with self.refused(InvalidArgument):
                self.allocator.truncate([seq], len(self.seqs[seq].tokens) + 1)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings.get_profile(os.environ.get("ALLOCATOR_PROFILE", "allocator"))
