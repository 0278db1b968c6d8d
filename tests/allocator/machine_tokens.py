"""Operations of the state machine that give rows tokens or take some away."""

from __future__ import annotations

from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from allocator import AlreadyWritten, InvalidArgument, LayerKind, OutOfPages, Plan, Verdict
from tests.allocator.machine_state import MachineState
from tests.allocator.model import owners, pages_for, tables_of
from tests.allocator.strategies import batches, new_tokens, subsets


class TokenOperations(MachineState):
    """Append and cross-attention writes; crop, truncate and slide."""

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
            event("cross-attention was written")
            for row in rows:
                for at in range(n):
                    content = self.contents.unique()
                    model.rows[row].append((at, content))
                    page = tables_of(self.allocator, seq)[row][at // self.size]
                    self.memory.pages[page, at % self.size] = content

    # Rows lose tokens

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
        if plan.freed:
            event("a slide freed pages")
        for model in (self.seqs[seq] for seq in batch):
            for row, window in enumerate(self.windows):
                if window is not None:
                    oldest = len(model.tokens) - window + 1 - margin
                    behind = sum(position < oldest for position, _ in model.rows[row])
                    gone = behind // self.size * self.size
                    model.diverged |= gone > 0
                    del model.rows[row][:gone]
