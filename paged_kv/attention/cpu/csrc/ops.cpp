// torch.ops.paged_kv: checks, dispatch, threads. The layout page of attention is problem.h, of linear layers linear.h, mlp.h
// and qkv.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attend.h"
#include "checks.h"
#include "mlp.h"
#include "norm.h"
#include "qkv.h"

namespace paged_kv {
namespace {

void require_pages(const Tensor& keys, const Tensor& values) {
  const auto dtype = keys.scalar_type();
  REQUIRE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
          "keys must be float32, bfloat16 or float16, but are ", dtype);
  require_tensor("keys", keys, 4, dtype);
  require_tensor("values", values, 4, dtype);
  require_contiguous("keys", keys);
  require_contiguous("values", values);
  REQUIRE(keys.sizes().slice(0, 3) == values.sizes().slice(0, 3),
          "keys and values must have the same pages, heads and page size, but have shapes ", keys.sizes(), " and ",
          values.sizes());
}

// Queries: offsets that start at 0, never fall and end at the number of tokens.
void require_query_start(const int32_t* start, int64_t rows, int64_t tokens) {
  REQUIRE(start[0] == 0, "query_start must begin with 0, but begins with ", start[0]);
  for (int64_t b = 0; b < rows; b++) {
    REQUIRE(start[b] <= start[b + 1], "query_start must not fall, but has ", start[b], " then ", start[b + 1], " at row ", b);
  }
  REQUIRE(start[rows] == tokens, "query_start ends with ", start[rows], ", but query has ", tokens, " tokens");
}

void require_tables(const Problem& p, int64_t num_pages) {
  for (int64_t lane = 0; lane < p.lanes; lane++) {
    for (int64_t b = 0; b < p.rows; b++) {
      const int64_t live = p.live_lens[lane * p.rows + b];
      REQUIRE(live >= 0 && live <= p.max_pages * p.page_size, "live_lens[", lane, ", ", b, "] is ", live,
              ", but its table has room for ", p.max_pages * p.page_size, " tokens");
      const int32_t* table = p.block_table + (lane * p.rows + b) * p.max_pages;
      for (int64_t i = 0; i * p.page_size < live; i++) {
        REQUIRE(table[i] >= 0 && table[i] < num_pages, "block_table[", lane, ", ", b, ", ", i, "] is ", table[i],
                ", but there are ", num_pages, " pages");
      }
    }
  }
}

// Threads take the next unit when they are free: balanced by live tokens whatever the rows look like.
void run_all(const Problem& p, Work& work, at::ScalarType dtype) {
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t count = work.units.size();
    const int64_t threads = work.cost < 32768 ? 1 : std::min<int64_t>(at::get_num_threads(), count);
    std::atomic<int64_t> next{0};
    auto body = [&](int64_t, int64_t) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run_unit<T>(p, work, i);
    };
    if (threads <= 1) {
      body(0, 1);
    } else {
      at::parallel_for(0, threads, 1, body);
    }
  });
}

Tensor attend(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& block_table,
              const Tensor& live_lens, const Tensor& query_start, const optional<Tensor>& kv_start,
              const optional<Tensor>& sinks, double scale, double softcap, bool causal) {
  require_pages(keys, values);
  require_tensor("query", query, 3, keys.scalar_type());
  require_tensor("block_table", block_table, 3, at::kInt);
  require_tensor("live_lens", live_lens, 2, at::kInt);
  require_tensor("query_start", query_start, 1, at::kInt);
  require_contiguous("block_table", block_table);
  require_contiguous("live_lens", live_lens);
  require_contiguous("query_start", query_start);
  Problem p{};
  p.lanes = block_table.size(0), p.rows = block_table.size(1), p.max_pages = block_table.size(2);
  p.tokens = query.size(0), p.heads_per_lane = keys.size(1), p.page_size = keys.size(2);
  p.key_width = keys.size(3), p.value_width = values.size(3);
  const int64_t kv_heads = p.kv_heads();
  REQUIRE(p.page_size > 0 && p.key_width > 0 && p.value_width > 0, "keys have an empty page: ", keys.sizes());
  REQUIRE(query.size(2) == p.key_width, "query heads are ", query.size(2), " wide, but keys are ", p.key_width);
  REQUIRE(query.stride(2) == 1, "the last dimension of query must be contiguous, but has stride ", query.stride(2));
  REQUIRE(kv_heads > 0 && query.size(1) > 0 && query.size(1) % kv_heads == 0, "query has ", query.size(1), " heads, which ",
          kv_heads, " KV heads (", p.lanes, " lanes of ", p.heads_per_lane, ") do not divide");
  REQUIRE(live_lens.size(0) == p.lanes && live_lens.size(1) == p.rows, "live_lens has shape ", live_lens.sizes(),
          ", but block_table has ", p.lanes, " lanes and ", p.rows, " rows");
  REQUIRE(query_start.size(0) == p.rows + 1, "query_start has ", query_start.size(0), " entries, but there are ", p.rows,
          " rows");
  p.group = query.size(1) / kv_heads;
  p.query_token_stride = query.stride(0), p.query_head_stride = query.stride(1);
  p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap), p.causal = causal;
  REQUIRE(scale > 0, "scale must be positive, but is ", scale);
  REQUIRE(softcap >= 0, "softcap must not be negative, but is ", softcap);
  if (kv_start) {
    require_tensor("kv_start", *kv_start, 2, at::kInt);
    require_contiguous("kv_start", *kv_start);
    REQUIRE(kv_start->size(0) == p.lanes && kv_start->size(1) == p.tokens, "kv_start has shape ", kv_start->sizes(),
            ", but there are ", p.lanes, " lanes and ", p.tokens, " tokens");
    p.kv_start = kv_start->const_data_ptr<int32_t>();
  }
  Tensor sinks_fp32;
  if (sinks) {
    REQUIRE(sinks->device().is_cpu() && sinks->dim() == 1 && sinks->size(0) == query.size(1), "sinks must be ",
            query.size(1), " numbers on the CPU, but have shape ", sinks->sizes(), " on ", sinks->device());
    sinks_fp32 = sinks->to(at::kFloat).contiguous();
    p.sinks = sinks_fp32.const_data_ptr<float>();
  }
  p.block_table = block_table.const_data_ptr<int32_t>();
  p.live_lens = live_lens.const_data_ptr<int32_t>();
  p.query_start = query_start.const_data_ptr<int32_t>();
  require_query_start(p.query_start, p.rows, p.tokens);
  require_tables(p, keys.size(0));
  Tensor out = at::empty({p.tokens, query.size(1), p.value_width}, query.options());
  p.query = query.const_data_ptr(), p.keys = keys.const_data_ptr(), p.values = values.const_data_ptr();
  p.out = out.mutable_data_ptr();
  Work work = plan_work(p);
  run_all(p, work, keys.scalar_type());
  return out;
}

