"""The page tensors of one group of layers, and the only place where a plan touches bytes.

Owns: K and V pages, writing new tokens, gathering pages, applying plans.
Does not know: sequences, layers, policies; it is given slots, pages and plans.

Layout: `keys[page, head, offset, :]`. A page of a whole layer and a page of a single head are the same thing with
another `heads_per_lane`, and a kernel reads `page_size * width` contiguous elements per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allocator import Plan
from paged_kv.pages import Pages
from paged_kv.spec import KVSpec


@dataclass(frozen=True, slots=True)
class LayerView:
    """What one attention call over the pages of one layer needs.

    Attributes:
        keys: `[num_pages, heads_per_lane, page_size, key_width]`.
        values: `[num_pages, heads_per_lane, page_size, value_width]`.
        block_table: int32 `[lanes, rows, max_pages]`, padded with the null page 0.
        live_lens: int32 `[lanes, rows]`, live tokens of each row, this step's new ones included.
        query_start: int32 `[rows + 1]`, where each row's queries begin in the packed tokens.
        kv_start: int32 `[lanes, tokens]`, the first live index each query token sees; None means 0 for all. Windows
            and chunks are such ranges, because positions increase with the live index.
        max_query_len: Most queries of a row, tokens.
        max_live_len: Most live tokens of a row.
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    live_lens: Tensor
    query_start: Tensor
    kv_start: Tensor | None
    max_query_len: int
    max_live_len: int

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer, over all lanes."""
        return self.keys.shape[1] * self.block_table.shape[0]


class PageStore:
    """K and V pages of one `KVSpec` group: `[num_pages, heads_per_lane, page_size, width]` each.

    Page 0 is the null page: readable padding, never written by `write`.
    """

    def __init__(self, spec: KVSpec, num_pages: int, capacity: int = 0) -> None:
        """Take pages on the spec's device; contents are undefined but finite.

        Args:
            spec: Shape of a page.
            num_pages: Pages to start with, the null page included.
            capacity: Pages that the store may grow to; growing within it moves nothing on the CPU.
        """
        self.spec, self.capacity = spec, max(capacity, num_pages)
        shape = (spec.heads_per_lane, spec.page_size)
        self._keys = Pages(num_pages, (*shape, spec.key_width), spec.dtype, spec.device, capacity)
        self._values = Pages(num_pages, (*shape, spec.value_width), spec.dtype, spec.device, capacity)

    @property
    def keys(self) -> Tensor:
        """`[num_pages, heads_per_lane, page_size, key_width]`."""
        return self._keys.tensor

    @property
    def values(self) -> Tensor:
        """`[num_pages, heads_per_lane, page_size, value_width]`."""
        return self._values.tensor

    @property
    def grows_in_place(self) -> bool:
        """Whether growing within the capacity moves nothing, so that it may be done in small steps."""
        return self._keys.grows_in_place and self._values.grows_in_place

    @property
    def num_pages(self) -> int:
        """Pages of the store, the null page included."""
        return self.keys.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the page tensors."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, keys: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
        """Write new tokens into their slots.

        Args:
            keys: `[tokens, kv_heads, key_width]`.
            values: `[tokens, kv_heads, value_width]`.
            pages: int64 `[lanes, tokens]`, the page of each slot; slots are distinct.
            offsets: int64 `[lanes, tokens]`, the place of each slot in its page.
        """
        self.keys[pages, :, offsets] = self._by_lane(keys).to(self.spec.dtype)
        self.values[pages, :, offsets] = self._by_lane(values).to(self.spec.dtype)

    def _by_lane(self, states: Tensor) -> Tensor:
        """`[tokens, kv_heads, width]` as `[lanes, tokens, heads_per_lane, width]`."""
        tokens, _, width = states.shape
        return states.view(tokens, self.spec.lanes, self.spec.heads_per_lane, width).transpose(0, 1)

    def gather(self, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copy the first `length` slots of each row into dense K and V.

        Args:
            block_table: int `[lanes, rows, max_pages]`; `max_pages * page_size >= length`.
            length: Tokens to return; slots past a row's live length hold other data, mask them.

        Returns:
            K `[rows, kv_heads, length, key_width]` and V `[rows, kv_heads, length, value_width]`.
        """
        num_pages = -(-length // self.spec.page_size)
        pages = block_table[:, :, :num_pages]
        return gather_pages(self.keys, pages, length), gather_pages(self.values, pages, length)

    def apply(self, plan: Plan) -> None:
        """Carry out a plan's page copies and slot moves: all reads of a kind happen before its writes."""
        if plan.copies.src.size:
            src, dst = self._index(plan.copies.src), self._index(plan.copies.dst)
            self.keys[dst] = self.keys[src]
            self.values[dst] = self.values[src]
        if plan.moves.src.size:
            size = self.spec.page_size
            src, dst = self._index(plan.moves.src), self._index(plan.moves.dst)
            self.keys[dst // size, :, dst % size] = self.keys[src // size, :, src % size]
            self.values[dst // size, :, dst % size] = self.values[src // size, :, src % size]

    def _index(self, ids: object) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.int64, device=self.spec.device)

    def resize(self, num_pages: int) -> None:
        """Grow or shrink to `num_pages` pages; pages below both sizes keep their contents."""
        self._keys.resize(num_pages)
        self._values.resize(num_pages)


def gather_pages(pages: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Copy whole pages `[num_pages, heads, page_size, width]` into `[rows, lanes * heads, length, width]`.

    Whole pages are gathered (`index_select`): four times faster than single slots.
    """
    lanes, rows, columns = block_table.shape
    _, heads, page_size, width = pages.shape
    flat = pages.index_select(0, block_table.reshape(-1).long())
    dense = flat.view(lanes, rows, columns, heads, page_size, width).permute(1, 0, 3, 2, 4, 5)
    return dense.reshape(rows, lanes * heads, columns * page_size, width)[:, :, :length]
