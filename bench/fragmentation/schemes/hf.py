"""transformers' own paged cache for continuous batching: its real classes hand out the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from allocator.waste import Waste
from bench.fragmentation.schedules import Schedule
from bench.fragmentation.schemes.base import Full, Ints, Request, Scheme, State
from bench.fragmentation.shape import Shape

__all__ = ["TransformersPaged", "unavailable"]


def unavailable() -> str | None:
    """Why this row cannot run with the installed transformers, or None."""
    try:
        from transformers.generation.continuous_batching.cache_allocators import CachePool  # noqa: F401
    except ImportError:
        import transformers

        return f"transformers {transformers.__version__} has no cache allocators with sectors"
    return None


@dataclass(slots=True)
class _RequestState:
    """The two things that the cache asks of a request."""

    request_id: str
    length: int = 0

    def current_len(self) -> int:
        return self.length


class TransformersPaged(Scheme):
    """Real `PagedAttentionCache`, built for a model of the same layers with the smallest possible heads."""

    key = "transformers-paged"
    title = "transformers continuous batching"
    models = "transformers' generate_batch: blocks of all layers of one kind, sectors shared between kinds; no cropping"
    checked = "its real classes are imported and hand out every block of this row"

    def __init__(self, shape: Shape, schedule: Schedule, *, watermark: float = 0.005) -> None:
        super().__init__(shape, schedule, watermark=watermark)
        self.cache: Any = _build(shape, schedule)
        self.states: dict[int, _RequestState] = {}
        self.kinds = list(self.cache.cache_allocators.values())
        self.held_back = int(watermark * self.cache.num_sectors)
        self.count = 0

    def admit(self, slot: int, request: Request, live: Ints) -> None:
        state = _RequestState(f"request-{self.count}")
        spare = self.cache.pool.num_free_sectors - self.held_back
        if self.states and spare < sum(kind.needs_new_sectors("", 0, request.prompt) for kind in self.kinds):
            raise Full
        if not self.cache.can_store_request_tokens(state, request.prompt):
            raise Full
        self.count += 1
        state.length = request.prompt
        self.states[slot] = state

    def grow(self, slots: Ints, state: State, live: Ints, drafts: Ints) -> None:
        # All or nothing: ask for the whole batch first, then take.
        wanted = [
            {
                name: kind.needs_new_blocks(self.states[s].request_id, self.states[s].length, 1 + d)
                for name, kind in self.cache.cache_allocators.items()
            }
            for s, d in zip(slots.tolist(), drafts.tolist(), strict=True)
        ]
        if self.cache.count_storable_requests(wanted) < len(wanted):
            raise Full
        for s, d in zip(slots.tolist(), drafts.tolist(), strict=True):
            request = self.states[s]
            if not self.cache.can_store_request_tokens(request, 1 + d):
                raise RuntimeError("the cache refused what it had promised")
            request.length += 1  # drafts are rolled back, their blocks stay

    def release(self, slot: int) -> None:
        self.cache.free_blocks(self.states.pop(slot).request_id)
        self.cache.pool.try_to_free_sectors()

    def waste(self, slots: Ints, state: State, waiting: Request | None) -> Waste:
        heads, page = self.shape.heads, self.shape.page_size
        held = filled = 0
        for kind in self.kinds:
            window = getattr(kind, "sliding_window", None)
            for request in self.states.values():
                blocks = len(kind.block_table.get(request.request_id, ()))
                tokens = request.length if window is None else min(request.length, window)
                held += blocks * page * kind.pages_per_block * heads
                filled += min(tokens, blocks * page) * kind.pages_per_block * heads
        needed = self.needed(slots, state)
        pool = self._pool_slots()
        external = 0
        if waiting is not None:
            tokens = sum(waiting.prompt * kind.pages_per_block for kind in self.kinds) * heads
            external = pool - held if tokens <= pool - held else 0
        # what is left of the bytes when sectors do not divide them
        rest = self.shape.pool_slots - pool
        return Waste(
            self.shape.pool_slots, needed, internal=held - filled + rest, imbalance=filled - needed, external=external
        )

    def _pool_slots(self) -> int:
        unit = self.kinds[0]
        blocks = self.cache.num_sectors * unit.blocks_per_sector
        return int(blocks * unit.pages_per_block * self.shape.page_size * self.shape.heads)

    def held_by_layer(self, slots: Ints, state: State) -> Ints:
        held = np.zeros(self.shape.layers, np.int64)
        for kind in self.kinds:
            blocks = sum(len(table) for table in kind.block_table.values())
            held[list(kind.layer_indices)] = blocks * self.shape.page_size * self.shape.heads
        return held

    def table_bytes(self, slots: Ints) -> int:
        return 4 * sum(len(table) for kind in self.kinds for table in kind.block_table.values())

    def page_tables(self, slots: Ints) -> list[npt.NDArray[np.integer]]:
        if len(self.kinds) > 1:
            return []  # block ids of different kinds count different amounts
        return [np.array(table) for table in self.kinds[0].block_table.values()]

    @property
    def page_unit(self) -> int:
        return int(self.kinds[0].pages_per_block) * self.shape.page_size * self.shape.heads


def _build(shape: Shape, schedule: Schedule) -> Any:
    from transformers import LlamaConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper

    windows = schedule.windows
    config = LlamaConfig(
        num_hidden_layers=shape.layers, num_attention_heads=1, num_key_value_heads=1, hidden_size=2, head_dim=2,
        intermediate_size=2, vocab_size=8,
    )  # fmt: skip
    if windows is not None:
        config.layer_types = ["sliding_attention" if window else "full_attention" for window in windows.tolist()]
        config.sliding_window = int(windows.max())
    options = ContinuousBatchingConfig(
        page_size=shape.page_size,
        num_blocks=shape.pool_tokens // shape.page_size,
        max_batch_tokens=1,
        max_memory_percent=1.0,
        use_async_batching=False,
    )
    config._attn_implementation = "sdpa"
    return PagedAttentionCache(config, options, torch.device("cpu"), DistributedHelper(None, None), dtype=torch.float16)