// One token's heads of one tensor into its slots, one per lane.
template <typename T>
void write_token(const Tensor& from, Tensor& to, const int64_t* slots, int64_t tokens, int64_t t) {
  const int64_t heads = to.size(1), page_size = to.size(2), width = to.size(3), lanes = from.size(1) / heads;
  const T* src = static_cast<const T*>(from.const_data_ptr()) + t * from.stride(0);
  T* dst = static_cast<T*>(to.mutable_data_ptr());
  for (int64_t lane = 0; lane < lanes; lane++) {
    const int64_t slot = slots[lane * tokens + t], page = slot / page_size, offset = slot % page_size;
    for (int64_t h = 0; h < heads; h++) {
      std::memcpy(static_cast<void*>(dst + ((page * heads + h) * page_size + offset) * width),
                  src + (lane * heads + h) * from.stride(1), width * sizeof(T));
    }
  }
}

void require_new(const char* name, const Tensor& t, const Tensor& pages, int64_t lanes, int64_t tokens) {
  require_tensor(name, t, 3, pages.scalar_type());
  REQUIRE(t.size(0) == tokens && t.size(1) == lanes * pages.size(1) && t.size(2) == pages.size(3), name, " must have shape [",
          tokens, ", ", lanes * pages.size(1), ", ", pages.size(3), "], but has ", t.sizes());
  REQUIRE(t.size(2) == 1 || t.stride(2) == 1, "the last dimension of ", name, " must be contiguous");
}

void write(Tensor keys, Tensor values, const Tensor& key, const Tensor& value, const Tensor& slots) {
  require_pages(keys, values);
  require_tensor("slots", slots, 2, at::kLong);
  require_contiguous("slots", slots);
  const int64_t lanes = slots.size(0), tokens = slots.size(1), room = keys.size(0) * keys.size(2);
  require_new("key", key, keys, lanes, tokens);
  require_new("value", value, values, lanes, tokens);
  const int64_t* at_slots = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < lanes * tokens; i++) {
    REQUIRE(at_slots[i] >= 0 && at_slots[i] < room, "slots[", i / tokens, ", ", i % tokens, "] is ", at_slots[i],
            ", but the pages have ", room, " slots");
  }
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, key.size(1) * key.size(2)));
  dispatch(keys.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        write_token<T>(key, keys, at_slots, tokens, t);
        write_token<T>(value, values, at_slots, tokens, t);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY(paged_kv, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor block_table, Tensor live_lens, Tensor query_start, "
      "Tensor? kv_start, Tensor? sinks, float scale, float softcap, bool causal) -> Tensor");
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("unpack_linear(Tensor packed, int columns) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int columns) -> Tensor");
  m.def(
      "mlp(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, int columns) "
      "-> Tensor");
  m.def(
      "qkv(Tensor x, Tensor q, Tensor? q_bias, Tensor k, Tensor? k_bias, Tensor v, Tensor? v_bias, Tensor cos, Tensor sin, "
      "int[] columns) -> (Tensor, Tensor, Tensor)");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("write(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(paged_kv, CPU, m) {
  m.impl("attend", attend);
  m.impl("write", write);
  m.impl("pack_linear", pack_linear);
  m.impl("unpack_linear", unpack_linear);
  m.impl("linear", linear);
  m.impl("mlp", mlp);
  m.impl("qkv", qkv);
  m.impl("rms_norm", rms_norm);
}

}  // namespace paged_kv
