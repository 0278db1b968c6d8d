"""What one forward pass needs of the pages: tables, slots and views, computed once and cut per layer.

Owns: the exports of all layers for one step.
Does not know: how slots were reserved, attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allocator import SeqId
from paged_kv.group import Group
from paged_kv.store import LayerView


class Step:
    """Page tables, slots and views of one forward pass, computed once and cut per layer."""

    def __init__(
        self,
        groups: Sequence[Group],
        place: Callable[[int], tuple[Group, int]],
        seqs: Sequence[SeqId],
        counts: Sequence[int],
    ) -> None:
        """Export the tables of `seqs`, whose newest `counts` tokens are about to be computed.

        Args:
            groups: All groups of the model.
            place: Where a model layer is: its group and its index there.
            seqs: The rows.
            counts: New tokens of each.
        """
        self._place = place
        self.seqs = list(seqs)
        self.counts = [int(count) for count in counts]
        self.num_tokens = sum(self.counts)
        self.max_query_len = max(self.counts, default=0)
        start = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=start[1:])
        self.query_start_host = start
        self._tables = {id(group): _Tables.of(group, self.seqs, self.counts) for group in groups}
        device = groups[0].spec.device
        self.query_start = torch.from_numpy(start).to(device)

    def slots(self, layer: int) -> Tensor:
        """Where the new tokens of a layer go: int64 `[lanes, tokens]`."""
        group, index = self._place(layer)
        return self._tables[id(group)].slots[index]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens' K and V `[tokens, kv_heads, width]` into a layer's slots."""
        group, index = self._place(layer)
        tables = self._tables[id(group)]
        group.store.write(keys, values, tables.pages[index], tables.offsets[index])

    def view(self, layer: int, window: int | None = None) -> LayerView:
        """A layer's pages for an attention backend, the new tokens included.

        Args:
            layer: Model layer index.
            window: Tokens that a query sees, itself included; None for all live ones.
        """
        group, index = self._place(layer)
        tables = self._tables[id(group)]
        kv_start = None
        if window is not None and tables.max_seen > window:
            start = group.allocator.visible_start(self.seqs, self.counts, index, window)
            kv_start = torch.from_numpy(start).to(group.spec.device)
        return LayerView(
            keys=group.store.keys,
            values=group.store.values,
            block_table=tables.block_tables[index],
            live_lens=tables.live_lens[index],
            query_start=self.query_start,
            kv_start=kv_start,
            max_query_len=self.max_query_len,
            max_live_len=tables.max_live_len[index],
        )


@dataclass(frozen=True, slots=True)
class _Tables:
    """A group's exports for one step, first axis the layers of the group."""

    block_tables: Tensor
    live_lens: Tensor
    slots: Tensor
    pages: Tensor
    offsets: Tensor
    max_live_len: list[int]
    max_seen: int

    @classmethod
    def of(cls, group: Group, seqs: Sequence[SeqId], counts: Sequence[int]) -> _Tables:
        allocator, spec = group.allocator, group.spec
        live = allocator.live_lens(seqs)
        layers = len(spec.layers)

        def by_layer(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.reshape(layers, spec.lanes, *array.shape[1:])).to(spec.device)

        slots = by_layer(allocator.slot_mapping(seqs, counts))
        return cls(
            block_tables=by_layer(allocator.block_tables(seqs)),
            live_lens=by_layer(live),
            slots=slots,
            pages=slots // spec.page_size,
            offsets=slots % spec.page_size,
            max_live_len=live.reshape(layers, -1).max(axis=1, initial=0).tolist(),
            max_seen=max((allocator.seen_len(seq) for seq in seqs), default=0),
        )
