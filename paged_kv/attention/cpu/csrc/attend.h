// Attention of packed queries over paged keys and values: the work list and what one unit of work does.
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
//
// A unit is (row, KV head, tile of queries, part of the live tokens). Parts depend only on the row itself, never on the
// batch or the number of threads, so a row's result does not change with its company. Several parts of one tile leave
// partial sums (maximum, denominator, weighted values); whoever finishes last adds them up in order of the parts.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "blocks.h"

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
constexpr int64_t kTileRows = 96;        // query rows that share one packed chunk
constexpr int64_t kChunk = 128;          // live tokens scored at a time by a tile
constexpr int64_t kFewPart = 256;        // shortest part of a row that is split for few query rows
constexpr int64_t kTilePart = 1024;      // and for a tile
constexpr int64_t kMaxParts = 16;

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

// ---- what a query may see ------------------------------------------------------------------------------------------

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

// ---- scratch -------------------------------------------------------------------------------------------------------

// One growing buffer a thread, 64-byte aligned, carved anew by each unit.
class Scratch {
 public:
  void reset(int64_t floats) {
    if (floats > size_) {
      storage_.reset(new float[floats + 16]);
      size_ = floats;
    }
    uintptr_t at = reinterpret_cast<uintptr_t>(storage_.get());
    next_ = storage_.get() + ((64 - at % 64) % 64) / 4;
  }
  float* take(int64_t floats) {
    float* out = next_;
    next_ += round_up(floats, 16);
    return out;
  }

 private:
  std::unique_ptr<float[]> storage_;
  int64_t size_ = 0;
  float* next_ = nullptr;
};

// ---- softmax over one chunk ----------------------------------------------------------------------------------------

struct RowState {
  float maximum, denominator;
};

// Turns scores[0, n) into exp(logit - running maximum); returns the factor that older sums must be multiplied by.
inline float softmax_chunk(float* scores, int64_t n, float scale, float softcap, RowState* state) {
  const int64_t whole = n / VL * VL;
  if (softcap > 0) {
    const float inner = scale / softcap;
    for (int64_t i = 0; i < n; i += VL) {
      Vec s = softcap * vtanh((i < whole ? load(scores + i) : load_some(scores + i, n - i)) * inner);
      if (i < whole) {
        store(scores + i, s);
      } else {
        for (int64_t j = i; j < n; j++) scores[j] = s[j - i];
      }
    }
  } else if (scale < 0) {
    for (int64_t i = 0; i < n; i++) scores[i] *= scale;
  }
  const float factor = softcap > 0 || scale < 0 ? 1.0f : scale;
  Vec best = splat(kNegInf);
  for (int64_t i = 0; i < whole; i += VL) best = vmax(load(scores + i), best);
  float top = horizontal_max(best);
  for (int64_t i = whole; i < n; i++) top = scores[i] > top ? scores[i] : top;
  const float maximum = std::max(state->maximum, top * factor);
  Vec total{};
  for (int64_t i = 0; i < whole; i += VL) {
    Vec e = vexp(load(scores + i) * factor - maximum);
    store(scores + i, e);
    total += e;
  }
  float sum = horizontal_sum(total);
  if (whole < n) {
    Vec e = vexp(load_some(scores + whole, n - whole) * factor - maximum);
    for (int64_t j = whole; j < n; j++) {
      scores[j] = e[j - whole];
      sum += scores[j];
    }
  }
  const float old = state->maximum == kNegInf ? 0.0f : exp1(state->maximum - maximum);
  state->denominator = state->denominator * old + sum;
  state->maximum = maximum;
  return old;
}

inline void scale_row(float* row, int64_t n, float factor) {
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < n; i += VL) store(row + i, load(row + i) * factor);
}

// ---- one unit ------------------------------------------------------------------------------------------------------

template <typename T>
struct UnitWorker {
  const Problem& p;
  const Unit& u;
  Visible see;
  const int32_t* table;
  const int64_t place, query_rows, acc_stride;
  float* acc;       // [query_rows, acc_stride]
  RowState* state;  // [query_rows]

  UnitWorker(const Problem& problem, const Unit& unit)
      : p(problem),
        u(unit),
        see(problem, unit.row, unit.kv_head),
        table(problem.block_table + (see.lane * problem.rows + unit.row) * problem.max_pages),
        place(unit.kv_head % problem.heads_per_lane),
        query_rows(unit.num_queries * problem.group),
        acc_stride(value_stride(problem)) {}

  const T* page(const void* store, int64_t width, int64_t index) const {
    return static_cast<const T*>(store) + (table[index] * p.heads_per_lane + place) * p.page_size * width;
  }
  const T* keys(int64_t index) const { return page(p.keys, p.key_width, index); }
  const T* values(int64_t index) const { return page(p.values, p.value_width, index); }
  int64_t query_of(int64_t r) const { return u.first_query + r / p.group; }

