"""A state machine over every operation: the allocator, a memory that really applies its plans, and the plain model.

After every step each sequence is read back through its tables and must hold exactly the contents that the model says,
page counts must add up, published and pinned pages must be as they were, and `check()` must hold. Every call that
raises is followed by a comparison of whole snapshots: nothing may have changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allocator import (
    AlreadyWritten,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    InvalidArgument,
    KVError,
    LayerKind,
    OutOfPages,
    PagesPinned,
    Plan,
    StaleHandle,
    Verdict,
)
from tests.allocator.model import Config, Contents, Memory, Sequence, chain, owners, pages_for, tables_of
from tests.allocator.strategies import batches, configs, new_tokens, subsets, tokens

# What a step does, and how often. A step that needs a sequence (or a pin) where none is opens one instead.
WEIGHTS = {"append": 8, "open": 4, "commit": 4, "crop": 4, "truncate": 3, "close": 3, "fork": 2, "slide": 2}
RARE = ("write_cross", "reserve", "pin", "unpin", "pin_prefix", "grow", "shrink", "restore", "refuse", "clear_prefix")
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)] + list(RARE)
WITHOUT_SEQUENCES = {"open", "pin_prefix", "grow", "shrink", "restore", "refuse", "clear_prefix"}


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config: Config) -> None:
        self.config = config
        self.kinds, self.windows = config.row_kinds(), config.row_windows()
        self.grows = [kind is LayerKind.ATTENTION for kind in self.kinds]
        self.size, self.num_rows = config.page_size, config.num_rows
        self.allocator = config.build()
        self.memory = Memory(config.num_pages, self.size)
        self.contents = Contents()
        self.seqs: dict[Any, Sequence] = {}
        self.closed: list[Any] = []
        self.pins: dict[Any, tuple[list[int], np.ndarray]] = {}
        self.meanings: dict[bytes, tuple[bytes, list[int]]] = {}
        self.published: set[bytes] = set()
        self.mirror = np.zeros((0, 0), np.int32)

    @rule(operation=st.sampled_from(OPERATIONS), data=st.data())
    def step(self, operation: str, data: st.DataObject) -> None:
        if not (self.seqs or operation in WITHOUT_SEQUENCES) or (operation == "unpin" and not self.pins):
            operation = "open"
        getattr(self, operation)(data)

    # Helpers

    @property
    def available(self) -> int:
        stats = self.allocator.stats()
        return stats.free_pages + stats.cached_pages

    @property
    def reserved(self) -> int:
        return sum(seq.reserved for seq in self.seqs.values())

    def draw(self, data: st.DataObject, what: Callable[[list[Any]], st.SearchStrategy[Any]]) -> Any:
        return data.draw(what(sorted(self.seqs)))

    def carry_out(self, plan: Plan, before: int) -> None:
        assert self.available == before - plan.allocated + plan.freed
        self.memory.apply(plan)

    @contextmanager
    def refused(self, *errors: type[KVError]) -> Iterator[Any]:
        """The body must raise, and nothing may have changed."""
        before = self.allocator.snapshot()
        with pytest.raises(errors) as caught:
            yield caught
        assert self.allocator.snapshot() == before
        str(caught.value)

    def is_frozen(self, page: int, count: dict[int, int]) -> bool:
        return count[page] > 1 or page in self.published_pages()

    def published_pages(self) -> set[int]:
        index = self.allocator._core.prefix
        return set() if index is None else set(index.pages[list(index.by_hash.values())].ravel().tolist())

    def owners(self) -> Any:
        return owners(self.allocator, list(self.seqs), [pages for pages, _ in self.pins.values()])

    # Sequences come and go

    def open(self, data: st.DataObject) -> None:
        prompt = data.draw(tokens())
        scope = data.draw(st.sampled_from([b"", b"salt"]))
        limit = data.draw(st.sampled_from([None, None, None, 3, 0]))
        if self.meanings and data.draw(st.booleans()):
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

    def content(self, scope: bytes, prefix: list[int], row: int) -> int:
        return self.contents.of(scope, tuple(prefix), row)

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

    # Tokens come and go

    def append(self, data: st.DataObject) -> None:
        batch = self.draw(data, batches)
        counts = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 0]), min_size=len(batch), max_size=len(batch)))
        self.append_tokens(batch, [data.draw(new_tokens(n)) for n in counts])

    def append_tokens(self, batch: list[Any], new: list[list[int]]) -> None:
        counts = [len(fresh) for fresh in new]
        each = self.pages_needed(batch, counts)
        needed, usable = sum(each), self.allocator.num_pages - 1
        set_aside = self.reserved - sum(min(self.seqs[s].reserved, n) for s, n in zip(batch, each, strict=True))
        before = self.available
        margin = 0 if all(self.seqs[seq].appended for seq in batch) else self.config.watermark
        answer = self.allocator.can_append(batch, counts)
        assert (answer.needed, answer.total) == (needed, usable)
        assert answer.available == max(0, before - set_aside - margin)
        assert (answer.verdict is Verdict.OK) == (needed <= answer.available)
        assert answer.shortfall == max(0, needed - answer.available)
        if answer.verdict is Verdict.NEVER:
            assert needed + len(owners(self.allocator, batch, [])) > usable - margin
        if needed > before - set_aside:
            with self.refused(OutOfPages) as caught:
                self.allocator.append(batch, counts)
            assert (caught.value.needed, caught.value.available) == (needed, before - set_aside)
            return
        plan = self.allocator.append(batch, counts)
        assert plan.allocated == needed
        self.carry_out(plan, before)
        for seq, count, used in zip(batch, counts, each, strict=True):
            self.seqs[seq].reserved -= min(self.seqs[seq].reserved, used)
            self.seqs[seq].appended |= count > 0
        self.write(batch, counts, new)

    def pages_needed(self, batch: list[Any], counts: list[int]) -> list[int]:
        """Pages that each sequence takes: new ones, and copies of frozen pages it would write."""
        count, published = self.owners(), self.published_pages()
        written: list[list[int]] = []
        fresh = []
        for seq, n in zip(batch, counts, strict=True):
            tables, model = tables_of(self.allocator, seq), self.seqs[seq]
            new, tails = 0, []
            for row, kind in enumerate(self.kinds if n else []):
                live = len(model.rows[row])
                if kind is LayerKind.ATTENTION:
                    new += pages_for(live + n, self.size) - pages_for(live, self.size)
                if kind is LayerKind.STATE:
                    new += live == 0
                if (kind is LayerKind.ATTENTION and live % self.size) or (kind is LayerKind.STATE and live):
                    tails.append(tables[row][-1])
            written.append(tails)
            fresh.append(new)
        writers = [page for tails in written for page in tails]
        for at, tails in enumerate(written):
            for page in tails:
                later = any(page in others for others in written[at + 1 :])
                last_owner = not later and writers.count(page) == count[page]
                frozen = count[page] > 1 or page in published
                fresh[at] += frozen and not (last_owner and page not in published)
        return fresh

    def write(self, batch: list[Any], counts: list[int], new: list[list[int]]) -> None:
        """Puts the new tokens where the allocator says, checking that nobody else reads there."""
        slots = self.allocator.slot_mapping(batch, counts)
        count, published = self.owners(), self.published_pages()
        done = 0
        for seq, n, fresh in zip(batch, counts, new, strict=True):
            model = self.seqs[seq]
            for token in fresh:
                position = len(model.tokens)
                model.tokens.append(token)
                for row in range(self.num_rows):
                    if not self.grows[row]:
                        assert slots[row, done] == 0
                        continue
                    page, offset = divmod(int(slots[row, done]), self.size)
                    assert page > 0
                    assert count[page] == 1
                    assert page not in published
                    content = self.contents.unique() if model.diverged else self.content(model.scope, model.tokens, row)
                    self.memory.pages[page, offset] = content
                    model.rows[row].append((position, content))
                done += 1
            for row, kind in enumerate(self.kinds):
                if kind is LayerKind.STATE and n:
                    [page] = tables_of(self.allocator, seq)[row]
                    assert count[page] == 1
                    model.rows[row] = [(0, self.contents.unique())]
                    self.memory.pages[page, 0] = model.rows[row][0][1]

    def write_cross(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, 7))
        seq = self.draw(data, st.sampled_from)
        model, rows = self.seqs[seq], [row for row, kind in enumerate(self.kinds) if kind is LayerKind.CROSS]
        needed, before = len(rows) * pages_for(n, self.size), self.available
        if not rows:
            with self.refused(InvalidArgument):
                self.allocator.write_cross(seq, n)
        elif model.cross_written:
            with self.refused(AlreadyWritten):
                self.allocator.write_cross(seq, n)
        elif needed > before - self.reserved:
            with self.refused(OutOfPages):
                self.allocator.write_cross(seq, n)
        else:
            plan = self.allocator.write_cross(seq, n)
            assert plan.allocated == needed
            self.carry_out(plan, before)
            model.cross_written = True
            for row in rows:
                for at in range(n):
                    content = self.contents.unique()
                    model.rows[row].append((at, content))
                    page = tables_of(self.allocator, seq)[row][at // self.size]
                    self.memory.pages[page, at % self.size] = content

    def crop(self, data: st.DataObject) -> None:
        seq = self.draw(data, st.sampled_from)
        model = self.seqs[seq]
        keep: dict[Any, list[int]] = {}
        for layer in range(self.config.num_layers):
            rows = range(layer * self.config.lanes, (layer + 1) * self.config.lanes)
            if self.kinds[rows[0]] is LayerKind.STATE:
                continue
            how = data.draw(st.sampled_from(["skip", "layer", "lanes"]))
            if how == "layer":
                keep[layer] = data.draw(subsets(min(len(model.rows[row]) for row in rows)))
            elif how == "lanes":
                for lane, row in enumerate(rows):
                    keep[layer, lane] = data.draw(subsets(len(model.rows[row])))
        by_row = {
            row: kept
            for key, kept in keep.items()
            for row in ([key[0] * self.config.lanes + key[1]] if isinstance(key, tuple) else self.rows_of(key))
        }
        count, tables, before = self.owners(), tables_of(self.allocator, seq), self.available
        frozen = any(self.is_frozen(page, count) for row in by_row for page in tables[row])
        snapshot = self.allocator.snapshot()
        try:
            plan = self.allocator.crop(seq, keep)
        except OutOfPages as caught:
            error = caught
        else:
            self.cropped(seq, by_row, plan, frozen, before)
            return
        assert frozen
        assert error.needed > error.available == max(0, before - self.reserved)
        assert self.allocator.snapshot() == snapshot

    def cropped(self, seq: Any, by_row: dict[int, list[int]], plan: Plan, frozen: bool, before: int) -> None:
        model = self.seqs[seq]
        assert plan.allocated == 0 or frozen
        if all(self.moves_nothing(kept) for kept in by_row.values()):
            assert len(plan.moves) == plan.allocated == 0
        self.carry_out(plan, before)
        model.diverged |= any(len(kept) != len(model.rows[row]) for row, kept in by_row.items())
        for row, kept in by_row.items():
            model.rows[row] = [model.rows[row][i] for i in kept]

    def rows_of(self, layer: int) -> list[int]:
        return [layer * self.config.lanes + lane for lane in range(self.config.lanes)]

    def moves_nothing(self, kept: list[int]) -> bool:
        """Whether a keep-list drops whole pages only (but for the end)."""
        blocks = [kept[start : start + self.size] for start in range(0, len(kept), self.size)]
        return all(block[0] % self.size == 0 and block[-1] - block[0] == len(block) - 1 for block in blocks)

    def truncate(self, data: st.DataObject) -> None:
        batch = self.draw(data, batches)
        counts = [data.draw(st.integers(0, len(self.seqs[seq].tokens))) for seq in batch]
        before = self.available
        plan = self.allocator.truncate(batch, counts)
        assert plan.allocated == len(plan.copies) == len(plan.moves) == 0
        self.carry_out(plan, before)
        for seq, count in zip(batch, counts, strict=True):
            model = self.seqs[seq]
            seen = len(model.tokens) - count
            del model.tokens[seen:]
            model.committed = min(model.committed, seen // self.size)
            for row in range(self.num_rows):
                if self.grows[row]:
                    model.rows[row] = [(p, c) for p, c in model.rows[row] if p < seen]

    def slide(self, data: st.DataObject) -> None:
        margin = data.draw(st.sampled_from([0, 0, 2]))
        batch = self.draw(data, batches)
        before = self.available
        plan = self.allocator.slide(batch, margin=margin)
        assert plan.allocated == len(plan.copies) == len(plan.moves) == 0
        self.carry_out(plan, before)
        for model in (self.seqs[seq] for seq in batch):
            for row, window in enumerate(self.windows):
                if window is not None:
                    oldest = len(model.tokens) - window + 1 - margin
                    behind = sum(position < oldest for position, _ in model.rows[row])
                    gone = behind // self.size * self.size
                    model.diverged |= gone > 0
                    del model.rows[row][:gone]

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

    # What must hold after every step

    @invariant()
    def everything_reads_back(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        self.poison_unused()
        before = self.allocator.snapshot()
        for seq, model in self.seqs.items():
            self.check_sequence(seq, model)
        self.check_queries()
        self.check_prefixes()
        self.check_deltas()
        assert self.allocator.snapshot() == before, "a query changed the state"

    def poison_unused(self) -> None:
        count, published = self.owners(), self.published_pages()
        assert self.available == self.allocator.num_pages - 1 - len(count)
        unused = [page for page in range(self.allocator.num_pages) if not count[page] and page not in published]
        self.memory.pages[unused] = 0
        for pages, contents in self.pins.values():
            assert (self.memory.pages[pages] == contents).all(), "a pinned page was written"

    def check_sequence(self, seq: Any, model: Sequence) -> None:
        allocator = self.allocator
        assert allocator.seen_len(seq) == len(model.tokens)
        assert allocator.is_diverged(seq) == model.diverged
        assert allocator.live_lens([seq])[:, 0].tolist() == [len(row) for row in model.rows]
        for row, (pages, expected) in enumerate(zip(tables_of(allocator, seq), model.rows, strict=True)):
            assert len(pages) == pages_for(len(expected), self.size)
            held = self.memory.pages[pages].ravel()[: len(expected)]
            assert held.tolist() == [content for _, content in expected]
            layer, lane = divmod(row, self.config.lanes)
            assert allocator.positions(seq, layer, lane).tolist() == [position for position, _ in expected]

    def check_queries(self) -> None:
        seqs = list(self.seqs)
        models = list(self.seqs.values())
        counts = [min([2, *(len(m.rows[r]) for r in range(self.num_rows) if self.grows[r])]) for m in models]
        counts = [min(n, len(m.tokens)) for n, m in zip(counts, models, strict=True)]
        for window in (1, 3):
            for layer in range(self.config.num_layers):
                if not self.grows[layer * self.config.lanes]:
                    continue
                start = self.allocator.visible_start(seqs, counts, layer, window)
                expected = [
                    [
                        sum(p <= len(m.tokens) - n + j - window for p, _ in m.rows[row])
                        for m, n in zip(models, counts, strict=True)
                        for j in range(n)
                    ]
                    for row in self.rows_of(layer)
                ]
                assert start.tolist() == expected
        stats = self.allocator.stats()
        assert stats.num_seqs == len(seqs)
        assert stats.live_tokens == sum(len(row) for m in models for row in m.rows)

    def read_events(self) -> None:
        for event in self.allocator.drain_events() if self.config.prefix else []:
            if isinstance(event, BlocksCleared):
                self.published.clear()
            elif isinstance(event, BlockStored):
                assert event.block not in self.published
                scope, meaning = self.meanings[event.block]
                assert event.parent == chain(scope, meaning, self.size)[-2]
                self.published.add(event.block)
            else:
                assert isinstance(event, BlockRemoved)
                self.published.remove(event.block)

    def check_prefixes(self) -> None:
        """Published pages hold, for ever, what their hash says."""
        self.read_events()
        index = self.allocator._core.prefix
        assert (set(index.by_hash) if index else set()) == self.published
        for digest in self.published:
            scope, meaning = self.meanings[digest]
            pages = index.pages[index.by_hash[digest]]  # type: ignore[union-attr]
            first = len(meaning) - self.size
            for row, page in enumerate(pages.tolist()):
                expected = [self.content(scope, meaning[: first + i + 1], row) for i in range(self.size)]
                assert self.memory.pages[page].tolist() == expected, "a published page changed"

    def check_deltas(self) -> None:
        """A copy of the tables that only ever sees deltas agrees with them."""
        delta = self.allocator.drain_deltas()
        assert len({*zip(delta.rows.tolist(), delta.columns.tolist(), strict=True)}) == len(delta.rows)
        shape = np.maximum(self.mirror.shape, (delta.rows.max(initial=-1) + 1, delta.columns.max(initial=-1) + 1))
        grown = np.zeros(shape, np.int32)
        grown[: self.mirror.shape[0], : self.mirror.shape[1]] = self.mirror
        self.mirror = grown
        self.mirror[delta.rows, delta.columns] = delta.pages
        for seq in self.seqs:
            rows = self.allocator.device_rows([seq])[:, 0]
            for row, pages in zip(rows, tables_of(self.allocator, seq), strict=True):
                assert self.mirror[row, : len(pages)].tolist() == pages if pages else True


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings.get_profile(os.environ.get("ALLOCATOR_PROFILE", "allocator"))
