// Root-mean-square normalisation in one pass over memory: out = weight * (x / sqrt(mean(x^2) + eps)).
//
//   x, out  T [..., width]     weight  T [width]
// The normalised value is rounded to T before it is multiplied, as the models of transformers do.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include "checks.h"

namespace paged_kv {

template <typename T>
inline void normalise_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  const int64_t whole = width / VL * VL;
  Vec squares{};
  for (int64_t i = 0; i < whole; i += VL) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  float total = horizontal_sum(squares);
  for (int64_t i = whole; i < width; i++) total += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i++) {
    const T normal = static_cast<T>(static_cast<float>(x[i]) * factor);
    out[i] = static_cast<T>(static_cast<float>(weight[i]) * static_cast<float>(normal));
  }
}

inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  require_tensor("weight", weight, 1, x.scalar_type());
  require_contiguous("weight", weight);
  const int64_t width = weight.size(0);
  REQUIRE(x.device().is_cpu() && x.dim() > 0 && x.size(-1) == width && width > 0, "x must be [..., ", width,
          "] on the CPU, but has shape ", x.sizes());
  const Tensor from = x.contiguous();
  Tensor out = at::empty_like(from);
  dispatch(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T *src = from.const_data_ptr<T>(), *scale = weight.const_data_ptr<T>();
    T* dst = out.mutable_data_ptr<T>();
    at::parallel_for(0, from.numel() / width, std::max<int64_t>(1, 32768 / width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        normalise_row(src + r * width, scale, dst + r * width, width, static_cast<float>(eps));
      }
    });
  });
  return out;
}

}  // namespace paged_kv
