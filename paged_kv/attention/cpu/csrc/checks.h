// Checks of arguments, and the choice of the element type; shared by all ops.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace paged_kv {

using at::Tensor;
using std::optional;

#define REQUIRE(condition, ...) TORCH_CHECK_VALUE(condition, "paged_kv: ", __VA_ARGS__)

inline void require_tensor(const char* name, const Tensor& t, int64_t dim, at::ScalarType dtype) {
  REQUIRE(t.device().is_cpu(), name, " must be on the CPU, but is on ", t.device());
  REQUIRE(t.dim() == dim, name, " must have ", dim, " dimensions, but has shape ", t.sizes());
  REQUIRE(t.scalar_type() == dtype, name, " must be ", dtype, ", but is ", t.scalar_type());
}

inline void require_contiguous(const char* name, const Tensor& t) {
  REQUIRE(t.is_contiguous(), name, " must be contiguous, but has shape ", t.sizes(), " and strides ", t.strides());
}

template <typename F>
void dispatch(at::ScalarType dtype, F&& fn) {
  switch (dtype) {
    case at::kBFloat16: fn(c10::BFloat16{}); break;
    case at::kHalf: fn(c10::Half{}); break;
    case at::kFloat: fn(float{}); break;
    default: REQUIRE(false, "tensors must be float32, bfloat16 or float16, but are ", dtype);
  }
}

}  // namespace paged_kv
