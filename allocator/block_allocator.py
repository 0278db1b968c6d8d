"""`BlockAllocator`: the public face. Checks arguments, resolves handles, and hands on to one module an operation.

Rules that hold for every method: it returns its result or raises with nothing changed; a plan is applied before the
next mutating call; queries (in `TableQueries`) never mutate.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator import appending, cropping, dropping, stats
from allocator.core import Core
from allocator.errors import InvalidArgument
from allocator.invariants import check_core
from allocator.plan import Plan
from allocator.pool import PagePool
from allocator.queries import TableQueries
from allocator.table import PageTables
from allocator.types import Admission, Counts, Int64, Keep, Opened, Placement, SeqId, Seqs, Tokens
from allocator.validate import INT32_MAX, check_counts, check_keep, check_size, check_windows

__all__ = ["BlockAllocator"]


class BlockAllocator(TableQueries):
    """Page tables for every layer (and lane) of every sequence over one pool of pages.

    Args:
        num_pages: pages in the pool, the null page among them.
        page_size: tokens a page.
        num_layers: layers that store K and V.
        lanes: page tables a layer: 1, or the number of KV heads for methods that crop by head.
        windows: sliding window of each layer in tokens, None for full attention.
        enable_prefix_caching: publish and look up blocks by their tokens.
        placement: which free page comes next: ``"lifo"``, or ``"runs"`` of neighbours.
        watermark: pages that `can_append` holds back from sequences that hold no slot yet.

    Raises:
        InvalidArgument: a size is out of range, or ids of slots would not fit where kernels need int32.
    """

    def __init__(  # noqa: PLR0913 - independent facts about one pool; an options object would only rename them
        self,
        num_pages: int,
        *,
        page_size: int,
        num_layers: int,
        lanes: int = 1,
        windows: Sequence[int | None] | None = None,
        enable_prefix_caching: bool = False,
        placement: Placement = "lifo",
        watermark: int = 0,
    ) -> None:
        self.page_size = check_size("page_size", page_size, least=1)
        self.num_layers = check_size("num_layers", num_layers, least=1)
        self.lanes = check_size("lanes", lanes, least=1)
        num_pages = check_size("num_pages", num_pages, least=2)
        self._windows = check_windows(windows, num_layers, lanes)
        if placement not in ("lifo", "runs"):
            raise InvalidArgument("placement", placement, "must be 'lifo' or 'runs'")
        pool = PagePool(num_pages, placement=placement)
        tables = PageTables(num_layers * lanes, page_size)
        self._core = Core(pool, tables, watermark=check_size("watermark", watermark, least=0, most=num_pages - 1))
        if enable_prefix_caching:
            raise NotImplementedError

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page among them."""
        return self._core.pool.num_pages

    def open(self, tokens: Tokens | None = None, *, scope: bytes = b"", limit: int | None = None) -> Opened:
        """Opens a sequence; with a prefix index, `tokens` are looked up and published blocks of theirs shared."""
        slot = self._core.open_slot()
        return Opened(self._core.tables.handle(slot), 0)

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

    def crop(self, seq: SeqId, keep: Keep) -> Plan:
        """Keeps the given live indices of each named layer (all its lanes) or ``(layer, lane)``; the rest is dropped.

        Pages that no survivor needs are freed at once. Keep-lists that are a prefix, or that drop whole pages, move
        nothing; otherwise survivors move to the front (`Plan.moves`). O(kept tokens + pages).

        Raises:
            OutOfPages: shared or published pages would have to be replaced and no page is left; nothing changed.
            StaleHandle, InvalidArgument: nothing changed.
        """
        slot = self._core.tables.slot_of(seq)
        rows, flat, counts = check_keep(keep, self._core.tables.row_lens(slot), self.lanes)
        return cropping.crop(self._core, slot, rows, flat, counts)

    def truncate(self, seqs: Seqs, counts: Counts) -> Plan:
        """Forgets the newest `counts` tokens (by position) of each sequence in every row. Moves no byte.

        O(rows + dropped pages). Tokens that a crop or a slide dropped do not come back.
        """
        slots = self._core.tables.slots_of(seqs)
        seen = self._core.tables.seen[slots]
        return dropping.truncate(self._core, slots, check_counts(counts, len(slots), seen, "is more than were seen"))

    def slide(self, seqs: Seqs) -> Plan:
        """Frees pages that lie wholly behind the sliding window of their layer."""
        raise NotImplementedError

    def commit(self, seq: SeqId, tokens: Tokens) -> int:
        """Publishes the full blocks of a never-cropped sequence."""
        raise NotImplementedError

    def fork(self, seq: SeqId, n: int = 1) -> list[SeqId]:
        """Opens `n` sequences that share every page; the first write into a shared page copies it. O(n * pages)."""
        core = self._core
        slot = core.tables.slot_of(seq)
        children = [core.clone_slot(slot) for _ in range(check_size("n", n, least=0))]
        return [core.tables.handle(child) for child in children]

    def close(self, seq: SeqId) -> Plan:
        """Ends a sequence; published pages stay cached. O(pages)."""
        return Plan(freed=self._core.close_slot(self._core.tables.slot_of(seq)))

    def preempt(self, seq: SeqId) -> Plan:
        """`close`, counted as a preemption: the caller opens the request again later. O(pages)."""
        plan = self.close(seq)
        self._core.counters.preemptions += 1
        return plan

    def grow(self, n: int) -> None:
        """Adds `n` pages to the pool. O(num_pages)."""
        n = check_size("n", n, least=0, most=INT32_MAX - self.num_pages)
        self._core.pool.resize(self.num_pages + n)

    def shrink(self, n: int) -> Plan:
        """Takes `n` pages from the pool."""
        raise NotImplementedError

    def stats(self) -> stats.AllocatorStats:
        """Counters now. O(1)."""
        return stats.collect(self._core)

    def check(self) -> None:
        """Verifies every invariant. O(pages + table entries).

        Raises:
            BrokenInvariant: one does not hold.
        """
        check_core(self._core)
