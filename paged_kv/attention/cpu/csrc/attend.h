// What one unit of work does: scores, softmax, weighted sum, and the joining of parts. Shapes: problem.h.
#pragma once

#include "plan.h"
#include "softmax.h"

namespace paged_kv {

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

  const T* query_row(int64_t r) const {
    return static_cast<const T*>(p.query) + (see.first_token + query_of(r)) * p.query_token_stride +
           (u.kv_head * p.group + r % p.group) * p.query_head_stride;
  }

  // q[r, :] in fp32 and pair order, rows padded with zeros to q_stride; where pairs are multiplied, also as it is.
  void load_queries(float* q, int64_t q_stride) const {
    for (int64_t r = 0; r < query_rows; r++) {
      const T* src = query_row(r);
      for (int64_t d = 0; d < p.key_width; d++) {
        q[r * q_stride + pair_place<T>(d, p.key_width)] = static_cast<float>(src[d]);
      }
      for (int64_t d = p.key_width; d < q_stride; d++) q[r * q_stride + d] = 0;
      if constexpr (kPairDots<T>) {
        std::copy(src, src + p.key_width, reinterpret_cast<T*>(q + r * q_stride + pairs_at(p.key_width)));
      }
    }
  }

  // q[r, :] as it is multiplied by a tile.
  template <typename E>
  void load_operands(E* q) const {
    for (int64_t r = 0; r < query_rows; r++) {
      const T* src = query_row(r);
      for (int64_t d = 0; d < p.key_width; d++) q[r * p.key_width + d] = static_cast<E>(src[d]);
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
    const int64_t q_stride = query_stride<T>(p.key_width), chunk = kFewPart, stride = chunk + kRowPad;
    scratch->reset(query_rows * (acc_stride + 2 + q_stride + stride) + 128);
    start(scratch);
    float* q = scratch->take(query_rows * q_stride);
    float* scores = scratch->take(query_rows * stride);
    load_queries(q, q_stride);
    for (int64_t c = u.begin; c < u.end; c += chunk) {
      const int64_t end = std::min<int64_t>(u.end, c + chunk);
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t n, int64_t at) {
        const T* next = ahead(p.keys, p.key_width, p.values, p.value_width, index, c, end);
        score_few(q, q_stride, query_rows, keys(index) + slot * p.key_width, p.key_width, n, scores + at, stride, next);
      });
      for (int64_t r = 0; r < query_rows; r++) softmax_row(scores + r * stride, r, c, end);
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t n, int64_t at) {
        const T* next = ahead(p.values, p.value_width, p.keys, p.key_width, index, c, end);
        weigh_few(scores + at, stride, query_rows, values(index) + slot * p.value_width, p.value_width, n, acc,
                  acc_stride, next);
      });
    }
  }

  // The page to prefetch while page `index` of [begin, end) is worked on: one of the same kind, at the end of values the
  // first keys of the next chunk, at the end of keys the first values of this one.
  const T* ahead(const void* store, int64_t width, const void* other, int64_t other_width, int64_t index, int64_t begin,
                 int64_t end) const {
    const int64_t first = begin / p.page_size, last = (end - 1) / p.page_size;
    const int64_t bytes = p.page_size * width * sizeof(T), distance = bytes < 4096 ? 2 : 1;
    if (index + distance <= last) return page(store, width, index + distance);
    const int64_t over = index + distance - last - 1;
    if (store == p.keys) return page(other, other_width, std::min(first + over, last));
    const int64_t next = last + 1 + over;
    return next * p.page_size < u.end ? page(other, other_width, next) : page(store, width, index);
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
    if constexpr (kPairDots<T>) {
      if (p.key_width % 2 == 0) return tile_of<T>(scratch);
    }
    tile_of<float>(scratch);
  }

  // E: what queries and keys are multiplied as, fp32 or pairs of bf16. Weights stay in fp32: rounded to bf16 they would
  // add as much error as rounding the output does.
  template <typename E>
  void tile_of(Scratch* scratch) {
    const int64_t value_panels = acc_stride / NR, stride = kChunk + kRowPad;
    scratch->reset(query_rows * (acc_stride + 2 + p.key_width + stride) + kChunk * (p.key_width + acc_stride) + 128);
    start(scratch);
    E* q = reinterpret_cast<E*>(scratch->take(query_rows * p.key_width));
    float* scores = scratch->take(query_rows * stride);
    E* key_panels = reinterpret_cast<E*>(scratch->take(kChunk * p.key_width));
    float* value_panels_at = scratch->take(kChunk * acc_stride);
    load_operands(q);
    if (acc_stride != p.value_width) std::fill(value_panels_at, value_panels_at + kChunk * acc_stride, 0.0f);
    for (int64_t c = u.begin; c < u.end; c += kChunk) {
      const int64_t end = std::min<int64_t>(u.end, c + kChunk), n = end - c;
      if (n % NR) std::fill(key_panels + n / NR * NR * p.key_width, key_panels + round_up(n, NR) * p.key_width, E(0.0f));
      each_page(c, end, [&](int64_t index, int64_t slot, int64_t m, int64_t at) {
        pack_keys(keys(index) + slot * p.key_width, p.key_width, m, at, key_panels);
        pack_values(values(index) + slot * p.value_width, p.value_width, m, at, kChunk, value_panels_at);
      });
      for (int64_t i = 0; i < n; i += NR) {
        each_block(c, end, [&](int64_t r, int64_t rows, int64_t lo, int64_t hi) {
          if (i >= hi || i + NR <= lo) return;
          const E* a = q + r * p.key_width;
          const E* b = key_panels + i * p.key_width;
          float* to = scores + r * stride + i;
          multiply<false>(rows, a, p.key_width, b, std::min(kStep, p.key_width), to, stride, false);
          for (int64_t k = kStep; k < p.key_width; k += kStep) {
            multiply<true>(rows, a + k, p.key_width, b + k * NR, std::min(kStep, p.key_width - k), to, stride, false);
          }
        });
      }
      for (int64_t r = 0; r < query_rows; r++) softmax_row(scores + r * stride, r, c, end);
      for (int64_t d = 0; d < value_panels; d++) {
        each_block(c, end, [&](int64_t r, int64_t rows, int64_t lo, int64_t hi) {
          if (lo >= hi) return;
          multiply<true>(rows, scores + r * stride + lo, stride, value_panels_at + (d * kChunk + lo) * NR, hi - lo,
                         acc + r * acc_stride + d * NR, acc_stride, false);
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
    for (int64_t d = 0; d < p.value_width; d++) {
      dst[d] = static_cast<T>(inverse == 0 ? 0.0f : sums[pair_place<T>(d, p.value_width)] * inverse);
    }
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
