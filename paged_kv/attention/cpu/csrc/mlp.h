// The gated block of a decoder in two passes: out = down(silu(gate(x)) * up(x)), nothing but the product in memory.
//
//   x     T [rows, depth]      gate, up  packed for `inner` columns      (layouts: linear.h)
//   out   T [rows, columns]    down      packed for `columns` columns of depth `inner`
// What the layers, the activation and the product give is rounded to T each, as where they are layers of their own.
#pragma once

#include "linear.h"

namespace paged_kv {

// silu(gate + its bias) * (up + its bias) of VL columns.
template <typename T>
inline Vec gated(Vec gate, Vec up) {
  return rounded<T>(rounded<T>(vsilu(rounded<T>(gate))) * rounded<T>(up));
}

template <typename T>
void gate_rows(const Operand<T>* x, const Layer<T>& gate, const Layer<T>& up, Operand<T>* out, int64_t rows) {
  each_panel(rows, gate.panels(), 2 * rows * gate.depth * gate.columns, 2,
             [&](int64_t panel, int64_t first, int64_t m, float* sums) {
               float* others = sums + m * NR;
               linear_panel(gate, panel, x + first * gate.depth, m, sums);
               linear_panel(up, panel, x + first * up.depth, m, others);
               const int64_t column = panel * NR, width = std::min<int64_t>(NR, gate.columns - column);
               float gate_bias[NR], up_bias[NR];
               load_bias(gate, column, gate_bias);
               load_bias(up, column, up_bias);
               for (int64_t r = 0; r < m; r++) {
                 Operand<T> block[NR];
                 for (int64_t c = 0; c < NR; c += VL) {
                   store_rounded(block + c, gated<T>(load(sums + r * NR + c) + load(gate_bias + c),
                                                     load(others + r * NR + c) + load(up_bias + c)));
                 }
                 std::memcpy(static_cast<void*>(out + (first + r) * gate.columns + column), block, width * sizeof(block[0]));
               }
             });
}

inline Tensor mlp(const Tensor& x, const Tensor& gate, const optional<Tensor>& gate_bias, const Tensor& up,
                  const optional<Tensor>& up_bias, const Tensor& down, const optional<Tensor>& down_bias, int64_t columns) {
  require_tensor("down", down, 3, gate.scalar_type());
  require_tensor("up", up, 3, gate.scalar_type());
  const int64_t inner = down.size(1);
  require_packed("gate", gate, inner);
  require_packed("up", up, inner);
  require_packed("down", down, columns);
  REQUIRE(gate.size(1) == up.size(1), "gate and up must be equally deep, but are ", gate.size(1), " and ", up.size(1));
  const Tensor gate_offsets = require_bias("gate_bias", gate_bias, gate, inner),
               up_offsets = require_bias("up_bias", up_bias, up, inner),
               down_offsets = require_bias("down_bias", down_bias, down, columns), from = operands(x, gate);
  const int64_t rows = rows_of(x);
  const Tensor product = at::empty({rows, inner}, from.options());
  Tensor out = empty_rows(x, columns);
  dispatch(gate.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Operand<T>* between = product.mutable_data_ptr<Operand<T>>();
    gate_rows<T>(from.const_data_ptr<Operand<T>>(), layer_of<T>(gate, gate_offsets, inner),
                 layer_of<T>(up, up_offsets, inner), between, rows);
    linear_rows<T>(between, layer_of<T>(down, down_offsets, columns), out.mutable_data_ptr<T>(), rows);
  });
  return out;
}

}  // namespace paged_kv
