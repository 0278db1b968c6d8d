"""What the state machine knows, and what must hold after every step.

After every step each sequence is read back through its tables and must hold exactly the contents that the model says,
page counts must add up, published and pinned pages must be as they were, and `check()` must hold. Every call that
raises is followed by a comparison of whole snapshots: nothing may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from allocator import BlockRemoved, BlocksCleared, BlockStored, KVError, LayerKind, Plan, appending, pool
from tests.allocator.model import Config, Contents, Memory, Sequence, chain, owners, pages_for, tables_of
from tests.allocator.strategies import configs


class MachineState(RuleBasedStateMachine):
    """The allocator, a memory that really applies its plans, and the plain model; the checks of all three."""

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
        self.thresholds = (appending._LONG_RUN, pool._FEW)
        appending._LONG_RUN, pool._FEW = config.long_run, config.few

    def teardown(self) -> None:
        if hasattr(self, "thresholds"):
            appending._LONG_RUN, pool._FEW = self.thresholds

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

    def content(self, scope: bytes, prefix: list[int], row: int) -> int:
        return self.contents.of(scope, tuple(prefix), row)

    def rows_of(self, layer: int) -> list[int]:
        return [layer * self.config.lanes + lane for lane in range(self.config.lanes)]

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
