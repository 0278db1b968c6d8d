"""The backend "triton": block tables, lanes and small pages on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.gpu import triton_reason
from paged_kv.store import LayerView

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PART = 512  # live tokens that are worth a program of their own
_WIDEST = 256


class TritonBackend:
    """Decode with the live tokens split over programs, and prefill, in one launch for any mix of rows."""

    name = "triton"

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """Why this call cannot run here, or None. Looks at shapes only: values would have to come from the device."""
        if reason := triton_reason(query.device, interpreted=_interpreted()):
            return reason
        if view.keys.dtype not in _DTYPES or query.dtype != view.keys.dtype:
            return f"the query is {query.dtype} and the pages are {view.keys.dtype}: not one of {_DTYPES} for both"
        if max(query.shape[-1], view.values.shape[-1]) > _WIDEST:
            return f"heads are wider than {_WIDEST}"
        if torch.is_grad_enabled() and query.requires_grad:
            return "the kernel computes no gradients"
        return None

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend packed queries to pages; see `Backend.attend`."""
        return launch(query, view, options, parts=_parts(query, view))


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _parts(query: Tensor, view: LayerView) -> int:
    """Parts of the live tokens: enough programs for the device when rows and heads alone are too few."""
    if query.device.type != "cuda":
        return 1
    programs = max(1, view.live_lens.shape[1] * view.num_kv_heads)
    wanted = -(-2 * torch.cuda.get_device_properties(query.device).multi_processor_count // programs)
    return max(1, min(wanted, view.max_live_len // _PART, 32)) if view.max_query_len == 1 else 1


def launch(query: Tensor, view: LayerView, options: AttentionOptions, *, parts: int) -> Tensor:
    """Run the kernels, with every row's live tokens in `parts` parts.

    Returns:
        `[tokens, q_heads, value_width]`.
    """
    from paged_kv.attention.gpu import kernels

    tokens, q_heads, key_width = query.shape
    value_width = view.values.shape[-1]
    _, rows, max_pages = view.block_table.shape
    group = q_heads // view.num_kv_heads
    queries = max(1, min(_power(view.max_query_len), 64 // _power(group)))
    out = query.new_empty((tokens, q_heads, value_width))
    if tokens == 0:
        return out
    shape = (parts, tokens, q_heads, value_width + 2) if parts > 1 else (1,)
    partial = torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
    sinks = options.sinks.float().contiguous() if options.sinks is not None else None
    widths: dict[str, Any] = {
        "value_width": value_width,
        "has_sinks": sinks is not None,
        "V": max(16, _power(value_width)),
    }
    any_tensor = view.live_lens
    grid = (-(-view.max_query_len // queries), view.num_kv_heads * parts, rows)
    kernels.attend_tile[grid](
        query.contiguous(),
        view.keys,
        view.values,
        view.block_table,
        view.live_lens,
        view.query_start,
        view.kv_start if view.kv_start is not None else any_tensor,
        sinks if sinks is not None else any_tensor,
        out,
        partial,
        options.scale,
        options.softcap or 0.0,
        rows,
        tokens,
        max_pages,
        q_heads,
        parts,
        heads_per_lane=view.keys.shape[1],
        group=group,
        page_size=view.page_size,
        key_width=key_width,
        causal=options.causal,
        has_start=view.kv_start is not None,
        has_softcap=options.softcap is not None,
        widen=_interpreted(),
        QUERIES=queries,
        M=max(16, _power(queries * group)),
        N=64 if max(key_width, value_width) <= 128 else 32,
        K=max(16, _power(key_width)),
        **widths,
    )
    if parts > 1:
        kernels.join_parts[(tokens * q_heads,)](
            partial, sinks if sinks is not None else any_tensor, out, tokens, q_heads, parts, **widths
        )
    return out


def _power(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
