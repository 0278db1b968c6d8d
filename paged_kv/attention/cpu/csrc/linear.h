// Linear layers with packed weights: out = x W^T + bias, accumulated in fp32.
//
// Layout page:
//   weight  T [columns, depth]                      as torch keeps it
//   packed  T [panels, depth, NR]                   panels = ceil(columns / NR); column c of the output is in panel c / NR
//                                                   at packed_at(c % NR, d); columns past the last are zero
//   x       T [rows, depth]    out  T [rows, columns]    bias  T [columns] or absent
// A panel is read front to back, once for all rows of a block: with few rows the product runs at memory speed. Nothing here
// is needed for attention.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <vector>

#include "blocks.h"
#include "checks.h"

namespace paged_kv {

constexpr int64_t kLinearRows = 96;              // rows of x worked on together: their part of x stays in the L2 cache
constexpr int64_t kLinearDepth = 128;            // products summed up in a row, and so much of a panel in the L1 cache

// What x is multiplied as: bf16 where dot products of pairs are used, else fp32.
template <typename T>
using Operand = std::conditional_t<kPairDots<T>, T, float>;

// Where weight [c, d] of a panel lies, so that multiply gives the columns in order.
template <typename T>
inline int64_t packed_at(int64_t c, int64_t d, int64_t depth) {
  if (kPairDots<T> && d < depth / 2 * 2) return d / 2 * 2 * NR + 2 * c + d % 2;
  if (!std::is_same_v<T, c10::BFloat16>) return d * NR + c;
  return d * NR + (c < VL ? 2 * c : 2 * (c - VL) + 1);
}

inline Tensor pack_linear(const Tensor& weight) {
  REQUIRE(weight.device().is_cpu() && weight.dim() == 2, "weight must be a matrix on the CPU, but has shape ", weight.sizes());
  const Tensor from = weight.contiguous();
  const int64_t columns = from.size(0), depth = from.size(1), panels = (columns + NR - 1) / NR;
  Tensor packed = at::empty({panels, depth, NR}, from.options());
  dispatch(from.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* src = from.const_data_ptr<T>();
    T* dst = packed.mutable_data_ptr<T>();
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) {
        for (int64_t c = 0; c < NR; c++) {
          T* to = dst + p * depth * NR;
          const int64_t column = p * NR + c;
          for (int64_t d = 0; d < depth; d++) {
            to[packed_at<T>(c, d, depth)] = column < columns ? src[column * depth + d] : T(0.0f);
          }
        }
      }
    });
  });
  return packed;
}

inline void require_packed(const char* name, const Tensor& packed, int64_t columns) {
  require_tensor(name, packed, 3, packed.scalar_type());
  require_contiguous(name, packed);
  REQUIRE(packed.size(2) == NR && packed.size(0) == (columns + NR - 1) / NR, name, " has shape ", packed.sizes(), ", not [",
          (columns + NR - 1) / NR, ", depth, ", NR, "] as for ", columns, " columns");
}

inline Tensor unpack_linear(const Tensor& packed, int64_t columns) {
  require_packed("packed", packed, columns);
  const int64_t depth = packed.size(1);
  Tensor weight = at::empty({columns, depth}, packed.options());
  dispatch(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* src = packed.const_data_ptr<T>();
    T* dst = weight.mutable_data_ptr<T>();
    at::parallel_for(0, columns, 64, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; c++) {
        const T* from = src + c / NR * depth * NR;
        for (int64_t d = 0; d < depth; d++) dst[c * depth + d] = from[packed_at<T>(c % NR, d, depth)];
      }
    });
  });
  return weight;
}

// One packed layer, as the loops take it.
template <typename T>
struct Layer {
  const T *packed, *bias;  // bias may be null
  int64_t depth, columns;

  int64_t panels() const { return (columns + NR - 1) / NR; }
};

// x W^T of one panel for rows [0, rows) of x; sums [rows, NR] in fp32, without the bias.
template <typename T>
inline void linear_panel(const Layer<T>& layer, int64_t panel, const Operand<T>* x, int64_t rows, float* sums) {
  const int64_t depth = layer.depth;
  const T* packed = layer.packed + panel * depth * NR;
  for (int64_t k = 0; k < depth; k += kLinearDepth) {
    const int64_t n = std::min(kLinearDepth, depth - k);
    for (int64_t r = 0; r < rows; r += MR) {
      const int64_t m = std::min<int64_t>(MR, rows - r);
      const Operand<T>* a = x + r * depth + k;
      const T* b = packed + k * NR;
      if (k == 0) {
        multiply<false>(m, a, depth, b, n, sums + r * NR, NR, r == 0);
      } else {
        multiply<true>(m, a, depth, b, n, sums + r * NR, NR, r == 0);
      }
    }
  }
  if (!depth) std::fill(sums, sums + rows * NR, 0.0f);
}

