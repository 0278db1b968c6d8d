# mypy: ignore-errors
# ruff: noqa: PLR0913, PLR0915
# (Triton's language is not Python: its functions take tensors as pointers and sizes, and cannot be split up freely.)
"""Triton kernels of attention over pages: one for any mix of decode and prefill, one to join the parts of long rows.

Imported only by the Triton backend. Under `TRITON_INTERPRET=1` the kernels run in Python on the CPU.

A program works on one tile of query rows (queries x heads of a group), one KV head and one part of the live tokens; it
looks up the page of each key, so any page size works. Offsets into the pages are int64: pages x stride passes 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    query,  # T [tokens, q_heads, key_width], contiguous
    keys,  # T [num_pages, heads_per_lane, page_size, key_width]
    values,  # T [num_pages, heads_per_lane, page_size, value_width]
    block_table,  # int32 [lanes, rows, max_pages]
    live_lens,  # int32 [lanes, rows]
    query_start,  # int32 [rows + 1]
    kv_start,  # int32 [lanes, tokens], or anything if not has_start
    sinks,  # float [q_heads], or anything if not has_sinks
    out,  # T [tokens, q_heads, value_width] if parts is 1
    partial,  # float [parts, tokens, q_heads, value_width + 2]: sums, maximum, denominator; used if parts > 1
    scale,
    softcap,
    rows,
    tokens,
    max_pages,
    q_heads,
    parts,
    heads_per_lane: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    causal: tl.constexpr,
    has_start: tl.constexpr,
    has_sinks: tl.constexpr,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,  # multiply in fp32: the interpreter multiplies bf16 as if it were integers
    QUERIES: tl.constexpr,  # queries of a tile
    M: tl.constexpr,  # query rows of a tile: at least QUERIES * group, a power of two
    N: tl.constexpr,  # keys at a time
    K: tl.constexpr,  # key_width rounded up to a power of two
    V: tl.constexpr,  # value_width likewise
):
    """One tile of query rows against one part of a row's live tokens."""
    tile = tl.program_id(0)
    head = tl.program_id(1) % (q_heads // group)
    part = tl.program_id(1) // (q_heads // group)
    row = tl.program_id(2)
    lane = head // heads_per_lane
    place = head % heads_per_lane
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    if tile * QUERIES >= count:
        return
    live = tl.load(live_lens + lane * rows + row)

    m = tl.arange(0, M)
    number = tile * QUERIES + m // group  # of the query within its row
    alive = (m < QUERIES * group) & (number < count)
    token = (first + number).to(tl.int64)
    q_head = head * group + m % group
    k = tl.arange(0, K)
    v = tl.arange(0, V)
    q = tl.load(
        query + (token[:, None] * q_heads + q_head[:, None]) * key_width + k[None, :],
        mask=alive[:, None] & (k[None, :] < key_width),
        other=0.0,
    )
    if widen:
        q = q.to(tl.float32)
    if causal:
        end = tl.minimum(live, tl.maximum(0, live - count + number + 1))
    else:
        end = tl.zeros([M], tl.int32) + live
    begin = tl.zeros([M], tl.int32)
    if has_start:
        begin = tl.load(kv_start + lane.to(tl.int64) * tokens + token, mask=alive, other=0)
    end = tl.where(alive, end, 0)
    lowest = tl.min(tl.where(alive, begin, live), 0)
    highest = tl.max(end, 0)
    length = (tl.cdiv(tl.cdiv(tl.maximum(highest - lowest, 0), parts), N)) * N
    lowest = lowest + part * length
    highest = tl.minimum(highest, lowest + length)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, V], tl.float32)
    table = block_table + (lane.to(tl.int64) * rows + row) * max_pages
    for at in range(lowest, highest, N):
        index = at + tl.arange(0, N)
        inside = index < highest
        page = tl.load(table + index // page_size, mask=inside, other=0).to(tl.int64)
        slot = (page * heads_per_lane + place) * page_size + index % page_size
        key = tl.load(
            keys + slot[None, :] * key_width + k[:, None], mask=inside[None, :] & (k[:, None] < key_width), other=0.0
        )
        if widen:
            key = key.to(tl.float32)
        logits = tl.dot(q, key, input_precision="ieee") * scale
        if has_softcap:
            e = tl.exp(2.0 * tl.minimum(tl.maximum(logits / softcap, -20.0), 20.0))
            logits = softcap * ((e - 1.0) / (e + 1.0))
        seen = inside[None, :] & (index[None, :] >= begin[:, None]) & (index[None, :] < end[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: avoid inf - inf
        weights = tl.where(seen, tl.exp(logits - base[:, None]), 0.0)
        old = tl.exp(top - base)
        total = total * old + tl.sum(weights, 1)
        value = tl.load(
            values + slot[:, None] * value_width + v[None, :],
            mask=inside[:, None] & (v[None, :] < value_width),
            other=0.0,
        )
        if widen:
            value = value.to(tl.float32)
        acc = acc * old[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top

    place_out = token * q_heads + q_head
    if parts == 1:
        if has_sinks:
            sink = tl.load(sinks + q_head, mask=alive, other=0.0).to(tl.float32)
            with_sink = tl.maximum(top, sink)
            share = tl.exp(top - with_sink)
            total = total * share + tl.exp(sink - with_sink)
            acc = acc * share[:, None]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # nothing seen: 0 / 1
        tl.store(
            out + place_out[:, None] * value_width + v[None, :],
            result.to(out.dtype.element_ty),
            mask=alive[:, None] & (v[None, :] < value_width),
        )
    else:
        record = partial + (part.to(tl.int64) * tokens * q_heads + place_out) * (value_width + 2)
        tl.store(record[:, None] + v[None, :], acc, mask=alive[:, None] & (v[None, :] < value_width))
        tl.store(record + value_width, top, mask=alive)
        tl.store(record + value_width + 1, total, mask=alive)


@triton.jit
def join_parts(
    partial,  # float [parts, tokens, q_heads, value_width + 2]
    sinks,  # float [q_heads], or anything if not has_sinks
    out,  # T [tokens, q_heads, value_width]
    tokens,
    q_heads,
    parts,
    value_width: tl.constexpr,
    has_sinks: tl.constexpr,
    V: tl.constexpr,
):
    """Add up the parts of one query and head, in order."""
    place = tl.program_id(0).to(tl.int64)  # token * q_heads + head
    v = tl.arange(0, V)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([V], tl.float32)
    for part in range(parts):
        record = partial + (part * tokens.to(tl.int64) * q_heads + place) * (value_width + 2)
        part_top = tl.load(record + value_width)
        new_top = tl.maximum(top, part_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        old = tl.exp(top - base)
        weight = tl.exp(part_top - base)
        acc = acc * old + tl.load(record + v, mask=v < value_width, other=0.0) * weight
        total = total * old + tl.load(record + value_width + 1) * weight
        top = new_top
    if has_sinks:
        sink = tl.load(sinks + place % q_heads).to(tl.float32)
        with_sink = tl.maximum(top, sink)
        share = tl.exp(top - with_sink)
        total = total * share + tl.exp(sink - with_sink)
        acc = acc * share
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + place * value_width + v, result.to(out.dtype.element_ty), mask=v < value_width)
