"""The parts that a model's paged memory is made of: a group of layers of one shape, and a budget in bytes.

Owns: pairing an allocator with the store of its pages; turning pages, bytes or a fraction of memory into a budget.
Does not know: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allocator import BlockAllocator
from paged_kv.spec import KVSpec, available_bytes
from paged_kv.store import PageStore

#: Pages that a growing pool starts with, per layer and lane.
INITIAL_PAGES_PER_ROW = 8


@dataclass(slots=True, eq=False)
class Group:
    """The layers of one KV shape: page ids in `allocator`, bytes in `store`."""

    spec: KVSpec
    allocator: BlockAllocator
    store: PageStore
    is_prefix_cached: bool

    @classmethod
    def empty(cls, spec: KVSpec, num_pages: int, enable_prefix_caching: bool, capacity: int = 0) -> Group:
        """A pool of free pages and their tensors, null page included, that may grow to `capacity` pages."""
        allocator = BlockAllocator(
            num_pages,
            page_size=spec.page_size,
            num_layers=len(spec.layers),
            lanes=spec.lanes,
            windows=spec.windows,
            enable_prefix_caching=enable_prefix_caching,
        )
        return cls(spec, allocator, PageStore(spec, num_pages, capacity), enable_prefix_caching)

    def copy(self) -> Group:
        """The same pages and tables in tensors of their own; sequence ids stay valid in it."""
        twin = Group.empty(self.spec, self.store.num_pages, self.is_prefix_cached, self.store.capacity)
        twin.allocator.restore(self.allocator.snapshot())
        twin.store.keys.copy_(self.store.keys)
        twin.store.values.copy_(self.store.values)
        return twin


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes the pages may take, and how many are taken at the start.

    Attributes:
        max_bytes: Never more than this, over all groups.
        initial_bytes: Taken at once; equal to `max_bytes` for a pool of fixed size.
    """

    max_bytes: int
    initial_bytes: int

    @classmethod
    def of(
        cls,
        specs: Sequence[KVSpec],
        *,
        num_pages: int | None = None,
        kv_cache_bytes: int | None = None,
        memory_fraction: float | None = None,
    ) -> Budget:
        """A fixed pool of `num_pages` or `kv_cache_bytes`, or a growing one within a fraction of the free memory.

        Args:
            specs: The groups that share the budget.
            num_pages: Pages of a fixed pool, null page included, in each group.
            kv_cache_bytes: Bytes of a fixed pool, over all groups.
            memory_fraction: Fraction of the device's free memory up to which the pool grows; 0.9 if nothing is given.

        Raises:
            ValueError: More than one of the three is given, or one is out of range.
        """
        given = [name for name, value in _named(num_pages, kv_cache_bytes, memory_fraction) if value is not None]
        if len(given) > 1:
            raise ValueError(f"give at most one of num_pages, kv_cache_bytes and memory_fraction, got {given}")
        if num_pages is not None:
            if num_pages < 2:
                raise ValueError(f"num_pages counts the null page and must be at least 2, got {num_pages}")
            total = sum(num_pages * spec.bytes_per_page for spec in specs)
            return cls(total, total)
        if kv_cache_bytes is not None:
            smallest = 2 * sum(spec.bytes_per_page for spec in specs)
            if kv_cache_bytes < smallest:
                raise ValueError(f"kv_cache_bytes must hold two pages a group ({smallest} bytes), got {kv_cache_bytes}")
            return cls(kv_cache_bytes, kv_cache_bytes)
        fraction = 0.9 if memory_fraction is None else memory_fraction
        if not 0 < fraction <= 1:
            raise ValueError(f"memory_fraction must be above 0 and at most 1, got {memory_fraction}")
        max_bytes = int(available_bytes(specs[0].device) * fraction)
        rows = sum(len(spec.layers) * spec.lanes * spec.bytes_per_page for spec in specs)
        return cls(max_bytes, min(max_bytes, INITIAL_PAGES_PER_ROW * rows))


def shares(total: int, specs: Sequence[KVSpec]) -> list[int]:
    """Pages of each group, at least two, that divide `total` bytes in proportion to the bytes of a token."""
    weight = sum(spec.bytes_per_token for spec in specs)
    return [max(2, int(total * spec.bytes_per_token / weight) // spec.bytes_per_page) for spec in specs]


def _named(num_pages: int | None, kv_cache_bytes: int | None, fraction: float | None) -> list[tuple[str, object]]:
    return [("num_pages", num_pages), ("kv_cache_bytes", kv_cache_bytes), ("memory_fraction", fraction)]
