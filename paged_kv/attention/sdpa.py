"""Attention over gathered pages by torch's SDPA: the reference on every device, and the fallback.

Owns: the dense computation with masks, softcap and sinks; turning packed rows into a padded rectangle and back.
Does not know: transformers, allocators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.attention.base import AttentionOptions
from paged_kv.store import LayerView, gather_pages


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attention over dense K and V, the query heads of a group folded into the query length.

    Folding (`[rows, kv_heads, group * queries, width]`) reads each key once for its whole group and stays on torch's
    fast CPU kernel, which `enable_gqa` leaves in bf16.

    Args:
        query: `[rows, q_heads, queries, key_width]`.
        key: `[rows, kv_heads, tokens, key_width]`.
        value: `[rows, kv_heads, tokens, value_width]`.
        mask: Broadcastable to `[rows, q_heads, queries, tokens]`: bool (True is seen) or an additive bias; None if all
            is seen.
        options: `causal` is not looked at: the mask says what is seen.

    Returns:
        `[rows, q_heads, queries, value_width]`; zeros for a query that sees nothing.
    """
    rows, q_heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    group = q_heads // kv_heads
    folded = query.reshape(rows, kv_heads, group * queries, -1)
    bias = None if mask is None else _fold_mask(mask, kv_heads, group, queries)
    if options.softcap is None and options.sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=options.scale)
    else:
        out = _attend_plainly(folded, key, value, bias, options)
    return out.reshape(rows, q_heads, queries, -1)


def _fold_mask(mask: Tensor, kv_heads: int, group: int, queries: int) -> Tensor:
    """A mask for `[rows, kv_heads, group * queries, tokens]` from one for `[rows, heads, queries, tokens]`."""
    rows, heads, _, tokens = mask.shape
    mask = mask.expand(rows, heads, queries, tokens)
    if heads == kv_heads * group and heads > 1:
        return mask.reshape(rows, kv_heads, group * queries, tokens)
    if group == 1 or queries == 1:
        return mask.expand(rows, heads, group * queries, tokens)
    return mask[:, :, None].expand(rows, heads, group, queries, tokens).reshape(rows, heads, -1, tokens)


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """The same in plain operations, fp32 softmax, for what SDPA lacks: softcap and sinks."""
    logits = (query.float() @ key.float().transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    top = logits.amax(dim=-1, keepdim=True)
    sinks = None
    if options.sinks is not None:
        group_queries = query.shape[2]
        per_query = options.sinks.float().view(1, query.shape[1], -1, 1)
        sinks = per_query.repeat_interleave(group_queries // per_query.shape[2], dim=2)
        top = torch.maximum(top, sinks)
    top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return (weights / total.clamp_min(torch.finfo(torch.float32).tiny) @ value.float()).to(query.dtype)


def visible(view: LayerView, num_queries: Tensor, causal: bool) -> Tensor:
    """Which live tokens the queries of each row see: bool `[rows, lanes, max_query_len, max_live_len]`.

    Args:
        view: The pages of the call.
        num_queries: int64 `[rows]`, queries of each row.
        causal: Whether query `j` of `n` sees only up to live index `live - n + j`.
    """
    device = view.live_lens.device
    live = view.live_lens.long().transpose(0, 1)[:, :, None, None]
    token = torch.arange(view.max_live_len, device=device)
    query = torch.arange(view.max_query_len, device=device)[:, None]
    counts = num_queries[:, None, None, None]
    last = live - counts + query if causal else live - 1
    seen = (token <= last) & (token < live) & (query < counts)
    if view.kv_start is not None:
        index = (view.query_start[:-1, None].long() + query.T).clamp_max(view.kv_start.shape[1] - 1)
        start = view.kv_start.long()[:, index].transpose(0, 1)
        seen = seen & (token >= start[..., None])
    return seen


class SdpaBackend:
    """Gather each row's pages, then SDPA over the padded rectangle. Runs anywhere, supports everything."""

    name = "sdpa"

    def unsupported(self, query: Tensor, view: LayerView, options: AttentionOptions) -> str | None:
        """Always None: the fallback runs every call."""
        return None

    def attend(self, query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
        """Attend packed queries to pages; see `Backend.attend`."""
        num_pages = -(-view.max_live_len // view.page_size)
        pages = view.block_table[:, :, :num_pages]
        key = gather_pages(view.keys, pages, view.max_live_len)
        value = gather_pages(view.values, pages, view.max_live_len)
        num_queries = (view.query_start[1:] - view.query_start[:-1]).long()
        rows, width = num_queries.shape[0], view.max_query_len
        padded, index = _to_rectangle(query, view, num_queries)
        mask: Tensor | None = visible(view, num_queries, options.causal)
        assert mask is not None
        if bool(mask.all()):
            mask = None
        elif mask.shape[1] > 1:
            mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)
        if mask is not None:
            # What lies behind a row's last token is another row's, or never written: not even zero times it may count.
            dead = torch.arange(view.max_live_len, device=key.device) >= view.live_lens.T[..., None]
            dead = dead.repeat_interleave(key.shape[1] // dead.shape[1], dim=1)[..., None]
            value = value.masked_fill(dead, 0)
            key = key.masked_fill(dead, 0)
        out = attend_dense(padded, key, value, mask, options).transpose(1, 2).reshape(rows * width, query.shape[1], -1)
        return out if index is None else out[index]


def _to_rectangle(query: Tensor, view: LayerView, num_queries: Tensor) -> tuple[Tensor, Tensor | None]:
    """Packed queries as `[rows, q_heads, max_query_len, width]`, and where each packed token went (None: in order)."""
    rows, width = num_queries.shape[0], view.max_query_len
    _, heads, head_width = query.shape
    if query.shape[0] == rows * width:
        return query.view(rows, width, heads, head_width).transpose(1, 2), None
    row = torch.repeat_interleave(torch.arange(rows, device=query.device), num_queries)
    index = row * width + torch.arange(query.shape[0], device=query.device) - view.query_start[:-1].long()[row]
    padded = query.new_zeros((rows * width, heads, head_width))
    padded[index] = query
    return padded.view(rows, width, heads, head_width).transpose(1, 2), index
