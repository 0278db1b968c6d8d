"""What the engine counts.

Owns: the counters, and the snapshot that is handed out.
Does not know: how anything counted is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.engine.request import Row
from paged_kv.memory import PagedMemory

if TYPE_CHECKING:
    from paged_kv.engine.cropper import Cropper
    from paged_kv.engine.scheduler import Scheduler
    from paged_kv.engine.search import Searcher


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine: counts since it was opened, and what is going on now.

    Attributes:
        num_pressure_crops: Crops that freed pages because the pool had run out.
        crop_seconds: Time that crops took, choosing tokens included.
        peak_bytes: Most bytes of pages in use after a step.
        peak_dynamic_bytes: Most bytes that transformers' `DynamicCache` would have held for the same rows, unpadded.
        mean_live_len: Tokens that each paged layer held at the end of a row, mean over the ended rows.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    pages_used: int
    pages_total: int
    peak_pages: int
    pages_freed_by_crops: int
    num_pressure_crops: int
    crop_seconds: float
    peak_bytes: int
    peak_dynamic_bytes: int
    mean_live_len: tuple[float, ...]


@dataclass(slots=True)
class Meter:
    """Counters that an engine keeps while it runs."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    peak_pages: int = 0
    peak_bytes: int = 0
    peak_dynamic_bytes: int = 0

    def note(self, counts: Sequence[int], memory: PagedMemory, running: Iterable[Row]) -> None:
        """Count a step and what is held after it."""
        self.num_steps += 1
        self.num_computed_tokens += sum(counts)
        used = [stats.active_pages for stats in memory.stats()]
        specs = [group.spec for group in memory.groups]
        held = sum(pages * spec.bytes_per_page for pages, spec in zip(used, specs, strict=True))
        seen = sum(row.num_computed for row in running)
        self.peak_pages = max(self.peak_pages, sum(used))
        self.peak_bytes = max(self.peak_bytes, held)
        self.peak_dynamic_bytes = max(self.peak_dynamic_bytes, seen * sum(spec.bytes_per_token for spec in specs))

    def snapshot(self, memory: PagedMemory, scheduler: Scheduler, searcher: Searcher, cropper: Cropper) -> EngineStats:
        """These counts, and what is going on now."""
        pools = memory.stats()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=searcher.num_tokens,
            num_preemptions=scheduler.num_preemptions,
            pages_used=sum(pool.active_pages for pool in pools),
            pages_total=sum(pool.total_pages for pool in pools),
            peak_pages=self.peak_pages,
            pages_freed_by_crops=cropper.pages_freed,
            num_pressure_crops=cropper.num_pressure_crops,
            crop_seconds=cropper.seconds,
            peak_bytes=self.peak_bytes,
            peak_dynamic_bytes=self.peak_dynamic_bytes,
            mean_live_len=tuple((searcher.live_sums / max(1, searcher.num_ended)).tolist()),
        )
