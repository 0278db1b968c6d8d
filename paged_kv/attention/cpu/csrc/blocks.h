// The four inner loops: scores and weighted sums, for few query rows (straight from a page) and for many (packed panels).
//
//   few rows   score_few:  scores[m, i] = q[m] . key[i]          both contiguous along the width: dot products
//              weigh_few:  acc[m, :]   += p[m, i] * value[i, :]
//   many rows  pack_keys, pack_values: a chunk of keys or values as panels of NR columns, fp32
//              multiply:   C[MR, NR] (+)= A[MR, k] * panel[k, NR]  (used for both products, and by linear.h)
#pragma once

#include "simd.h"

namespace paged_kv {

constexpr int NR = 2 * VL;  // columns of a panel
// Rows of a register block: 6 x 2 accumulators + 2 panel vectors + 1 broadcast = 15 of 16 registers; AVX-512 has 32.
constexpr int MR = VL == 16 ? 12 : 6;

// Keeps the compiler from reading v again from memory at each use.
PAGED_KV_INLINE Vec in_register(Vec v) {
#if PAGED_KV_AVX512
  asm("" : "+v"(v));
#elif PAGED_KV_AVX2
  asm("" : "+x"(v));
#endif
  return v;
}

inline int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

// ---- few query rows ------------------------------------------------------------------------------------------------

// Query rows of one block, so that accumulators and operands fit sixteen registers.
inline int64_t rows_at_once(int64_t rows) {
  if (rows <= 4) return rows;
  return rows % 4 == 0 || rows == 7 ? 4 : 3;
}

// Calls fn<R>() with R = rows in 1..4.
template <typename F>
inline void with_rows(int64_t rows, F&& fn) {
  switch (rows) {
    case 4: fn.template operator()<4>(); break;
    case 3: fn.template operator()<3>(); break;
    case 2: fn.template operator()<2>(); break;
    default: fn.template operator()<1>(); break;
  }
}

// Where the bf16 copy of a query row lies, in floats from its fp32 form; it is there where dot products of pairs are used.
inline int64_t pairs_at(int64_t width) {
  return round_up(width, VL);
}

// Floats of one query row.
template <typename T>
inline int64_t query_stride(int64_t width) {
  return pairs_at(width) + (kPairDots<T> ? round_up(width, 2 * VL) / 2 : 0);
}

// One block of MQ query rows times NK keys over the first `whole` columns, a multiple of VL. q [MQ, q_stride] fp32.
template <typename T, int MQ, int NK>
PAGED_KV_INLINE void score_block(const float* q, int64_t q_stride, const T* keys, int64_t width, int64_t whole, float* out,
                                 int64_t out_stride, int64_t ahead) {
  Vec acc[NK][MQ];
  PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) acc[i][m] = Vec{};
  }
  auto dots = [&](int64_t d) PAGED_KV_LAMBDA_INLINE {
    VecBits x[MQ];
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) {
      x[m] = load_bits(reinterpret_cast<const T*>(q + m * q_stride + pairs_at(width)) + d);
    }
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
      const VecBits k = load_bits(keys + i * width + d);
      PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) acc[i][m] = dot_pairs(acc[i][m], x[m], k);
    }
  };
  auto step = [&]<int half>(int64_t d) PAGED_KV_LAMBDA_INLINE {
    Vec x[MQ];
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) x[m] = in_register(load(q + m * q_stride + d + half * VL));
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
      const Vec k = in_register(load_half<half>(keys + i * width + d));
      PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) acc[i][m] += x[m] * k;
    }
  };
  int64_t d = 0;
  for (; d + 2 * VL <= whole; d += 2 * VL) {
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) __builtin_prefetch(keys + i * width + d + ahead);
    if constexpr (kPairDots<T>) {
      dots(d);
    } else {
      step.template operator()<0>(d);
      step.template operator()<1>(d);
    }
  }
  for (; d < whole; d += VL) {
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
      const Vec k = load(keys + i * width + d);
      PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) acc[i][m] += load(q + m * q_stride + d) * k;
    }
  }
  if constexpr (NK == 4) {
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) {
      horizontal_sum4(acc[0][m], acc[1][m], acc[2][m], acc[3][m], out + m * out_stride);
    }
  } else if constexpr (MQ == 4) {
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
      float sums[4];
      horizontal_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], sums);
      for (int m = 0; m < MQ; m++) out[m * out_stride + i] = sums[m];
    }
  } else {
    PAGED_KV_UNROLL for (int i = 0; i < NK; i++) {
      PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) out[m * out_stride + i] = horizontal_sum(acc[i][m]);
    }
  }
}

