// Queries, keys and values of a packed attention layer in one call: three layers of one input, and the rotary embedding.
//
//   x         T [rows, depth]            q, k, v  packed for their columns               (layouts: linear.h)
//   out       T [rows, heads * width]    of each; queries and keys rotated in place
//   cos, sin  T [rows, width]            of the row's position; halves may differ
// Column d of a head is turned with column d + width / 2. What is rounded to T: each layer, both products, their sum.
#pragma once

#include <array>
#include <tuple>

#include "linear.h"

namespace paged_kv {

// One head of one row: head * cos + rotate_half(head) * sin.
template <typename T>
inline void turn_head(T* head, const T* cos, const T* sin, int64_t width) {
  const int64_t half = width / 2;
  int64_t d = 0;
  for (; d + VL <= half; d += VL) {
    const Vec low = load(head + d), high = load(head + half + d);
    store_rounded(head + d, rounded<T>(low * load(cos + d)) + rounded<T>(-high * load(sin + d)));
    store_rounded(head + half + d, rounded<T>(high * load(cos + half + d)) + rounded<T>(low * load(sin + half + d)));
  }
  for (; d < half; d++) {
    const float low = head[d], high = head[half + d];
    head[d] = static_cast<T>(static_cast<float>(static_cast<T>(low * cos[d])) +
                             static_cast<float>(static_cast<T>(-high * sin[d])));
    head[half + d] = static_cast<T>(static_cast<float>(static_cast<T>(high * cos[half + d])) +
                                    static_cast<float>(static_cast<T>(low * sin[half + d])));
  }
}

template <typename T>
void qkv_rows(const Operand<T>* x, const std::array<Layer<T>, 3>& layers, const std::array<T*, 3>& out, int64_t rows) {
  const int64_t q = layers[0].panels(), k = q + layers[1].panels(), all = k + layers[2].panels();
  each_panel(rows, all, rows * layers[0].depth * all * NR, 1, [&](int64_t panel, int64_t first, int64_t m, float* sums) {
    const int64_t i = panel < q ? 0 : panel < k ? 1 : 2, within = panel - (i == 0 ? 0 : i == 1 ? q : k);
    linear_block(x, layers[i], within, first, m, sums, out[i]);
  });
}

inline std::tuple<Tensor, Tensor, Tensor> qkv(const Tensor& x, const Tensor& q, const optional<Tensor>& q_bias,
                                              const Tensor& k, const optional<Tensor>& k_bias, const Tensor& v,
                                              const optional<Tensor>& v_bias, const Tensor& cos, const Tensor& sin,
                                              at::IntArrayRef columns) {
  REQUIRE(columns.size() == 3, "columns must be three numbers, but are ", columns);
  require_tensor("k", k, 3, q.scalar_type());
  require_tensor("v", v, 3, q.scalar_type());
  require_packed("q", q, columns[0]);
  require_packed("k", k, columns[1]);
  require_packed("v", v, columns[2]);
  REQUIRE(q.size(1) == k.size(1) && q.size(1) == v.size(1), "q, k and v must be equally deep, but are ", q.size(1), ", ",
          k.size(1), " and ", v.size(1));
  const Tensor q_offsets = require_bias("q_bias", q_bias, q, columns[0]),
               k_offsets = require_bias("k_bias", k_bias, k, columns[1]),
               v_offsets = require_bias("v_bias", v_bias, v, columns[2]), from = operands(x, q);
  const int64_t rows = rows_of(x), width = cos.dim() ? cos.size(-1) : 0;
  REQUIRE(width > 0 && width % 2 == 0 && columns[0] % width == 0 && columns[1] % width == 0, "cos is ", width,
          " wide, which does not divide ", columns[0], " and ", columns[1], " columns into heads with halves");
  REQUIRE(cos.sizes() == sin.sizes() && cos.numel() == rows * width, "cos and sin must have ", rows, " rows, but have shapes ",
          cos.sizes(), " and ", sin.sizes());
  REQUIRE(cos.device().is_cpu() && sin.device().is_cpu() && cos.scalar_type() == q.scalar_type() &&
              sin.scalar_type() == q.scalar_type(),
          "cos and sin must be ", q.scalar_type(), " on the CPU, but are ", cos.scalar_type(), " and ", sin.scalar_type());
  const Tensor cosines = cos.contiguous(), sines = sin.contiguous();
  Tensor queries = empty_rows(x, columns[0]), keys = empty_rows(x, columns[1]), values = empty_rows(x, columns[2]);
  dispatch(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const std::array<T*, 3> out{queries.mutable_data_ptr<T>(), keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>()};
    qkv_rows<T>(from.const_data_ptr<Operand<T>>(),
                {layer_of<T>(q, q_offsets, columns[0]), layer_of<T>(k, k_offsets, columns[1]),
                 layer_of<T>(v, v_offsets, columns[2])},
                out, rows);
    const T *cosine = cosines.const_data_ptr<T>(), *sine = sines.const_data_ptr<T>();
    const int64_t grain = std::max<int64_t>(1, 16384 / (columns[0] + columns[1]));
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        for (int i = 0; i < 2; i++) {
          for (int64_t c = 0; c < columns[i]; c += width) {
            turn_head(out[i] + r * columns[i] + c, cosine + r * width, sine + r * width, width);
          }
        }
      }
    });
  });
  return {queries, keys, values};
}

}  // namespace paged_kv
