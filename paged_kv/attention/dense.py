"""The oracle: attention over pages in float64 and plain loops, one row and one KV head at a time.

Owns: the definition of a right answer, for tests of every backend.
Does not know: speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.store import LayerView


def attend_exactly(query: Tensor, view: LayerView, options: AttentionOptions) -> Tensor:
    """Attention in float64, `[tokens, q_heads, value_width]`."""
    lanes, rows, _ = view.block_table.shape
    heads_per_lane, page_size = view.keys.shape[1], view.keys.shape[2]
    group = query.shape[1] // (lanes * heads_per_lane)
    out = torch.zeros(*query.shape[:2], view.values.shape[-1], dtype=torch.float64)
    for row in range(rows):
        first, past = int(view.query_start[row]), int(view.query_start[row + 1])
        for lane in range(lanes):
            live = int(view.live_lens[lane, row])
            index = torch.arange(live)
            page = view.block_table[lane, row].long()[index // page_size]
            for place in range(heads_per_lane):
                head = lane * heads_per_lane + place
                key = view.keys[page, place, index % page_size].double()
                value = view.values[page, place, index % page_size].double()
                mine = slice(head * group, (head + 1) * group)
                logits = torch.einsum("tgd,nd->tgn", query[first:past, mine].double(), key) * options.scale
                if options.softcap is not None:
                    logits = options.softcap * torch.tanh(logits / options.softcap)
                token = torch.arange(past - first)[:, None]
                seen = index <= live - (past - first) + token if options.causal else index < live + 0 * token
                if view.kv_start is not None:
                    seen = seen & (index >= view.kv_start[lane, first:past, None])
                logits = logits.masked_fill(~seen[:, None], float("-inf"))
                if options.sinks is not None:
                    sinks = options.sinks[mine].double().expand(past - first, group)
                    logits = torch.cat([logits, sinks[..., None]], dim=-1)
                weights = logits.softmax(-1)[..., :live].nan_to_num(0.0)  # NaN: sees nothing
                out[first:past, mine] = torch.einsum("tgn,nd->tgd", weights, value)
    return out