// The bias of NR columns from `first` on in fp32; zeros where there is none.
template <typename T>
inline void load_bias(const Layer<T>& layer, int64_t first, float* to) {
  for (int64_t c = 0; c < NR; c++) {
    to[c] = layer.bias && first + c < layer.columns ? static_cast<float>(layer.bias[first + c]) : 0.0f;
  }
}

// Calls fn(panel, first row, rows, buffer) for each panel and each block of rows, on all threads; the buffer [rows, buffers,
// NR] is the thread's own. `products` is how much work all of it is.
template <typename F>
void each_panel(int64_t rows, int64_t panels, int64_t products, int64_t buffers, F&& fn) {
  const int64_t blocks = (rows + kLinearRows - 1) / kLinearRows;
  const int64_t threads = products < 65536 ? 1 : at::get_num_threads();
  // Some four pieces a thread: even work, and long runs of memory.
  const int64_t piece = std::max<int64_t>(1, panels * blocks / (threads * 4)), pieces = (panels * blocks + piece - 1) / piece;
  std::atomic<int64_t> next{0};
  auto work = [&](int64_t, int64_t) {
    std::vector<float> buffer(std::min(rows, kLinearRows) * buffers * NR);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      for (int64_t j = i * piece; j < std::min((i + 1) * piece, panels * blocks); j++) {
        const int64_t first = j / panels * kLinearRows;
        fn(j % panels, first, std::min(kLinearRows, rows - first), buffer.data());
      }
    }
  };
  if (threads == 1) {
    work(0, 1);
  } else {
    at::parallel_for(0, std::min(threads, pieces), 1, work);
  }
}

// One panel of a layer for rows [first, first + m) of x, rounded into out.
template <typename T>
inline void linear_block(const Operand<T>* x, const Layer<T>& layer, int64_t panel, int64_t first, int64_t m, float* sums,
                         T* out) {
  linear_panel(layer, panel, x + first * layer.depth, m, sums);
  const int64_t column = panel * NR, width = std::min<int64_t>(NR, layer.columns - column);
  float bias[NR];
  load_bias(layer, column, bias);
  for (int64_t r = 0; r < m; r++) {
    T* to = out + (first + r) * layer.columns + column;
    const float* from = sums + r * NR;
    if (width == NR) {
      store_rounded(to, load(from) + load(bias));
      store_rounded(to + VL, load(from + VL) + load(bias + VL));
    } else {
      for (int64_t c = 0; c < width; c++) to[c] = static_cast<T>(from[c] + bias[c]);
    }
  }
}

template <typename T>
void linear_rows(const Operand<T>* x, const Layer<T>& layer, T* out, int64_t rows) {
  each_panel(rows, layer.panels(), rows * layer.depth * layer.columns, 1,
             [&](int64_t panel, int64_t first, int64_t m, float* sums) {
               linear_block(x, layer, panel, first, m, sums, out);
             });
}

// A packed weight with its bias, checked; `bias` is kept by the caller.
template <typename T>
inline Layer<T> layer_of(const Tensor& packed, const Tensor& bias, int64_t columns) {
  return {packed.const_data_ptr<T>(), bias.defined() ? bias.const_data_ptr<T>() : nullptr, packed.size(1), columns};
}

inline Tensor require_bias(const char* name, const optional<Tensor>& bias, const Tensor& packed, int64_t columns) {
  if (!bias) return Tensor();
  require_tensor(name, *bias, 1, packed.scalar_type());
  REQUIRE(bias->size(0) == columns, name, " must have ", columns, " elements, but has shape ", bias->sizes());
  return bias->contiguous();
}

// x as rows of operands.
inline Tensor operands(const Tensor& x, const Tensor& packed) {
  const int64_t depth = packed.size(1);
  REQUIRE(x.device().is_cpu() && x.scalar_type() == packed.scalar_type() && x.dim() > 0 && x.size(-1) == depth,
          "x must be ", packed.scalar_type(), " [..., ", depth, "] on the CPU, but is ", x.scalar_type(), " ", x.sizes());
  const bool as_is = x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && kPairDots<c10::BFloat16>);
  return as_is ? x.contiguous() : x.contiguous().to(at::kFloat);
}

inline Tensor empty_rows(const Tensor& x, int64_t columns) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  return at::empty(shape, x.options());
}

inline int64_t rows_of(const Tensor& x) {
  return x.size(-1) ? x.numel() / x.size(-1) : 0;
}

inline Tensor linear(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns) {
  require_packed("packed", packed, columns);
  const Tensor offsets = require_bias("bias", bias, packed, columns), from = operands(x, packed);
  Tensor out = empty_rows(x, columns);
  dispatch(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    linear_rows<T>(from.const_data_ptr<Operand<T>>(), layer_of<T>(packed, offsets, columns), out.mutable_data_ptr<T>(),
                   rows_of(x));
  });
  return out;
}

}  // namespace paged_kv