  // q[r, :] in fp32, rows padded with zeros to q_stride.
  void load_queries(float* q, int64_t q_stride) const {
    for (int64_t r = 0; r < query_rows; r++) {
      const T* src = static_cast<const T*>(p.query) + (see.first_token + query_of(r)) * p.query_token_stride +
                     (u.kv_head * p.group + r % p.group) * p.query_head_stride;
      for (int64_t d = 0; d < p.key_width; d++) q[r * q_stride + d] = static_cast<float>(src[d]);
      for (int64_t d = p.key_width; d < q_stride; d++) q[r * q_stride + d] = 0;
    }
  }

  void start(Scratch* scratch) {
    acc = scratch->take(query_rows * acc_stride);
    state = reinterpret_cast<RowState*>(scratch->take(query_rows * 2));
    std::fill(acc, acc + query_rows * acc_stride, 0.0f);
    for (int64_t r = 0; r < query_rows; r++) state[r] = {kNegInf, 0.0f};
  }

  // Calls fn(page index, first slot, slots, offset within [begin, end)) for each page of a range of live tokens.
  template <typename F>
  void each_page(int64_t begin, int64_t end, F&& fn) const {
    for (int64_t i = begin; i < end;) {
      const int64_t slot = i % p.page_size, n = std::min(p.page_size - slot, end - i);
      fn(i / p.page_size, slot, n, i - begin);
      i += n;
    }
  }

