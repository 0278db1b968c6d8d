"""The rows of a padded batch in pages: what a `PagedCache` holds once it knows its layers' shapes.

Owns: one sequence per row, padding kept out of pages, reordering as forks, dense copies in column order.
Does not know: transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from allocator import KVError, SeqId
from paged_kv.assign import Survivors, survivors
from paged_kv.memory import PagedMemory
from paged_kv.rows import RowMap
from paged_kv.step import Step


class BatchSizeChanged(KVError):
    """Raised when a cache is given another number of rows than it holds. Do: `reset()` it, or use one per batch."""

    def __init__(self, held: int, given: int) -> None:
        """Name both numbers of rows."""
        super().__init__(f"the cache holds {held} rows and was given {given}; reset() it or use a cache per batch")
        self.held, self.given = held, given


class PagedBatch:
    """Sequences of equal standing: row `b` of every tensor belongs to `seqs[b]`."""

    def __init__(self, memory: PagedMemory, num_rows: int) -> None:
        """Open `num_rows` empty sequences in `memory`."""
        self.memory = memory
        self.rows = RowMap(num_rows)
        self.seqs: list[SeqId] = [memory.open()[0] for _ in range(num_rows)]
        self.cropped: set[int] = set()

    @classmethod
    def of(cls, memory: PagedMemory, rows: RowMap, seqs: list[SeqId], cropped: set[int]) -> PagedBatch:
        """A batch of sequences that are open in `memory` already."""
        batch = cls(memory, 0)
        batch.rows, batch.seqs, batch.cropped = rows, seqs, cropped
        return batch

    def append(self, num_columns: int, real: np.ndarray | None) -> Step:
        """Reserve slots for new columns in all layers.

        Args:
            num_columns: New columns of every row.
            real: bool `[rows, num_columns]`, False where a row is padded; None if nowhere.

        Raises:
            OutOfPages: They do not fit; nothing changed.
        """
        if real is None:
            counts = [num_columns] * len(self.seqs)
        else:
            counts = real.sum(axis=1).tolist()
        self.memory.append(self.seqs, counts)
        self.rows.append(num_columns, real)
        return self.memory.step(self.seqs, counts)

    def drop(self, num_columns: int) -> None:
        """Roll back the newest columns: every layer loses exactly its tokens in them."""
        counts = self.rows.counts(num_columns)
        self.memory.truncate(self.seqs, counts)
        self.rows.drop(num_columns)

    def select(self, indices: Sequence[int]) -> None:
        """Make row `i` what row `indices[i]` was. Repeats are forks: pages are shared until one is written.

        Raises:
            IndexError: A row that is not there; nothing changed.
        """
        bad = [index for index in indices if not 0 <= index < len(self.seqs)]
        if bad:
            raise IndexError(f"rows {bad} are not among the {len(self.seqs)} rows of the cache")
        taken: set[int] = set()
        chosen = []
        for index in indices:
            chosen.append(self.memory.fork(self.seqs[index])[0] if index in taken else self.seqs[index])
            taken.add(index)
        for index, seq in enumerate(self.seqs):
            if index not in taken:
                self.memory.close(seq)
        self.seqs = chosen
        self.rows = self.rows.select(indices)

    def crop(self, row: int, keep: Mapping[tuple[int, int], np.ndarray]) -> int:
        """Keep live indices `keep[layer, lane]` of one row; returns the pages freed."""
        freed = self.memory.crop(self.seqs[row], keep)
        self.cropped.update(layer for layer, _ in keep)
        return freed

    def assign(self, layer: int, keys: Tensor, values: Tensor, offset: int) -> int:
        """Make a layer hold some of its tokens, or others in their place, as dense tensors say.

        Where rows or heads of a cropped layer hold different numbers of tokens, tensors that are those that were read
        without their end take as many of the newest tokens from each of them.

        Args:
            layer: Model layer index.
            keys: `[rows, kv_heads, kept, key_width]`, `kept` at most what `dense` returned.
            values: `[rows, kv_heads, kept, value_width]`.
            offset: The first column of what `dense` returned.

        Returns:
            Pages freed.

        Raises:
            KVError: More tokens than were read, shared pages, or heads of one lane that keep different numbers.
        """
        old_keys, old_values = self.dense(layer, offset)
        if keys.shape[2] > old_keys.shape[2]:
            raise KVError(f"layer {layer} holds {old_keys.shape[2]} tokens and was assigned {keys.shape[2]}")
        if torch.equal(keys, old_keys) and torch.equal(values, old_values):
            return 0
        dropped = old_keys.shape[2] - keys.shape[2]
        if self._is_ragged(layer) and torch.equal(keys, old_keys[:, :, : keys.shape[2]]):
            return self._without_newest(layer, dropped)
        group, _ = self.memory.place(layer)
        columns, heads, freed = self._columns_read(layer, offset), group.spec.heads_per_lane, 0
        for row in range(len(self.seqs)):
            keep: dict[tuple[int, int], np.ndarray] = {}
            writes = []
            for lane in range(group.spec.lanes):
                part = slice(lane * heads, (lane + 1) * heads)
                old = (old_keys[row, part], old_values[row, part])
                new = (keys[row, part], values[row, part])
                kept = survivors(old, new)
                live, order = _only_live(columns[row, lane].numpy(), kept, layer)
                keep[layer, lane] = live.max(axis=0)
                if not kept.is_same or (live != live[0]).any():
                    index = torch.from_numpy(order)[..., None]
                    writes.append((lane, [torch.take_along_dim(states, index, dim=1) for states in new]))
            if writes:
                self.memory.require_unshared(layer, self.seqs)
            freed += self.crop(row, keep)
            for lane, (lane_keys, lane_values) in writes:
                self.memory.overwrite(self.seqs[row], layer, lane, lane_keys, lane_values)
        return freed

    def _is_ragged(self, layer: int) -> bool:
        live = self.live_lens(layer)
        return layer in self.cropped and live.min(initial=0) < live.max(initial=0)

    def _without_newest(self, layer: int, count: int) -> int:
        """Take the newest `count` live tokens from every lane of every row; returns the pages freed."""
        live = self.live_lens(layer)
        return sum(
            self.crop(row, {(layer, lane): np.arange(max(0, left)) for lane, left in enumerate(live[:, row] - count)})
            for row in range(len(self.seqs))
        )

    def _columns_read(self, layer: int, offset: int) -> Tensor:
        """The live index behind each column that `dense` returned: int64 `[rows, lanes, columns]`, -1 for none."""
        live = self.live_lens(layer)
        if layer in self.cropped:
            index = torch.arange(int(live.max(initial=0))).expand(live.shape[1], live.shape[0], -1)
            return torch.where(index < torch.from_numpy(live.T.copy())[..., None], index, -1)
        columns = self.live_columns(layer).cpu() - offset
        num_columns = self.rows.num_columns - offset
        read = torch.full((*columns.shape[:2], num_columns + 1), -1)
        index = torch.arange(columns.shape[2]).expand_as(columns)
        read.scatter_(2, torch.where(columns < 0, num_columns, columns), index)
        return read[..., :num_columns]

    def dense(self, layer: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Private dense K and V of a layer: its live tokens once it was cropped, else its columns from `offset` on."""
        return self.compact(layer) if layer in self.cropped else self.in_columns(layer, offset)

    def close(self) -> None:
        """Give all pages back."""
        for seq in self.seqs:
            self.memory.close(seq)
        self.seqs = []

    # -- dense copies ------------------------------------------------------------------------------------------------

    def live_lens(self, layer: int) -> np.ndarray:
        """Live tokens of a layer: int32 `[lanes, rows]`."""
        return self.memory.live_lens(self.seqs, layer)

    def longest_live(self) -> int:
        """Most live tokens of any row in any layer."""
        return max(int(self.live_lens(layer).max(initial=0)) for layer in self.memory.layers)

    def live_columns(self, layer: int) -> Tensor:
        """The column of every live token: int64 `[rows, lanes, longest]`, -1 behind the end of a shorter row."""
        live = self.live_lens(layer)
        columns = np.full((live.shape[1], live.shape[0], int(live.max(initial=0))), -1, np.int64)
        for row, seq in enumerate(self.seqs):
            of_position = self.rows.columns(row)
            for lane in range(live.shape[0]):
                positions = self.memory.positions(seq, layer, lane)
                columns[row, lane, : len(positions)] = of_position[positions]
        return torch.from_numpy(columns).to(self._device(layer))

    def compact(self, layer: int) -> tuple[Tensor, Tensor]:
        """Dense K and V `[rows, kv_heads, longest, width]` of the live tokens, each row from index 0 on."""
        group, index = self.memory.place(layer)
        live = self.live_lens(layer)
        table = torch.from_numpy(group.allocator.block_tables(self.seqs, index)).to(group.spec.device)
        longest = int(live.max(initial=0))
        keys, values = group.store.gather(table, longest)
        if live.min(initial=longest) == longest:
            return keys, values
        # Behind a shorter row's end lie other rows' tokens: they must not be read as this row's.
        lens = torch.from_numpy(live.T.repeat(group.spec.heads_per_lane, axis=1)).to(keys.device)
        dead = torch.arange(longest, device=keys.device) >= lens[..., None]
        return keys.masked_fill(dead[..., None], 0), values.masked_fill(dead[..., None], 0)

    def in_columns(self, layer: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Dense K and V with every live token at its column, from column `offset` on, zeros at padding and holes."""
        keys, values = self.compact(layer)
        num_columns = self.rows.num_columns - offset
        if offset == 0 and self.rows.is_dense and bool((self.live_lens(layer) == num_columns).all()):
            return keys, values
        columns = self.live_columns(layer)
        if columns.shape[1] < keys.shape[1]:
            columns = columns.repeat_interleave(keys.shape[1] // columns.shape[1], dim=1)
        return _scatter(keys, columns - offset, num_columns), _scatter(values, columns - offset, num_columns)

    def _device(self, layer: int) -> torch.device:
        return self.memory.place(layer)[0].spec.device


def _only_live(live: np.ndarray, kept: Survivors, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The survivors' live indices and their order `[heads, kept]`, what was padding left out.

    Raises:
        KVError: The heads of a lane would keep different numbers of tokens.
    """
    index = live[kept.columns]
    counts = (index >= 0).sum(axis=1)
    if (counts != counts[0]).any():
        raise KVError(
            f"the heads of layer {layer} would keep {sorted(set(counts.tolist()))} tokens of a padded row; "
            'make the cache with lanes="head"'
        )
    real = index >= 0
    return index[real].reshape(len(index), -1), kept.order[real].reshape(len(index), -1)


def _scatter(states: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Put `[rows, heads, live, width]` at `columns` `[rows, heads, live]` of zeros; negative ones are left out."""
    rows, heads, _, width = states.shape
    # One spare column takes what is left out.
    dense = states.new_zeros((rows, heads, num_columns + 1, width))
    target = torch.where(columns < 0, num_columns, columns)
    dense.scatter_(2, target[..., None].expand(-1, -1, -1, width), states)
    return dense[:, :, :num_columns]
