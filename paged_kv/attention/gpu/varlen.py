"""The backend "varlen": torch's variable-length attention over a block table, where its constraints allow."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.gpu import varlen_reason
from paged_kv.store import LayerView

_PAGE_MULTIPLE = 256  # of the page size: FlashAttention 2's paged kernels take no other


class VarlenBackend:
    """FlashAttention through `torch.nn.attention.varlen.varlen_attn`: fp16 and bf16, large pages, no extras."""

    name = "varlen"

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """Why this call cannot run here, or None."""
        reasons = {
            f"it takes fp16 and bf16, not {query.dtype}": query.dtype not in (torch.float16, torch.bfloat16),
            f"a page must have a multiple of {_PAGE_MULTIPLE} slots, not {view.page_size}": view.page_size
            % _PAGE_MULTIPLE,
            "it has one table a layer, not one a head": view.block_table.shape[0] > 1,
            "it has no softcap": options.softcap is not None,
            "it has no sinks": options.sinks is not None,
            "windows and chunks as ranges of live tokens are not its windows": view.kv_start is not None,
            "keys and values must be equally wide": view.keys.shape[-1] != view.values.shape[-1],
            "heads are wider than 256": query.shape[-1] > 256,
            "it computes no gradients over pages": torch.is_grad_enabled() and query.requires_grad,
        }
        return varlen_reason(query.device) or next((reason for reason, holds in reasons.items() if holds), None)

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend packed queries to pages; see `Backend.attend`."""
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query.contiguous(),
            view.keys.transpose(1, 2),  # [num_pages, page_size, heads, width]: strides are looked at, nothing is copied
            view.values.transpose(1, 2),
            view.query_start,
            None,
            view.max_query_len,
            view.max_live_len,
            scale=options.scale,
            window_size=(-1, 0) if options.causal else (-1, -1),
            enable_gqa=query.shape[1] != view.num_kv_heads,
            seqused_k=view.live_lens[0],
            block_table=view.block_table[0],
        )
        assert isinstance(out, Tensor)
        return out
