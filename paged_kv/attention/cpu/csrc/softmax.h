// Online softmax: one chunk of scores of one query row at a time.
#pragma once

#include <algorithm>

#include "blocks.h"

namespace paged_kv {

struct RowState {
  float maximum, denominator;
};

// Turns scores[0, n) into exp(logit - running maximum); returns the factor that older sums must be multiplied by.
// Scores up to the next multiple of VL are overwritten. n > 0.
inline float softmax_chunk(float* scores, int64_t n, float scale, float softcap, RowState* state) {
  const int64_t whole = round_up(n, VL);
  std::fill(scores + n, scores + whole, scores[0]);  // no news for the maximum
  if (softcap > 0) {
    const float inner = scale / softcap;
    for (int64_t i = 0; i < whole; i += VL) store(scores + i, softcap * vtanh(load(scores + i) * inner));
    scale = 1;
  }
  Vec best = load(scores);
  for (int64_t i = VL; i < whole; i += VL) best = vmax(load(scores + i), best);
  std::fill(scores + n, scores + whole, kNegInf);
  const float maximum = std::max(state->maximum, horizontal_max(best) * scale);
  const Vec factor = splat(scale), shift = splat(maximum);
  Vec total{};
  auto weigh = [&]<int N>(int64_t i) PAGED_KV_LAMBDA_INLINE {
    Vec e[N];
    PAGED_KV_UNROLL for (int j = 0; j < N; j++) e[j] = load(scores + i + j * VL) * factor - shift;
    vexp<N>(e);
    PAGED_KV_UNROLL for (int j = 0; j < N; j++) store(scores + i + j * VL, e[j]), total += e[j];
  };
  int64_t i = 0;
  for (; i + 4 * VL <= whole; i += 4 * VL) weigh.template operator()<4>(i);
  for (; i < whole; i += VL) weigh.template operator()<1>(i);
  const float old = state->maximum == maximum ? 1.0f : exp1(state->maximum - maximum);
  state->denominator = state->denominator * old + horizontal_sum(total);
  state->maximum = maximum;
  return old;
}

inline void scale_row(float* row, int64_t n, float factor) {
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < n; i += VL) store(row + i, load(row + i) * factor);
}

}  // namespace paged_kv
