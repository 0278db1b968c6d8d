"""Crops of running rows: on schedule, and under pressure so that nobody has to be preempted.

Owns: recording queries for the rows whose policies read them, cropping layers, choosing whom pressure hits.
Does not know: when a crop is due (`CropPlan`), how a policy chooses, who is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from allocator import OutOfPages, SeqId
from paged_kv.compression.apply import crop
from paged_kv.engine.request import Request, Row
from paged_kv.live import Policy
from paged_kv.memory import PagedMemory


class Cropper:
    """Frees pages of rows whose requests ask for it or allow it."""

    def __init__(self, memory: PagedMemory, clock: Callable[[], float]) -> None:
        self._memory = memory
        self._clock = clock
        self.seconds = 0.0
        self._stuck: dict[Row, int] = {}  # tokens computed when another try is worth it
        self._failed: dict[Request, str] = {}
        self.pages_freed = 0
        self.num_pressure_crops = 0

    def begin(self, rows: Iterable[Row]) -> None:
        """Before a forward: record the queries of rows that are going to be cropped by them."""
        for row in rows:
            crops = row.request.crops
            if crops is not None and crops.num_queries and row.seq is not None:
                wanted = row.crop_pending or row.num_computed < row.num_prompt or crops.crops_output
                self._memory.record_queries(crops.num_queries if wanted else 0, row.seq)

    def crop_due(self, rows: Iterable[Row]) -> bool:
        """After a forward: crop the rows whose crop is due, or was and found no page; whether any was cropped."""
        any_due = False
        for row in rows:
            crops = row.request.crops
            if crops is None or row.seq is None:
                continue
            if row.crop_pending or crops.is_due(row.num_prompt, row.num_computed, row.num_live):
                any_due = True
                row.crop_pending = not self._crop(row, crops.budgets)
        return any_due

    def take_failed(self) -> dict[Request, str]:
        """Requests whose policy raised since the last call, and what it said."""
        failed, self._failed = self._failed, {}
        return failed

    # -- pressure ----------------------------------------------------------------------------------------------------

    def reserve(self, rows: Iterable[Row]) -> int:
        """Free pages to keep, so that survivors of the first layer of a pressure crop can move off shared pages."""
        floors = [row.floor for row in rows if row.floor is not None]
        if not floors:
            return 0
        return max(-(-max(floors) // group.spec.page_size) * group.spec.lanes for group in self._memory.groups)

    def relieve(self, rows: Sequence[Row]) -> bool:
        """Crop the longest row that allows it to its floor; False if none is left that would free pages."""
        self._stuck = {row: until for row in rows if (until := self._stuck.get(row, 0)) > row.num_computed}
        able = [row for row in rows if row not in self._stuck and row.seq is not None and _room(row) > 0]
        for row in sorted(able, key=lambda row: (row.num_todo > 1, -_room(row))):
            assert row.floor is not None
            before = self.pages_freed
            done = self._crop(row, dict.fromkeys(self._memory.layers, row.floor))
            self.num_pressure_crops += 1
            if done and self.pages_freed > before:
                return True
            self._stuck[row] = row.num_computed + self._memory.groups[0].spec.page_size
        return False

    # -- one row -----------------------------------------------------------------------------------------------------

    def _crop(self, row: Row, budgets: Mapping[int, int]) -> bool:
        """Crop a row's layers to their budgets; False if survivors found no page, and it is to be tried again."""
        crops = row.request.crops
        assert crops is not None
        assert row.seq is not None
        row.num_cropped += 1
        before, start = _num_active(self._memory), self._clock()
        try:
            crop_layers(self._memory, row.seq, crops.policy, budgets)
        except OutOfPages:
            return False
        except Exception as error:  # noqa: BLE001 - foreign code: its failure is its own request's result
            self._failed[row.request] = f"the crop raised {type(error).__name__}: {error}"
            return True
        finally:
            self.seconds += self._clock() - start
            self.pages_freed += before - _num_active(self._memory)
            row.num_live = longest_layer(self._memory, row.seq, budgets)
        return True


def crop_layers(memory: PagedMemory, seq: SeqId, policy: Policy, budgets: Mapping[int, int]) -> None:
    """Crop one sequence, layer by layer, smallest budget first.

    Raises:
        OutOfPages: Survivors must move off shared or published pages and no page is left for them. The layers cropped
            so far stay cropped; calling again goes on with the others.
    """
    for layer, budget in sorted(budgets.items(), key=lambda item: item[1]):
        if int(memory.live_lens([seq], layer).max()) > budget:
            crop(memory, seq, layer, policy, budget)


def longest_layer(memory: PagedMemory, seq: SeqId, layers: Iterable[int]) -> int:
    """Live tokens of the longest of some layers, mean over its lanes, rounded up."""
    live: dict[int, int] = {}
    for group in memory.groups:
        lens = group.allocator.live_lens([seq])[:, 0].reshape(-1, group.spec.lanes)
        live.update(zip(group.spec.layers, np.ceil(lens.mean(axis=1)).astype(int).tolist(), strict=True))
    return max(live[layer] for layer in layers)


def _room(row: Row) -> int:
    """Tokens that pressure may take from a row's longest layer."""
    return 0 if row.floor is None else row.num_live - row.floor


def _num_active(memory: PagedMemory) -> int:
    return sum(stats.active_pages for stats in memory.stats())