  void few(Scratch* scratch) {
    const int64_t q_stride = round_up(p.key_width, VL), chunk = kFewPart;
    scratch->reset(query_rows * (acc_stride + 2 + q_stride + chunk) + 128);
    start(scratch);
    float* q = scratch->take(query_rows * q_stride);
    float* scores = scratch->take(query_rows * chunk);
    load_queries(q, q_stride);
    for (int64_t c = u.begin; c < u.end; c += chunk) {
      const int64_t end = std::min<int64_t>(u.end, c + chunk), last = (u.end - 1) / p.page_size;
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t n, int64_t at) {
        const T* next = index < last ? keys(index + 1) + slot * p.key_width : nullptr;
        score_few(q, q_stride, query_rows, keys(index) + slot * p.key_width, p.key_width, n, scores + at, chunk, next);
      });
      prefetch_bytes(values(c / p.page_size), std::min<int64_t>(4096, p.page_size * p.value_width * sizeof(T)));
      for (int64_t r = 0; r < query_rows; r++) softmax_row(scores + r * chunk, r, c, end);
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t n, int64_t at) {
        const T* next = index < last ? values(index + 1) + slot * p.value_width : nullptr;
        weigh_few(scores + at, chunk, query_rows, values(index) + slot * p.value_width, p.value_width, n, acc,
                  acc_stride, next);
      });
    }
  }

  // Softmax of the visible part of one row of a chunk [begin, end); weights outside it become zero.
  void softmax_row(float* row, int64_t r, int64_t begin, int64_t end) {
    const int64_t query = query_of(r);
    const int64_t lo = std::min(std::max(see.begin(query), begin), end), hi = std::max(std::min(see.end(query), end), lo);
    if (lo < hi) {
      scale_row(acc + r * acc_stride, acc_stride, softmax_chunk(row + (lo - begin), hi - lo, p.scale, p.softcap, state + r));
    }
    std::fill(row, row + (lo - begin), 0.0f);
    std::fill(row + (hi - begin), row + (end - begin), 0.0f);
  }

  void tile(Scratch* scratch) {
    const int64_t value_panels = acc_stride / NR;
    scratch->reset(query_rows * (acc_stride + 2 + p.key_width + kChunk) + kChunk * (p.key_width + acc_stride) + 128);
    start(scratch);
    float* q = scratch->take(query_rows * p.key_width);
    float* scores = scratch->take(query_rows * kChunk);
    float* key_panels = scratch->take(kChunk * p.key_width);
    float* value_panels_at = scratch->take(kChunk * acc_stride);
    load_queries(q, p.key_width);
    if (acc_stride != p.value_width) std::fill(value_panels_at, value_panels_at + kChunk * acc_stride, 0.0f);
    for (int64_t c = u.begin; c < u.end; c += kChunk) {
      const int64_t end = std::min<int64_t>(u.end, c + kChunk), n = end - c;
      if (n % NR) std::fill(key_panels + n / NR * NR * p.key_width, key_panels + round_up(n, NR) * p.key_width, 0.0f);
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t m, int64_t at) {
        pack_keys(keys(index) + slot * p.key_width, p.key_width, m, at, key_panels);
        pack_values(values(index) + slot * p.value_width, p.value_width, m, at, kChunk, value_panels_at);
      });
      for (int64_t i = 0; i < n; i += NR) {
        each_block(c, end, [&](int64_t r, int64_t rows, int64_t lo, int64_t hi) {
          if (i >= hi || i + NR <= lo) return;
          multiply<false>(rows, q + r * p.key_width, p.key_width, key_panels + i * p.key_width, p.key_width,
                          scores + r * kChunk + i, kChunk);
        });
      }
      for (int64_t r = 0; r < query_rows; r++) softmax_row(scores + r * kChunk, r, c, end);
      for (int64_t d = 0; d < value_panels; d++) {
        each_block(c, end, [&](int64_t r, int64_t rows, int64_t lo, int64_t hi) {
          if (lo >= hi) return;
          multiply<true>(rows, scores + r * kChunk + lo, kChunk, value_panels_at + (d * kChunk + lo) * NR, hi - lo,
                         acc + r * acc_stride + d * NR, acc_stride);
        });
      }
    }
  }

  // Calls fn(first query row, rows, lo, hi) for each register block, [lo, hi) the part of the chunk any of them sees.
  template <typename F>
  void each_block(int64_t begin, int64_t end, F&& fn) const {
    for (int64_t r = 0; r < query_rows; r += MR) {
      const int64_t rows = std::min<int64_t>(MR, query_rows - r);
      int64_t lo = end, hi = begin;
      for (int64_t j = query_of(r); j <= query_of(r + rows - 1); j++) {
        lo = std::min(lo, see.begin(j));
        hi = std::max(hi, see.end(j));
      }
      lo = std::max(lo, begin), hi = std::min(hi, end);
      fn(r, rows, lo - begin, std::max(lo, hi) - begin);
    }
  }

  // ---- results ----

  void write(int64_t r, const float* sums, RowState s) const {
    const int64_t head = u.kv_head * p.group + r % p.group;
    T* dst = static_cast<T*>(p.out) + ((see.first_token + query_of(r)) * p.q_heads() + head) * p.value_width;
    float inverse = 0;
    if (s.denominator > 0 || std::isnan(s.denominator)) {
      float share = 1;  // exp(maximum - maximum with the sink)
      if (p.sinks) {
        const float top = std::max(s.maximum, p.sinks[head]);
        share = exp1(s.maximum - top);
        s.denominator = s.denominator * share + exp1(p.sinks[head] - top);
      }
      inverse = share / s.denominator;
    }
    for (int64_t d = 0; d < p.value_width; d++) dst[d] = static_cast<T>(inverse == 0 ? 0.0f : sums[d] * inverse);
  }

  void finish(Join* join) const {
    if (!join) {
      for (int64_t r = 0; r < query_rows; r++) write(r, acc + r * acc_stride, state[r]);
      return;
    }
    const int64_t record = acc_stride + 2, part = query_rows * record;
    float* mine = join->partial.get() + u.part * part;
    for (int64_t r = 0; r < query_rows; r++) {
      std::copy(acc + r * acc_stride, acc + (r + 1) * acc_stride, mine + r * record);
      mine[r * record + acc_stride] = state[r].maximum;
      mine[r * record + acc_stride + 1] = state[r].denominator;
    }
    if (join->missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int64_t r = 0; r < query_rows; r++) add_up(r, join->partial.get() + r * record, part);
  }

  void add_up(int64_t r, float* first, int64_t part) const {
    RowState s{kNegInf, 0.0f};
    for (int64_t i = 0; i < u.num_parts; i++) s.maximum = std::max(s.maximum, first[i * part + acc_stride]);
    float* sums = acc + r * acc_stride;
    std::fill(sums, sums + acc_stride, 0.0f);
    for (int64_t i = 0; i < u.num_parts; i++) {
      const float* one = first + i * part;
      if (one[acc_stride] == kNegInf) continue;  // this part saw nothing
      const float weight = exp1(one[acc_stride] - s.maximum);
      for (int64_t d = 0; d < acc_stride; d += VL) store(sums + d, load(sums + d) + load(one + d) * weight);
      s.denominator += one[acc_stride + 1] * weight;
    }
    write(r, sums, s);
  }
};

template <typename T>
void run_unit(const Problem& p, Work& work, int64_t index) {
  thread_local Scratch scratch;
  const Unit& unit = work.units[index];
  UnitWorker<T> worker(p, unit);
  if (worker.query_rows <= kFewRows) {
    worker.few(&scratch);
  } else {
    worker.tile(&scratch);
  }
  worker.finish(unit.join < 0 ? nullptr : work.joins[unit.join].get());
}

}  // namespace paged_kv
