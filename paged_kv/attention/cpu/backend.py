"""The backend "cpu": attention by the fused kernel, straight from the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.cpu.build import load, why_not
from paged_kv.store import LayerView

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuBackend:
    """Decode and prefill rows of any live lengths in one call, nothing gathered; accumulates in fp32.

    Bad input (a device, dtype, shape, page index or length that does not fit) raises `ValueError` before anything runs.
    A row's result does not depend on the other rows of the call, nor on the number of threads.
    """

    name = "cpu"

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """Why this call cannot run here, or None. Compiles the kernel at the first call that gets that far."""
        if query.device.type != "cpu" or view.keys.device.type != "cpu":
            return f"the pages are on {view.keys.device} and the query is on {query.device}, not on the CPU"
        if view.keys.dtype not in _DTYPES or query.dtype != view.keys.dtype:
            return f"the query is {query.dtype} and the pages are {view.keys.dtype}: not one of {_DTYPES} for both"
        if torch.is_grad_enabled() and query.requires_grad:
            return "the kernel computes no gradients"
        return why_not()

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend packed queries to pages; see `Backend.attend`.

        Raises:
            ValueError: Input that does not fit; the message names the value.
            KernelUnavailable: There is no kernel here, and `unsupported` was not asked.
        """
        load()
        out: Tensor = torch.ops.paged_kv.attend(
            query if query.stride(-1) == 1 else query.contiguous(),
            view.keys,
            view.values,
            view.block_table,
            view.live_lens,
            view.query_start,
            view.kv_start,
            options.sinks,
            options.scale,
            options.softcap or 0.0,
            options.causal,
        )
        return out


def write_pages(view_keys: Tensor, view_values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write new tokens into their slots with the fused kernel.

    Args:
        view_keys: `[num_pages, heads_per_lane, page_size, key_width]`, written to.
        view_values: `[num_pages, heads_per_lane, page_size, value_width]`, written to.
        key: `[tokens, kv_heads, key_width]`, the width contiguous.
        value: `[tokens, kv_heads, value_width]`.
        slots: int64 `[lanes, tokens]`, `page * page_size + offset`.

    Raises:
        ValueError: Input that does not fit; nothing is written.
        KernelUnavailable: There is no kernel here.
    """
    load()
    torch.ops.paged_kv.write(view_keys, view_values, key, value, slots)
