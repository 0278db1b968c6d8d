"""Page tensors that grow and shrink: `[num_pages, *shape]`, in reserved address space where the system has it.

Owns: how the memory of a pool is taken from the system and given back.
Does not know: what is in a page.

On the CPU a growing pool reserves addresses for all the pages it may ever have. The system gives memory to a page when
it is first written, so growing moves nothing and never holds two copies; shrinking hands the memory of the last pages
back. Elsewhere growing and shrinking copy into new tensors.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_FLAGS = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    if hasattr(mmap, "MAP_ANONYMOUS") and hasattr(mmap, "MADV_DONTNEED")
    else None
)


class Pages:
    """`tensor` `[num_pages, *shape]`; new pages are zero, pages below both sizes of a `resize` keep their contents."""

    def __init__(
        self, num_pages: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, capacity: int = 0
    ) -> None:
        """Take `num_pages` pages; with a capacity in pages above that, room to grow to it in place where possible."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self._page_bytes = math.prod(shape) * dtype.itemsize
        self._map = self._reserve(capacity) if capacity > num_pages else None
        # A tensor born in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            if self._map is None:
                self._all = torch.zeros((num_pages, *shape), dtype=dtype, device=device)
            else:
                self._all = torch.frombuffer(self._map, dtype=dtype).view(capacity, *shape)
            self.tensor = self._all[:num_pages]

    def _reserve(self, capacity: int) -> mmap.mmap | None:
        if _FLAGS is None or self.device.type != "cpu" or not self._page_bytes:
            return None
        try:
            reserved = mmap.mmap(-1, capacity * self._page_bytes, flags=_FLAGS)
        except (OSError, OverflowError):  # a limit on address space, or a system that commits all it promises
            return None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                reserved.madvise(mmap.MADV_HUGEPAGE)
        return reserved

    @property
    def grows_in_place(self) -> bool:
        """Whether `resize` within the capacity moves nothing."""
        return self._map is not None

    def resize(self, num_pages: int) -> None:
        """Grow or shrink to `num_pages` pages."""
        have = self.tensor.shape[0]
        with torch.inference_mode(False):
            if self._map is None or num_pages > self._all.shape[0]:
                old, self._map = self.tensor, None
                self._all = torch.zeros((num_pages, *self.shape), dtype=self.dtype, device=self.device)
                kept = min(num_pages, have)
                self._all[:kept] = old[:kept]
            self.tensor = self._all[:num_pages]
        if self._map is not None and num_pages < have:
            self._give_back(num_pages, have)

    def _give_back(self, begin: int, end: int) -> None:
        """The memory of pages [begin, end); they read as zeros afterwards."""
        assert self._map is not None
        first, last = begin * self._page_bytes, end * self._page_bytes
        whole = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole < last:
            self._map.madvise(mmap.MADV_DONTNEED, whole, last - whole)
        with torch.inference_mode(False):
            self._all[begin : min(end, -(-whole // self._page_bytes))].zero_()
