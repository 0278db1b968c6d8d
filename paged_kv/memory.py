"""All pages of one model: an allocator and a store per group of layers, moved in lock-step.

Owns: that one `SeqId` names a sequence in every group, that a call changes all groups or none, that each plan is
applied to its store before the next change, and how the pool grows within its budget.
Does not know: transformers' cache interface, attention, policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from allocator import (
    Admission,
    AllocatorStats,
    BrokenInvariant,
    KVError,
    OutOfPages,
    Plan,
    SeqId,
    Verdict,
)
from paged_kv.group import Budget, Group, shares
from paged_kv.keep import check_indices
from paged_kv.live import LiveTokens
from paged_kv.queries import QueryLog
from paged_kv.spec import KVSpec
from paged_kv.step import Step

#: A growing pool takes at least this fraction of its pages at once.
GROW_IN_PLACE, GROW_BY_COPY = 64, 4

_SEVERITY = (Verdict.OK, Verdict.LATER, Verdict.NEVER)


class PagedMemory:
    """The pages of a model for any number of sequences.

    Every mutating call changes all groups or raises with nothing changed. The plans that allocators return are applied
    to the stores before the call returns.
    """

    def __init__(self, specs: Sequence[KVSpec], budget: Budget, *, enable_prefix_caching: bool = False) -> None:
        """Build allocators and stores; several groups share the budget in proportion to their bytes per token."""
        sizes = zip(specs, shares(budget.initial_bytes, specs), shares(budget.max_bytes, specs), strict=True)
        is_cached = enable_prefix_caching and len(specs) == 1
        groups = [Group.empty(spec, num_pages, is_cached, most) for spec, num_pages, most in sizes]
        self._adopt(groups, budget)

    @classmethod
    def of_groups(cls, groups: list[Group], budget: Budget) -> PagedMemory:
        """A memory of groups that hold pages already."""
        memory = cls.__new__(cls)
        memory._adopt(groups, budget)
        return memory

    def _adopt(self, groups: list[Group], budget: Budget) -> None:
        self.groups, self.budget = groups, budget
        self.queries: QueryLog | None = None
        self._max_pages = shares(budget.max_bytes, [group.spec for group in groups])
        self._place = {layer: (group, at) for group in groups for at, layer in enumerate(group.spec.layers)}

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(
        self, tokens: Sequence[int] | None = None, *, scope: bytes = b"", limit: int | None = None
    ) -> tuple[SeqId, int]:
        """Open a sequence; returns its id and how many of `tokens` its pages already hold (prefix cache)."""
        opened = [group.allocator.open(tokens, scope=scope, limit=limit) for group in self.groups]
        return opened[0].seq, opened[0].num_cached_tokens

    def can_append(self, seqs: Sequence[SeqId], counts: int | Sequence[int]) -> Admission:
        """Whether `append` would fit: OK, LATER or NEVER, the worst of all groups. Growth within the budget counts."""
        worst = None
        for group, max_pages in zip(self.groups, self._max_pages, strict=True):
            answer = group.allocator.can_append(seqs, counts)
            room = max_pages - group.store.num_pages
            if answer.verdict is not Verdict.OK and room > 0:
                answer = _with_room(answer, room)
            if worst is None or _SEVERITY.index(answer.verdict) > _SEVERITY.index(worst.verdict):
                worst = answer
        assert worst is not None
        return worst

    def append(self, seqs: Sequence[SeqId], counts: int | Sequence[int]) -> None:
        """Reserve slots for `counts` new tokens of each sequence in every layer.

        Raises:
            OutOfPages: The pool, grown to its budget, cannot hold them; nothing changed.
        """
        for group, max_pages in zip(self.groups, self._max_pages, strict=True):
            answer = group.allocator.can_append(seqs, counts)
            missing = answer.needed - answer.available
            if answer.verdict is not Verdict.OK and not self._grow(group, missing, max_pages):
                raise OutOfPages(needed=answer.needed, available=answer.available, total=answer.total)
        for group in self.groups:
            group.store.apply(group.allocator.append(seqs, counts))

    def _grow(self, group: Group, missing: int, max_pages: int) -> bool:
        """Grow a group by at least the missing pages, by more where growing is dear, never past its budget."""
        have = group.store.num_pages
        step = have // (GROW_IN_PLACE if group.store.grows_in_place else GROW_BY_COPY)
        target = min(max_pages, have + max(missing, step))
        if target - have < missing:
            return False
        group.store.resize(target)
        group.allocator.grow(target - have)
        return True

    def trim(self, slack: float = 0.0) -> int:
        """Give free pages of a growing pool back to the system, all but a part; returns the bytes given back.

        Tables exported before (`Step`) are stale afterwards, because pages move together.

        Args:
            slack: Fraction of a pool that may stay free; a pool with no more than twice that free is left alone.
        """
        if self.budget.initial_bytes == self.budget.max_bytes:
            return 0
        before = self.nbytes
        for group in self.groups:
            have, free = group.store.num_pages, group.allocator.stats().free_pages
            surplus = min(free - int(slack * have), have - 2)
            if surplus > 0 and free >= 2 * slack * have:
                group.store.apply(group.allocator.shrink(surplus))
                group.store.resize(have - surplus)
        return before - self.nbytes

    def commit(self, seq: SeqId, tokens: Sequence[int]) -> int:
        """Publish the full blocks of `tokens` for sharing; returns how many are new."""
        return sum(group.allocator.commit(seq, tokens) for group in self.groups if len(self.groups) == 1)

    def crop(self, seq: SeqId, keep: Mapping[int, Iterable[int]] | Mapping[tuple[int, int], Iterable[int]]) -> int:
        """Keep only some live tokens of some layers; returns the pages freed.

        Args:
            seq: The sequence.
            keep: Model layer index, or (layer, lane), to strictly increasing live indices.

        Raises:
            KVError: An unknown layer, or indices out of order or range; nothing changed.
        """
        by_group: list[dict[int | tuple[int, int], np.ndarray]] = [{} for _ in self.groups]
        for key, indices in keep.items():
            group, index = self.place(key[0] if isinstance(key, tuple) else key)
            place = (index, key[1]) if isinstance(key, tuple) else index
            by_group[self.groups.index(group)][place] = np.asarray(indices)
        if len(self.groups) > 1:
            self._require_crop(seq, by_group)
        freed = 0
        for group, rows in zip(self.groups, by_group, strict=True):
            if rows:
                freed += self._crop_group(group, seq, rows)
        return freed

    def _crop_group(self, group: Group, seq: SeqId, rows: dict[int | tuple[int, int], np.ndarray]) -> int:
        """Crop one group; survivors that must move off shared pages may make the pool grow."""
        try:
            plan = group.allocator.crop(seq, rows)
        except OutOfPages as error:
            max_pages = self._max_pages[self.groups.index(group)]
            if not self._grow(group, error.needed - error.available, max_pages):
                raise
            plan = group.allocator.crop(seq, rows)
        return _applied(group, plan)

    def _require_crop(self, seq: SeqId, by_group: list[dict[int | tuple[int, int], np.ndarray]]) -> None:
        """Refuse a crop of several groups before the first one changes.

        Raises:
            KVError: Indices out of order or range, or no page for survivors that must move off shared ones.
        """
        for group, rows in zip(self.groups, by_group, strict=True):
            live = group.allocator.live_lens([seq])[:, 0].reshape(-1, group.spec.lanes)
            needed = 0
            for place, keep in rows.items():
                layer, lanes = (place[0], [place[1]]) if isinstance(place, tuple) else (place, range(group.spec.lanes))
                for lane in lanes:
                    check_indices(keep, int(live[layer, lane]), f"layer {group.spec.layers[layer]}")
                    needed += -(-len(keep) // group.spec.page_size)
            stats = group.allocator.stats()
            if stats.table_entries != stats.active_pages and needed > stats.free_pages:
                raise OutOfPages(needed=needed, available=stats.free_pages, total=stats.total_pages)

    def require_unshared(self, layer: int, seqs: Sequence[SeqId]) -> None:
        """Refuse to go on if sequences share pages of a layer with others, since shared pages are never rewritten.

        Raises:
            KVError: Some of their pages are in more than one table, or published.
        """
        group, index = self.place(layer)
        if any(group.allocator.is_frozen(seq, index) for seq in seqs):
            raise KVError(f"the keys of layer {layer} cannot be rewritten while sequences share pages")

    def overwrite(self, seq: SeqId, layer: int, lane: int, keys: Tensor, values: Tensor) -> None:
        """Rewrite all live tokens of one lane in place: `[heads_per_lane, live, width]` each."""
        group, index = self.place(layer)
        slots = np.arange(keys.shape[1])
        pages = group.allocator.block_tables([seq], index)[lane, 0][slots // group.spec.page_size]
        where = torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(slots % group.spec.page_size)
        group.store.keys[where[0], :, where[1]] = keys.transpose(0, 1)
        group.store.values[where[0], :, where[1]] = values.transpose(0, 1)

    def truncate(self, seqs: Sequence[SeqId], counts: int | Sequence[int]) -> int:
        """Drop the newest `counts` tokens (by position) of each sequence in every layer; returns the pages freed."""
        return sum(_applied(group, group.allocator.truncate(seqs, counts)) for group in self.groups)

    def slide(self, seqs: Sequence[SeqId]) -> int:
        """Free the pages that slid out of their layers' windows; returns how many."""
        return sum(_applied(group, group.allocator.slide(seqs)) for group in self.groups)

    def fork(self, seq: SeqId, n: int = 1) -> list[SeqId]:
        """Open `n` sequences that share all pages of `seq`; a shared page is copied before it is written."""
        forks = [group.allocator.fork(seq, n) for group in self.groups]
        if self.queries is not None:
            self.queries.fork(seq, forks[0])
        return forks[0]

    def close(self, seq: SeqId) -> int:
        """Give a sequence's pages back; returns how many became free. Its id is stale from now on."""
        freed = sum(_applied(group, group.allocator.close(seq)) for group in self.groups)
        if self.queries is not None:
            self.queries.forget(seq)
        return freed

    def preempt(self, seq: SeqId) -> int:
        """Take a running sequence's pages back, to be opened again later; returns how many became free."""
        if self.queries is not None:
            self.queries.forget(seq)
        return sum(_applied(group, group.allocator.preempt(seq)) for group in self.groups)

    def record_queries(self, newest: int, seq: SeqId | None = None) -> None:
        """From the next forward on, keep the newest queries for `live_tokens`.

        Args:
            newest: How many; 0 stops recording `seq`.
            seq: Whose; by default at least so many of every sequence that does not ask for itself.
        """
        if self.queries is None and newest > 0:
            self.queries = QueryLog()
        if self.queries is not None:
            self.queries.want(newest, seq)

    def note_queries(self, step: Step, layer: int, queries: Tensor, scale: float) -> None:
        """Keep a layer's queries `[tokens, q_heads, key_width]` of a step, if `record_queries` asked for them."""
        if self.queries is not None and not self.queries.is_idle:
            self.queries.record(step, self.seen_len, layer, queries, scale)

    def __deepcopy__(self, memo: dict[int, object]) -> PagedMemory:
        twin = PagedMemory.of_groups([group.copy() for group in self.groups], self.budget)
        memo[id(self)] = twin
        twin.queries = deepcopy(self.queries, memo)
        return twin

    # -- one forward pass --------------------------------------------------------------------------------------------

    def step(self, seqs: Sequence[SeqId], counts: Sequence[int]) -> Step:
        """What a forward pass over the newest `counts` tokens of each sequence needs, after `append`."""
        return Step(self.groups, self.place, seqs, counts)

    def place(self, layer: int) -> tuple[Group, int]:
        """The group of a model layer and its index there.

        Raises:
            IndexError: The model has no such paged layer.
        """
        try:
            return self._place[layer]
        except KeyError:
            raise IndexError(f"no paged layer {layer}; paged layers are {sorted(self._place)}") from None

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[int]:
        """Model layer indices that have pages, ascending."""
        return sorted(self._place)

    @property
    def nbytes(self) -> int:
        """Bytes of all page tensors."""
        return sum(group.store.nbytes for group in self.groups)

    def seen_len(self, seq: SeqId) -> int:
        """Tokens appended to a sequence so far, in every layer."""
        return self.groups[0].allocator.seen_len(seq)

    def live_lens(self, seqs: Sequence[SeqId], layer: int) -> np.ndarray:
        """Live tokens of one layer: int32 `[lanes, rows]`."""
        group, index = self.place(layer)
        lanes = group.spec.lanes
        return group.allocator.live_lens(seqs)[index * lanes : (index + 1) * lanes]

    def positions(self, seq: SeqId, layer: int, lane: int = 0) -> np.ndarray:
        """Original positions of a layer's live tokens, ascending."""
        group, index = self.place(layer)
        return group.allocator.positions(seq, index, lane)

    def live_tokens(self, seq: SeqId, layer: int) -> LiveTokens:
        """Private copies of a layer's live tokens and their positions, for a policy to choose from."""
        group, index = self.place(layer)
        lanes = group.spec.lanes
        live = group.allocator.live_lens([seq])[index * lanes : (index + 1) * lanes, 0]
        table = torch.from_numpy(group.allocator.block_tables([seq], index)).to(group.spec.device)
        keys, values = group.store.gather(table, int(live.max(initial=0)))
        per_lane = group.spec.heads_per_lane
        return LiveTokens(
            layer=layer,
            keys=[part[:, :n] for part, n in zip(torch.split(keys[0], per_lane), live, strict=True)],
            values=[part[:, :n] for part, n in zip(torch.split(values[0], per_lane), live, strict=True)],
            positions=[group.allocator.positions(seq, index, lane) for lane in range(lanes)],
            seen_len=self.seen_len(seq),
            queries=None if self.queries is None else self.queries.recent(seq, layer, self.seen_len(seq)),
        )

    def stats(self) -> list[AllocatorStats]:
        """One frozen snapshot per group."""
        return [group.allocator.stats() for group in self.groups]

    def check(self) -> None:
        """Assert every invariant of the allocators, and that stores are as large as their pools."""
        for group in self.groups:
            group.allocator.check()
            usable = group.allocator.stats().total_pages
            if group.store.num_pages != usable + 1:
                raise BrokenInvariant(
                    f"the store holds {group.store.num_pages} pages, the pool {usable} and the null page"
                )


def _applied(group: Group, plan: Plan) -> int:
    group.store.apply(plan)
    return plan.freed


def _with_room(answer: Admission, room: int) -> Admission:
    """An answer that counts pages which the pool may still grow by."""
    available, total = answer.available + room, answer.total + room
    if answer.needed <= available:
        verdict = Verdict.OK
    else:
        verdict = Verdict.LATER if answer.needed <= total else Verdict.NEVER
    return Admission(verdict=verdict, needed=answer.needed, available=available, total=total)
