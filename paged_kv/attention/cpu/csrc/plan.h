// The work list of one call.
//
// A unit is (row, KV head, tile of queries, part of the live tokens). Parts depend only on the row itself, never on the
// batch or the number of threads, so a row's result does not change with its company. Several parts of one tile leave
// partial sums (maximum, denominator, weighted values); whoever finishes last adds them up in order of the parts.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "blocks.h"
#include "problem.h"

namespace paged_kv {

struct Unit {
  int32_t row, kv_head, first_query, num_queries;
  int32_t begin, end;            // live tokens to visit
  int32_t part, num_parts;
  int32_t join;                  // index of the join this part belongs to, -1 when it is alone
};

// Partial results of the parts of one tile, laid out [part, query row, value_stride + 2]: sums, maximum, denominator.
struct Join {
  std::unique_ptr<float[]> partial;
  std::atomic<int32_t> missing;
  Join(int64_t floats, int32_t parts) : partial(new float[floats]), missing(parts) {}
};

struct Work {
  std::vector<Unit> units;
  std::vector<std::unique_ptr<Join>> joins;
  int64_t cost = 0;  // query rows x live tokens x width, to decide whether threads pay
};

inline int64_t value_stride(const Problem& p) {
  return round_up(p.value_width, NR);
}

inline void plan_tile(const Problem& p, int64_t row, int64_t kv_head, int64_t first, int64_t count, int64_t num_tiles,
                      Work* work) {
  Visible see(p, row, kv_head);
  int64_t begin = see.live, end = 0;
  for (int64_t j = first; j < first + count; j++) {
    begin = std::min(begin, see.begin(j));
    end = std::max(end, see.end(j));
  }
  begin = std::min(begin, end) / p.page_size * p.page_size;
  const int64_t rows = count * p.group, span = end - begin;
  const bool few = rows <= kFewRows;
  const int64_t shortest = few ? kFewPart : kTilePart;
  const int64_t most = std::max<int64_t>(1, kMaxParts / num_tiles);
  int64_t parts = std::min(most, (span + shortest - 1) / shortest);
  const int64_t length = round_up((span + std::max<int64_t>(1, parts) - 1) / std::max<int64_t>(1, parts),
                                  std::max(p.page_size, few ? 1 : kChunk));
  parts = std::max<int64_t>(1, (span + length - 1) / std::max<int64_t>(1, length));
  int64_t join = -1;
  if (parts > 1) {
    join = work->joins.size();
    work->joins.push_back(std::make_unique<Join>(parts * rows * (value_stride(p) + 2), parts));
  }
  for (int64_t i = 0; i < parts; i++) {
    Unit u;
    u.row = row, u.kv_head = kv_head, u.first_query = first, u.num_queries = count;
    u.begin = begin + i * length, u.end = std::min(end, begin + (i + 1) * length);
    u.part = i, u.num_parts = parts, u.join = join;
    work->units.push_back(u);
  }
  work->cost += rows * span * (p.key_width + p.value_width);
}

// Tiles with many query rows first: they are the longest, and the short ones then fill the threads evenly.
inline Work plan_work(const Problem& p) {
  Work work;
  for (int heavy = 1; heavy >= 0; heavy--) {
    for (int64_t b = 0; b < p.rows; b++) {
      const int64_t n = p.query_start[b + 1] - p.query_start[b];
      if (n == 0 || (n * p.group > kFewRows) != heavy) continue;
      const int64_t tile = heavy ? std::max<int64_t>(1, kTileRows / p.group) : n;
      const int64_t num_tiles = (n + tile - 1) / tile;
      for (int64_t t = num_tiles - 1; t >= 0; t--) {
        for (int64_t h = 0; h < p.kv_heads(); h++) {
          plan_tile(p, b, h, t * tile, std::min(tile, n - t * tile), num_tiles, &work);
        }
      }
    }
  }
  return work;
}

}  // namespace paged_kv
