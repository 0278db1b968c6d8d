"""`BlockAllocator`: the public face. Checks arguments, resolves handles, and hands on to one module an operation.

Rules that hold for every method: it returns its result or raises with nothing changed; a plan is applied before the
next mutating call; queries (in `TableQueries`) never mutate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator import appending, cropping, dropping, sharing
from allocator.core import Core
from allocator.errors import AlreadyWritten, InvalidArgument
from allocator.invariants import check_core
from allocator.lifecycle import PoolLifecycle
from allocator.partial import PartialBlocks
from allocator.plan import Plan
from allocator.pool import PagePool
from allocator.prefix import NUM_PRIORITIES, PrefixIndex
from allocator.queries import TableQueries
from allocator.stats import AllocatorStats, Fragmentation, collect, measure
from allocator.table import PageTables
from allocator.types import Admission, Counts, Int64, Keep, LayerKind, Opened, Placement, SeqId, Seqs, Tokens
from allocator.validate import (
    INT32_MAX,
    check_counts,
    check_keep,
    check_kinds,
    check_scope,
    check_size,
    check_tokens,
    check_windows,
)

__all__ = ["BlockAllocator"]


class BlockAllocator(TableQueries, PoolLifecycle):
    """Page tables for every layer (and lane) of every sequence over one pool of pages.

    Args:
        num_pages: pages in the pool, the null page among them.
        page_size: tokens a page.
        num_layers: layers that store K and V.
        lanes: page tables a layer: 1, or the number of KV heads for methods that crop by head.
        windows: sliding window of each layer in tokens, None for full attention.
        kinds: how the tables of each layer grow, `LayerKind.ATTENTION` by default. With other kinds sequences count as
            diverged from the start, and there is no prefix caching: such layers do not hold one slot a token.
        enable_prefix_caching: publish and look up blocks by their tokens.
        partial_reuse: also reuse the first tokens of a published block, by copying it (`Opened.plan`).
        record_events: keep what `drain_events` returns.
        placement: which free page comes next: ``"lifo"``, or ``"runs"`` of neighbours.
        watermark: pages that `can_append` holds back from sequences that hold no slot of their own yet.

    Raises:
        InvalidArgument: a size is out of range, or does not fit the int32 arrays that kernels read.
    """

    def __init__(  # noqa: PLR0913 - independent facts about one pool; an options object would only rename them
        self,
        num_pages: int,
        *,
        page_size: int,
        num_layers: int,
        lanes: int = 1,
        windows: Sequence[int | None] | None = None,
        kinds: Sequence[LayerKind] | None = None,
        enable_prefix_caching: bool = False,
        partial_reuse: bool = False,
        record_events: bool = False,
        placement: Placement = "lifo",
        watermark: int = 0,
    ) -> None:
        num_pages = check_size("num_pages", num_pages, least=2)
        self.page_size = check_size("page_size", page_size, least=1)
        self.num_layers = check_size("num_layers", num_layers, least=1)
        self.lanes = check_size("lanes", lanes, least=1)
        self._windows = check_windows(windows, num_layers, lanes)
        self._kinds = check_kinds(kinds, num_layers, lanes)
        self._watermark = check_size("watermark", watermark, least=0)
        if placement not in ("lifo", "runs"):
            raise InvalidArgument("placement", placement, "must be 'lifo' or 'runs'")
        self._placement: Placement = placement
        plain = all(kind is LayerKind.ATTENTION for kind in self._kinds)
        if enable_prefix_caching and not plain:
            raise InvalidArgument("enable_prefix_caching", True, "cross-attention and state rows hold no token blocks")
        if (partial_reuse or record_events) and not enable_prefix_caching:
            raise InvalidArgument("enable_prefix_caching", False, "partial_reuse and record_events need it")
        if any(
            window and kind is not LayerKind.ATTENTION for window, kind in zip(self._windows, self._kinds, strict=True)
        ):
            raise InvalidArgument("windows", windows, "only attention layers have one")
        self._prefix_caching, self._partial_reuse, self._events = enable_prefix_caching, partial_reuse, record_events
        self._core = self._build(num_pages)

    def _build(self, num_pages: int) -> Core:
        pool = PagePool(num_pages, placement=self._placement)
        num_rows = len(self._kinds)
        prefix = None
        if self._prefix_caching:
            partial = PartialBlocks((num_pages - 1) // num_rows, self.page_size) if self._partial_reuse else None
            prefix = PrefixIndex(pool, num_rows, partial=partial, record_events=self._events)
        grows = np.array([kind is LayerKind.ATTENTION for kind in self._kinds])
        states = np.array([kind is LayerKind.STATE for kind in self._kinds])
        tables = PageTables(num_rows, self.page_size, grows=grows)
        return Core(pool, tables, prefix=prefix, watermark=self._watermark, state_rows=states)

    def _config(self) -> dict[str, object]:
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "num_layers": self.num_layers,
            "lanes": self.lanes,
            "windows": self._windows.tolist(),
            "kinds": [kind.value for kind in self._kinds],
            "placement": self._placement,
            "prefix": [self._prefix_caching, self._partial_reuse],
        }

    def open(self, tokens: Tokens | None = None, *, scope: bytes = b"", limit: int | None = None) -> Opened:
        """Opens a sequence on the published blocks that its first tokens share. Never covers the last token.

        Args:
            tokens: what will be appended; they are only looked up.
            scope: model, adapter, tenant salt: blocks of another scope never match.
            limit: most tokens to take from the index.

        Raises:
            InvalidArgument: nothing changed.

        Complexity: O(matched blocks * rows).
        """
        most = None if limit is None else check_size("limit", limit, least=0)
        return sharing.open_prefix(self._core, check_tokens(() if tokens is None else tokens), check_scope(scope), most)

    def peek(self, tokens: Tokens, *, scope: bytes = b"", limit: int | None = None) -> int:
        """Tokens that `open` would take from whole published blocks. Changes nothing, refreshes nothing. O(hits)."""
        most = None if limit is None else check_size("limit", limit, least=0)
        return sharing.peek(self._core, check_tokens(tokens), check_scope(scope), most)

    def append(self, seqs: Seqs, counts: Counts) -> Plan:
        """Reserves slots for `counts` new tokens in every row of every sequence.

        Partly filled pages that are shared, pinned or published are copied first (`Plan.copies`).
        O(rows + new pages); a sequence in lock-step costs one row.

        Raises:
            OutOfPages: it does not fit; nothing changed.
            StaleHandle, InvalidArgument: nothing changed.
        """
        slots = self._core.tables.slots_of(seqs)
        return appending.append(self._core, slots, self._room(slots, counts))

    def can_append(self, seqs: Seqs, counts: Counts) -> Admission:
        """Whether `append` would succeed. Changes nothing. Costs what `append` costs.

        The watermark is held back if a sequence of the batch holds no slot of its own yet: running sequences may use
        the last pages, new ones may not.
        """
        slots = self._core.tables.slots_of(seqs)
        return appending.can_append(self._core, slots, self._room(slots, counts))

    def _room(self, slots: Int64, counts: Counts) -> Int64:
        room = INT32_MAX - self._core.tables.seen[slots]
        return check_counts(counts, len(slots), room, "is more than int32 positions leave room for")

    def write_cross(self, seq: SeqId, num_tokens: int) -> Plan:
        """Gives the cross-attention layers of `seq` their slots, once: `num_tokens` of the encoder's output. O(pages).

        Raises:
            AlreadyWritten: it was done before; nothing changed.
            OutOfPages: nothing changed.
        """
        slot = self._core.tables.slot_of(seq)
        rows = np.flatnonzero([kind is LayerKind.CROSS for kind in self._kinds])
        count = check_size("num_tokens", num_tokens, least=1)
        if len(rows) == 0:
            raise InvalidArgument("seq", seq, "this allocator has no cross-attention layers")
        if self._core.cross_written[slot]:
            raise AlreadyWritten(seq)
        return appending.write_cross(self._core, slot, rows, count)

    def commit(self, seq: SeqId, tokens: Tokens, *, priority: int = 0) -> int:
        """Publishes the full blocks of a sequence that was never cropped or slid (of others: nothing).

        Call it when their K and V are written. A block that is published already is not published twice: the sequence
        reads the published pages from now on and its own copy is freed. O(new full blocks * (page_size + rows)).

        Args:
            seq: the sequence.
            tokens: all tokens seen so far.
            priority: 0 to 3; blocks of a lower priority are evicted first, whenever they were used.

        Returns:
            How many blocks were published.

        Raises:
            StaleHandle, InvalidArgument: `tokens` is not as long as what was seen, or found to differ from what was
                matched or committed before, among others; nothing changed.
        """
        slot = self._core.tables.slot_of(seq)
        seen = int(self._core.tables.seen[slot])
        if len(tokens) != seen:
            raise InvalidArgument("tokens", len(tokens), f"commit needs all {seen} tokens seen so far")
        level = check_size("priority", priority, least=0, most=NUM_PRIORITIES - 1)
        return sharing.commit(self._core, slot, check_tokens(tokens), level)

    def crop(self, seq: SeqId, keep: Keep) -> Plan:
        """Keeps the given live indices of each named layer (all its lanes) or ``(layer, lane)``; the rest is dropped.

        Pages that no survivor needs are freed at once. Keep-lists that are a prefix, or that drop whole pages, move
        nothing; otherwise survivors move to the front (`Plan.moves`). O(kept tokens + pages).

        Raises:
            OutOfPages: shared or published pages would have to be replaced and no page is left; nothing changed.
            StaleHandle, InvalidArgument: nothing changed.
        """
        core = self._core
        slot = core.tables.slot_of(seq)
        rows, flat, counts = check_keep(keep, core.tables.row_lens(slot), self.lanes, core.scratch)
        if core.state_rows[rows].any():
            raise InvalidArgument("keep", sorted(set((rows // self.lanes).tolist())), "state layers hold no tokens")
        return cropping.crop(core, slot, rows, flat, counts)

    def truncate(self, seqs: Seqs, counts: Counts) -> Plan:
        """Forgets the newest `counts` tokens (by position) of each sequence in every row. Moves no byte.

        Tokens that a crop or a slide dropped do not come back; cross-attention and state rows stay as they are.
        O(rows + dropped pages).

        Raises:
            StaleHandle, InvalidArgument: nothing changed.
        """
        slots = self._core.tables.slots_of(seqs)
        seen = self._core.tables.seen[slots]
        return dropping.truncate(self._core, slots, check_counts(counts, len(slots), seen, "is more than were seen"))

    def slide(self, seqs: Seqs, *, margin: int = 0) -> Plan:
        """Frees pages that no later token can see through the sliding window of their layer. Moves no byte.

        What stays: positions from ``seen - window + 1 - margin`` on, and what shares a page with them.
        O(window rows), plus the pages of rows that drop one.

        Args:
            seqs: the sequences.
            margin: tokens that may still be rolled back with `truncate`.
        """
        slots = self._core.tables.slots_of(seqs)
        return dropping.slide(self._core, slots, self._windows, check_size("margin", margin, least=0))

    def fork(self, seq: SeqId, n: int = 1) -> list[SeqId]:
        """Opens `n` sequences that share every page; the first write into a shared page copies it. O(n * pages)."""
        core = self._core
        slot = core.tables.slot_of(seq)
        children = [core.clone_slot(slot) for _ in range(check_size("n", n, least=0))]
        return [core.tables.handle(child) for child in children]

    def close(self, seq: SeqId) -> Plan:
        """Ends a sequence; its published pages stay cached, pinned ones wait for `unpin`. O(pages)."""
        return Plan(freed=self._core.close_slot(self._core.tables.slot_of(seq)))

    def preempt(self, seq: SeqId) -> Plan:
        """`close`, counted as a preemption: the caller opens the request again later. O(pages)."""
        plan = self.close(seq)
        self._core.counters.preemptions += 1
        return plan

    def stats(self) -> AllocatorStats:
        """Counters now. O(1)."""
        return collect(self._core)

    def fragmentation(self) -> Fragmentation:
        """Where the slots of the pool are now. O(table entries)."""
        return measure(self._core, self._windows)

    def check(self) -> None:
        """Verifies every invariant. O(pages + table entries).

        Raises:
            BrokenInvariant: one does not hold.
        """
        check_core(self._core)