template <typename T, int MQ>
inline void score_rows(const float* q, int64_t q_stride, const T* keys, int64_t width, int64_t n, float* out,
                       int64_t out_stride, const T* next) {
  constexpr int NK = MQ == 4 ? 2 : 4;
  const int64_t whole = width / VL * VL, ahead = next - keys;
  int64_t i = 0;
  for (; i + NK <= n; i += NK) {
    score_block<T, MQ, NK>(q, q_stride, keys + i * width, width, whole, out + i, out_stride, ahead);
  }
  for (; i < n; i++) score_block<T, MQ, 1>(q, q_stride, keys + i * width, width, whole, out + i, out_stride, ahead);
  if (whole == width) return;
  for (i = 0; i < n; i++) {
    const Vec k = load_some(keys + i * width + whole, width - whole);
    for (int m = 0; m < MQ; m++) out[m * out_stride + i] += horizontal_sum(k * load(q + m * q_stride + whole));
  }
}

// scores[m, i] = q[m] . keys[i] for m < rows, i < n. `next`: as many rows to prefetch meanwhile.
template <typename T>
inline void score_few(const float* q, int64_t q_stride, int64_t rows, const T* keys, int64_t width, int64_t n, float* out,
                      int64_t out_stride, const T* next) {
  for (int64_t m = 0; m < rows; next = keys) {
    const int64_t step = rows_at_once(rows - m);
    with_rows(step, [&]<int R>() {
      score_rows<T, R>(q + m * q_stride, q_stride, keys, width, n, out + m * out_stride, out_stride, next);
    });
    m += step;
  }
}

// Columns [d, width) in steps of NP vector pairs, then of half as many; what is left of a pair in order.
template <typename T, int MQ, int NP>
inline void weigh_columns(const float* p, int64_t p_stride, const T* values, int64_t width, int64_t n, float* acc,
                          int64_t acc_stride, int64_t d, int64_t ahead) {
  constexpr int NV = 2 * NP;
  for (; d + NV * VL <= width; d += NV * VL) {
    Vec c[MQ][NV];
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) {
      PAGED_KV_UNROLL for (int j = 0; j < NV; j++) c[m][j] = Vec{};
    }
    for (int64_t i = 0; i < n; i++) {
      Vec w[MQ];
      PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) w[m] = splat(p[m * p_stride + i]);
      PAGED_KV_UNROLL for (int j = 0; j < NV; j += 2) {
        const T* v = values + i * width + d + j * VL;
        __builtin_prefetch(v + ahead);
        const Vec v0 = load_half<0>(v), v1 = load_half<1>(v);
        PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) c[m][j] += w[m] * v0;
        PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) c[m][j + 1] += w[m] * v1;
      }
    }
    PAGED_KV_UNROLL for (int m = 0; m < MQ; m++) {
      PAGED_KV_UNROLL for (int j = 0; j < NV; j++) {
        float* sum = acc + m * acc_stride + d + j * VL;
        store(sum, load(sum) + c[m][j]);
      }
    }
  }
  if constexpr (NP > 1) {
    if (d < width) weigh_columns<T, MQ, NP / 2>(p, p_stride, values, width, n, acc, acc_stride, d, ahead);
  } else {
    for (; d < width; d += VL) {
      for (int64_t i = 0; i < n; i++) {
        const Vec v = d + VL <= width ? load(values + i * width + d) : load_some(values + i * width + d, width - d);
        for (int m = 0; m < MQ; m++) {
          float* c = acc + m * acc_stride + d;
          store(c, load(c) + p[m * p_stride + i] * v);
        }
      }
    }
  }
}

// acc[m, :] += sum over i < n of p[m, i] * values[i, :]; acc rows in pair order, padded to a multiple of VL.
template <typename T>
inline void weigh_few(const float* p, int64_t p_stride, int64_t rows, const T* values, int64_t width, int64_t n,
                      float* acc, int64_t acc_stride, const T* next) {
  for (int64_t m = 0; m < rows; next = values) {
    const int64_t step = rows_at_once(rows - m);
    with_rows(step, [&]<int R>() {
      constexpr int pairs = R == 1 ? 4 : R == 4 ? 1 : 2;
      weigh_columns<T, R, pairs>(p + m * p_stride, p_stride, values, width, n, acc + m * acc_stride, acc_stride, 0,
                                 next - values);
    });
    m += step;
  }
}

// ---- many query rows -----------------------------------------------------------------------------------------------

// n keys of one page, columns [at, at + n) of the chunk: panels[(column / NR), d, column % NR] = keys[i, d].
template <typename T>
inline void pack_keys(const T* keys, int64_t width, int64_t n, int64_t at, float* panels) {
  int64_t i = 0;
  auto place = [&](int64_t column) { return panels + (column / NR) * width * NR + column % NR; };
  for (; at % 8 == 0 && i + 8 <= n; i += 8) {
    float* dst = place(at + i);
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) transpose8(keys + i * width + d, width, dst + d * NR, NR);
    for (; d < width; d++) {
      for (int r = 0; r < 8; r++) dst[d * NR + r] = static_cast<float>(keys[(i + r) * width + d]);
    }
  }
  for (; i < n; i++) {
    float* dst = place(at + i);
    for (int64_t d = 0; d < width; d++) dst[d * NR] = static_cast<float>(keys[i * width + d]);
  }
}

