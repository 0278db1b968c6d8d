// Attention of packed queries over paged keys and values: what is given, and what a query may see.
//
// Layout page (shapes, strides in elements, units):
//   query       T [tokens, q_heads, key_width]      any strides for tokens and heads; the width is contiguous
//   keys        T [num_pages, heads_per_lane, page_size, key_width]      contiguous
//   values      T [num_pages, heads_per_lane, page_size, value_width]    contiguous
//   block_table int32 [lanes, rows, max_pages]      page ids; only the first ceil(live / page_size) of a row are read
//   live_lens   int32 [lanes, rows]                 tokens in the pages, this step's new ones included
//   query_start int32 [rows + 1]                    row b's queries are tokens [query_start[b], query_start[b + 1])
//   kv_start    int32 [lanes, tokens] or absent     first visible live index of a query
//   sinks       float [q_heads] or absent           one more logit in each softmax denominator
//   out         T [tokens, q_heads, value_width]    contiguous
// KV head k lives in lane k / heads_per_lane, at place k % heads_per_lane of its pages; its `group` = q_heads / kv_heads
// query heads are k * group ... A *query row* is one (query, head of the group): all query rows of a unit read the same
// pages, each page once. The token at live index i of a row lies in page block_table[lane, b, i / page_size] at slot
// i % page_size.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paged_kv {

struct Problem {
  const void *query, *keys, *values;
  void* out;
  const int32_t *block_table, *live_lens, *query_start, *kv_start;
  const float* sinks;
  int64_t query_token_stride, query_head_stride;
  int64_t lanes, rows, max_pages, tokens;
  int64_t heads_per_lane, group, page_size, key_width, value_width;
  float scale, softcap;  // softcap 0: none
  bool causal;

  int64_t kv_heads() const { return lanes * heads_per_lane; }
  int64_t q_heads() const { return kv_heads() * group; }
};

constexpr int64_t kFewRows = 8;          // up to here dot products straight from the page beat packing it
constexpr int64_t kTileRows = 192;       // query rows that share one packed chunk
constexpr int64_t kChunk = 256;          // live tokens scored at a time by a tile
constexpr int64_t kStep = 32;            // products of a score summed up in a row, before they join the others
constexpr int64_t kFewPart = 256;        // shortest part of a row that is split for few query rows
constexpr int64_t kTilePart = 1024;      // and for a tile
constexpr int64_t kMaxParts = 16;
constexpr int64_t kRowPad = 16;          // floats past a row of scores that softmax_chunk may overwrite, at least VL

struct Visible {
  const Problem& p;
  int64_t lane, first_token, live, num_queries;

  Visible(const Problem& problem, int64_t row, int64_t kv_head)
      : p(problem),
        lane(kv_head / problem.heads_per_lane),
        first_token(problem.query_start[row]),
        live(problem.live_lens[lane * problem.rows + row]),
        num_queries(problem.query_start[row + 1] - problem.query_start[row]) {}

  int64_t begin(int64_t query) const {
    return p.kv_start ? std::max<int64_t>(0, p.kv_start[lane * p.tokens + first_token + query]) : 0;
  }
  int64_t end(int64_t query) const {
    return p.causal ? std::min(live, std::max<int64_t>(0, live - num_queries + query + 1)) : live;
  }
};

}  // namespace paged_kv
