"""`PoolLifecycle`: the half of `BlockAllocator` that concerns the pool as a whole.

Size at run time, reservations, pins, the prefix index's contents, events, deltas, snapshots.
"""

from __future__ import annotations

import numpy as np

from allocator import appending, relocation, sharing, snapshot
from allocator.core import Core
from allocator.deltas import DeltaLog, TableDelta
from allocator.errors import InvalidArgument, OutOfPages, StaleHandle
from allocator.events import Event
from allocator.plan import Plan
from allocator.types import Int32, PinId, SeqId, Tokens
from allocator.validate import INT32_MAX, check_scope, check_size, check_tokens

__all__ = ["PoolLifecycle"]


class PoolLifecycle:
    """Calls about the pool, not about one step of one sequence."""

    _core: Core

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page among them."""
        return self._core.pool.num_pages

    def grow(self, n: int) -> None:
        """Adds `n` pages to the pool; the store grows before they are used. O(num_pages)."""
        n = check_size("n", n, least=0, most=INT32_MAX - self.num_pages)
        relocation.resize(self._core, self.num_pages + n)

    def shrink(self, n: int) -> Plan:
        """Takes the `n` highest pages from the pool, moving what they hold (`Plan.copies`). O(num_pages).

        The store applies the plan before it gives the pages up. Cached blocks are evicted as far as necessary.

        Raises:
            OutOfPages: what is in use (or reserved) does not fit into the rest; nothing changed.
            PagesPinned: a pinned page would have to move; nothing changed.
            InvalidArgument: fewer than two pages would be left.
        """
        return relocation.shrink(self._core, check_size("n", n, least=0, most=self.num_pages - 2))

    def reserve(self, seq: SeqId, num_tokens: int) -> int:
        """Sets aside what appending `num_tokens` to `seq` takes now, so that no other sequence can have it.

        Replaces an earlier reservation of `seq`; 0 gives it up. Appends of `seq` use it up, its close returns it.
        O(rows). Returns the pages set aside.

        Raises:
            OutOfPages: they are not available; nothing changed.
        """
        core = self._core
        slot = core.tables.slot_of(seq)
        room = INT32_MAX - int(core.tables.seen[slot])
        count = check_size("num_tokens", num_tokens, least=0, most=room)
        needed = appending.demand(core, np.array([slot]), np.array([count])).needed
        others = core.total_reserved - int(core.reserved[slot])
        if needed > core.available - others:
            raise OutOfPages(needed, core.available - others, core.usable)
        core.reserved[slot] = needed
        core.total_reserved = others + needed
        return needed

    def pin(self, seq: SeqId) -> tuple[PinId, Int32]:
        """Protects the pages of `seq` as they are, for a transfer that reads them on its own time.

        Until `unpin` they are neither freed (not even by close) nor written (append copies a partly filled one).
        O(pages). Returns the pin and its pages, row after row.
        """
        core = self._core
        slot = core.tables.slot_of(seq)
        core.frozen_tail[slot] = True
        pages = core.tables.pages_of(slot)
        core.pool.retain(pages)
        return self._pinned(pages), pages.copy()

    def pin_prefix(self, tokens: Tokens, *, scope: bytes = b"") -> tuple[PinId, int]:
        """Keeps the published whole blocks of `tokens` from eviction. O(blocks). Returns the pin and tokens covered.

        Raises:
            OutOfPages: the cached pages among them are reserved for sequences; nothing changed.
        """
        core = self._core
        pages, covered = sharing.acquire_prefix(core, check_tokens(tokens), check_scope(scope))
        return self._pinned(pages), covered

    def _pinned(self, pages: Int32) -> PinId:
        pin = PinId(self._core.next_pin)
        self._core.next_pin += 1
        self._core.pins[pin] = pages
        return pin

    def unpin(self, pin: PinId) -> Plan:
        """Ends a pin; pages that nobody references any more are freed now. O(pages).

        Raises:
            StaleHandle: the pin was ended before, or never was.
        """
        if pin not in self._core.pins:
            raise StaleHandle(pin, "pin")
        return Plan(freed=self._core.release(self._core.pins.pop(pin)))

    def clear_prefix(self) -> int:
        """Forgets every published block. O(blocks). Returns how many there were."""
        return self._core.prefix.clear() if self._core.prefix is not None else 0

    def drain_events(self) -> list[Event]:
        """What the prefix index stored, removed and cleared since the last call, in order. O(events).

        Raises:
            InvalidArgument: the allocator was not built with ``record_events=True``.
        """
        index = self._core.prefix
        if index is None or index.events is None:
            raise InvalidArgument(
                "record_events", False, "events are recorded only when the allocator is built with it"
            )
        events, index.events = index.events, []
        return events

    def drain_deltas(self) -> TableDelta:
        """Table entries that changed since the last call. O(changes).

        The first call starts the recording and returns every entry there is.
        """
        core = self._core
        if core.deltas is None:
            core.deltas = DeltaLog()
            for slot in core.tables.open_slots().tolist():
                core.deltas.rewrite(slot)
        return core.deltas.drain(core.tables)

    def snapshot(self) -> bytes:
        """All metadata as bytes: versioned, checksummed, without page contents. O(pages + table entries)."""
        return snapshot.dump(self._core, self._config())

    def restore(self, data: bytes) -> None:
        """Replaces the whole state by that of a snapshot of an equally built allocator. Old handles are stale after it,
        handles of the snapshot valid. O(pages + table entries).

        Raises:
            SnapshotCorrupt: truncated, altered, or no snapshot; nothing changed.
            SnapshotMismatch: of another version or configuration; nothing changed.
        """
        self._core = snapshot.load(data, self._config(), self._build(self.num_pages))

    def _build(self, num_pages: int) -> Core:
        """An empty state of the configured shape."""
        raise NotImplementedError

    def _config(self) -> dict[str, object]:
        """What two allocators must agree on to exchange snapshots."""
        raise NotImplementedError