// n values of one page, rows [at, at + n) of the chunk, in pair order: panels[d / NR, row, d % NR], each panel `chunk`
// rows long.
template <typename T>
inline void pack_values(const T* values, int64_t width, int64_t n, int64_t at, int64_t chunk, float* panels) {
  for (int64_t i = 0; i < n; i++) {
    const T* src = values + i * width;
    float* dst = panels + (at + i) * NR;
    int64_t d = 0;
    for (; d + NR <= width; d += NR, dst += chunk * NR) {
      store(dst, load_half<0>(src + d));
      store(dst + VL, load_half<1>(src + d));
    }
    for (; d < width; d += VL, dst += VL) store(dst, d + VL <= width ? load(src + d) : load_some(src + d, width - d));
  }
}

// The same in pairs, as multiply takes them: panels[column / NR, d / 2, column % NR, d % 2]; width must be even.
inline void pack_keys(const c10::BFloat16* keys, int64_t width, int64_t n, int64_t at, c10::BFloat16* panels) {
  // A pair is moved as one number of four bytes.
  pack_keys(reinterpret_cast<const float*>(keys), width / 2, n, at, reinterpret_cast<float*>(panels));
}

// C[R, NR] = (accumulate ? C : 0) + A[R, k] * B[k, NR]; the product is summed up from zero, so that its rounding errors do
// not grow with what is in C. B in pair order; A fp32.
template <int R, bool accumulate, bool fetch, typename T>
inline void multiply_block(const float* a, int64_t lda, const T* b, int64_t k, float* c, int64_t ldc) {
  Vec acc[R][2];
  PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
    PAGED_KV_UNROLL for (int j = 0; j < 2; j++) acc[r][j] = Vec{};
  }
  for (int64_t i = 0; i < k; i++) {
    if constexpr (fetch) __builtin_prefetch(b + i * NR + 1024 / sizeof(T));
    const Vec b0 = load_half<0>(b + i * NR), b1 = load_half<1>(b + i * NR);
    PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
      const Vec x = splat(a[r * lda + i]);
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
  PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
    PAGED_KV_UNROLL for (int j = 0; j < 2; j++) {
      float* at = c + r * ldc + j * VL;
      store(at, accumulate ? load(at) + acc[r][j] : acc[r][j]);
    }
  }
}

// The same with A in bf16 and two products an instruction. B in pairs of rows, b[i / 2, column, i % 2], and the last row of
// an odd number in pair order as above.
template <int R, bool accumulate, bool fetch>
inline void multiply_block(const c10::BFloat16* a, int64_t lda, const c10::BFloat16* b, int64_t k, float* c, int64_t ldc) {
  Vec acc[R][2];
  PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
    PAGED_KV_UNROLL for (int j = 0; j < 2; j++) acc[r][j] = Vec{};
  }
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) {
    if constexpr (fetch) {
      __builtin_prefetch(b + i * NR + 512);
      __builtin_prefetch(b + i * NR + 512 + NR);
    }
    const VecBits b0 = load_bits(b + i * NR), b1 = load_bits(b + i * NR + NR);
    PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
      uint32_t pair;
      std::memcpy(&pair, a + r * lda + i, sizeof(pair));
      const VecBits x = pair - VecBits{};
      acc[r][0] = dot_pairs(acc[r][0], x, b0);
      acc[r][1] = dot_pairs(acc[r][1], x, b1);
    }
  }
  if (i < k) {
    const Vec b0 = load_half<0>(b + i * NR), b1 = load_half<1>(b + i * NR);
    PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
      const Vec x = splat(static_cast<float>(a[r * lda + i]));
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
  PAGED_KV_UNROLL for (int r = 0; r < R; r++) {
    PAGED_KV_UNROLL for (int j = 0; j < 2; j++) {
      float* at = c + r * ldc + j * VL;
      store(at, accumulate ? load(at) + acc[r][j] : acc[r][j]);
    }
  }
}

// `rows` in 1..MR; `fetch`: b comes from memory, not from a cache.
template <bool accumulate, int R = MR, typename A, typename T>
inline void multiply(int64_t rows, const A* a, int64_t lda, const T* b, int64_t k, float* c, int64_t ldc, bool fetch) {
  if constexpr (R > 1) {
    if (rows < R) return multiply<accumulate, R - 1>(rows, a, lda, b, k, c, ldc, fetch);
  }
  if (fetch) {
    multiply_block<R, accumulate, true>(a, lda, b, k, c, ldc);
  } else {
    multiply_block<R, accumulate, false>(a, lda, b, k, c, ldc);
  }
}

}  // namespace paged_kv
