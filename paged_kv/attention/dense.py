"""The oracle: attention over pages in float64 and plain loops, one query and one head at a time.

Owns: the definition of a right answer, for tests of every backend.
Does not know: speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.store import LayerView


def attend_exactly(query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
    """Attend packed queries `[tokens, q_heads, key_width]` in float64; returns `[tokens, q_heads, value_width]`."""
    q_heads = query.shape[1]
    lanes, rows = view.live_lens.shape
    heads_per_lane = view.keys.shape[1]
    out = torch.zeros(query.shape[0], q_heads, view.values.shape[3], dtype=torch.float64)
    for row in range(rows):
        first, last = int(view.query_start[row]), int(view.query_start[row + 1])
        for head in range(q_heads):
            kv_head = head // (q_heads // (lanes * heads_per_lane))
            lane, within = divmod(kv_head, heads_per_lane)
            live = int(view.live_lens[lane, row])
            slots = torch.arange(live)
            pages = view.block_table[lane, row][slots // view.page_size].long()
            keys = view.keys[pages, within, slots % view.page_size].double()
            values = view.values[pages, within, slots % view.page_size].double()
            for token in range(first, last):
                start = 0 if view.kv_start is None else int(view.kv_start[lane, token])
                end = live - (last - token) + 1 if options.causal else live
                out[token, head] = _one_query(
                    query[token, head].double(), keys[start:end], values[start:end], options, head
                )
    return out


def _one_query(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, head: int) -> Tensor:
    """One head of one query over the keys it sees: `[value_width]`, zeros if it sees none."""
    if keys.shape[0] == 0:
        return values.new_zeros(values.shape[1])
    logits = keys @ query * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.sinks is not None:
        weights = torch.cat([logits, options.sinks[head : head + 1].double()]).softmax(0)[:-1]
    else:
        weights = logits.softmax(0)
    return weights @ values
