// Linear layers with packed weights: out = x W^T + bias, accumulated in fp32.
//
// Layout page:
//   weight  T [columns, depth]                      as torch keeps it
//   packed  T [panels, depth, NR]                   panels = ceil(columns / NR); column c of the output is place
//                                                   packed_place(c % NR) of panel c / NR; columns past the last are zero
//   x       T [rows, depth]    out  T [rows, columns]    bias  T [columns] or absent
// A panel is read front to back, once for all rows of a block: with few rows the product runs at memory speed. This is for
// processors where the vendor's libraries do badly (AVX2 without bf16 instructions); nothing here is needed for attention.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <vector>

#include "blocks.h"
#include "checks.h"

namespace paged_kv {

constexpr int64_t kLinearRows = 192;             // rows of x worked on together: their part of x stays in the L2 cache
constexpr int64_t kLinearDepth = 128;            // products summed up in a row, and so much of a panel in the L1 cache

// Where column c of a panel lies, so that load_half gives the columns in order.
template <typename T>
inline int64_t packed_place(int64_t c) {
  if (!std::is_same_v<T, c10::BFloat16>) return c;
  return c < VL ? 2 * c : 2 * (c - VL) + 1;
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
          T* to = dst + p * depth * NR + packed_place<T>(c);
          const int64_t column = p * NR + c;
          for (int64_t d = 0; d < depth; d++) to[d * NR] = column < columns ? src[column * depth + d] : T(0.0f);
        }
      }
    });
  });
  return packed;
}

inline void require_packed(const Tensor& packed, int64_t columns) {
  require_tensor("packed", packed, 3, packed.scalar_type());
  require_contiguous("packed", packed);
  REQUIRE(packed.size(2) == NR && packed.size(0) == (columns + NR - 1) / NR, "packed has shape ", packed.sizes(), ", not [",
          (columns + NR - 1) / NR, ", depth, ", NR, "] as for ", columns, " columns");
}

inline Tensor unpack_linear(const Tensor& packed, int64_t columns) {
  require_packed(packed, columns);
  const int64_t depth = packed.size(1);
  Tensor weight = at::empty({columns, depth}, packed.options());
  dispatch(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* src = packed.const_data_ptr<T>();
    T* dst = weight.mutable_data_ptr<T>();
    at::parallel_for(0, columns, 64, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; c++) {
        const T* from = src + c / NR * depth * NR + packed_place<T>(c % NR);
        for (int64_t d = 0; d < depth; d++) dst[c * depth + d] = from[d * NR];
      }
    });
  });
  return weight;
}

// One panel times rows [0, rows) of x; sums [rows, NR] in fp32.
template <typename T>
inline void linear_panel(const float* x, int64_t rows, int64_t depth, const T* panel, float* sums) {
  for (int64_t k = 0; k < depth; k += kLinearDepth) {
    const int64_t n = std::min(kLinearDepth, depth - k);
    for (int64_t r = 0; r < rows; r += MR) {
      const int64_t m = std::min<int64_t>(MR, rows - r);
      if (k == 0) {
        multiply<false>(m, x + r * depth, depth, panel, n, sums + r * NR, NR);
      } else {
        multiply<true>(m, x + r * depth + k, depth, panel + k * NR, n, sums + r * NR, NR);
      }
    }
  }
}

template <typename T>
void linear_rows(const float* x, const T* packed, const T* bias, T* out, int64_t rows, int64_t depth, int64_t columns) {
  const int64_t panels = (columns + NR - 1) / NR, blocks = (rows + kLinearRows - 1) / kLinearRows;
  const bool serial = rows * depth * columns < 65536;
  const int64_t threads = serial ? 1 : at::get_num_threads();
  // Some four pieces a thread: even work, and long runs of memory.
  const int64_t piece = std::max<int64_t>(1, panels * blocks / (threads * 4)), pieces = (panels * blocks + piece - 1) / piece;
  std::atomic<int64_t> next{0};
  auto work = [&](int64_t, int64_t) {
    std::vector<float> sums(std::min(rows, kLinearRows) * NR);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      for (int64_t j = i * piece; j < std::min((i + 1) * piece, panels * blocks); j++) {
        const int64_t first = j / panels * kLinearRows, panel = j % panels, m = std::min(kLinearRows, rows - first);
        linear_panel(x + first * depth, m, depth, packed + panel * depth * NR, sums.data());
        const int64_t width = std::min<int64_t>(NR, columns - panel * NR);
        for (int64_t r = 0; r < m; r++) {
          T* to = out + (first + r) * columns + panel * NR;
          const float* from = sums.data() + r * NR;
          for (int64_t c = 0; c < width; c++) {
            to[c] = static_cast<T>(from[c] + (bias ? static_cast<float>(bias[panel * NR + c]) : 0.0f));
          }
        }
      }
    }
  };
  if (threads == 1) {
    work(0, 1);
  } else {
    at::parallel_for(0, std::min(threads, pieces), 1, work);
  }
}

inline Tensor linear(const Tensor& x, const Tensor& packed, const optional<Tensor>& bias, int64_t columns) {
  require_packed(packed, columns);
  const int64_t depth = packed.size(1);
  REQUIRE(x.device().is_cpu() && x.scalar_type() == packed.scalar_type() && x.dim() > 0 && x.size(-1) == depth,
          "x must be ", packed.scalar_type(), " [..., ", depth, "] on the CPU, but is ", x.scalar_type(), " ", x.sizes());
  if (bias) require_tensor("bias", *bias, 1, packed.scalar_type());
  REQUIRE(!bias || bias->size(0) == columns, "bias must have ", columns, " elements, but has shape ", bias->sizes());
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  const Tensor from = x.contiguous(), wide = from.to(at::kFloat), offsets = bias ? bias->contiguous() : Tensor();
  Tensor out = at::empty(shape, x.options());
  dispatch(packed.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    linear_rows<T>(wide.const_data_ptr<float>(), packed.const_data_ptr<T>(), bias ? offsets.const_data_ptr<T>() : nullptr,
                   out.mutable_data_ptr<T>(), depth ? wide.numel() / depth : 0, depth, columns);
  });
  return out;
}

}  // namespace paged_kv
