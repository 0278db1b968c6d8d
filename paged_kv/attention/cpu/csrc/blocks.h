// The four inner loops: scores and weighted sums, for few query rows (straight from a page) and for many (packed panels).
//
//   few rows   score_few:  scores[m, i] = q[m] . key[i]          both contiguous along the width: dot products
//              weigh_few:  acc[m, :]   += p[m, i] * value[i, :]
//   many rows  pack_keys, pack_values: a chunk of keys or values as panels of NR columns, fp32
//              multiply:   C[MR, NR] (+)= A[MR, k] * panel[k, NR]  (used for both products)
#pragma once

#include "simd.h"

namespace paged_kv {

constexpr int NR = 2 * VL;  // columns of a panel
constexpr int MR = 6;       // rows of a register block: 6 x 2 accumulators + 2 panel vectors + 1 broadcast = 15 registers

inline int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

inline void prefetch_bytes(const void* p, int64_t bytes) {
  const char* c = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(c + i, 0, 3);
}

// ---- few query rows ------------------------------------------------------------------------------------------------

// Query rows of one block: three where they divide (3 x 4 accumulators fill sixteen registers), else as even as can be.
inline int64_t rows_at_once(int64_t rows) {
  if (rows % 3 == 0) return 3;
  if (rows % 4 == 0) return kVecBytes == 64 ? 4 : 2;
  return rows < 3 ? rows : rows % 3 == 1 ? 2 : 3;
}

// One block of MQ query rows times NK keys. q [MQ, q_stride] fp32, padded with zeros to a multiple of VL.
template <typename T, int MQ, int NK>
inline void score_block(const float* q, int64_t q_stride, const T* keys, int64_t width, float* out, int64_t out_stride) {
  Vec acc[MQ][4] = {};
  int64_t d = 0;
  auto step = [&](auto&& get) {
    Vec k[NK];
    for (int i = 0; i < NK; i++) k[i] = get(keys + i * width + d);
    for (int m = 0; m < MQ; m++) {
      Vec x = load(q + m * q_stride + d);
      for (int i = 0; i < NK; i++) acc[m][i] += x * k[i];
    }
  };
  for (; d + VL <= width; d += VL) step([](const T* p) { return load(p); });
  if (d < width) step([&](const T* p) { return load_some(p, width - d); });
  for (int m = 0; m < MQ; m++) {
    if constexpr (NK == 4) {
      horizontal_sum4(acc[m], out + m * out_stride);
    } else {
      for (int i = 0; i < NK; i++) out[m * out_stride + i] = horizontal_sum(acc[m][i]);
    }
  }
}

template <typename T, int MQ>
inline void score_rows(const float* q, int64_t q_stride, const T* keys, int64_t width, int64_t n, float* out,
                       int64_t out_stride, const T* next) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    if (next) prefetch_bytes(next + i * width, 4 * width * sizeof(T));
    score_block<T, MQ, 4>(q, q_stride, keys + i * width, width, out + i, out_stride);
  }
  for (; i < n; i++) score_block<T, MQ, 1>(q, q_stride, keys + i * width, width, out + i, out_stride);
}

// scores[m, i] = q[m] . keys[i] for m < rows, i < n. `next`: rows to prefetch meanwhile, at least n of them, or null.
template <typename T>
inline void score_few(const float* q, int64_t q_stride, int64_t rows, const T* keys, int64_t width, int64_t n, float* out,
                      int64_t out_stride, const T* next) {
  while (rows > 0) {
    int64_t step = rows_at_once(rows);
    switch (step) {
      case 4: score_rows<T, 4>(q, q_stride, keys, width, n, out, out_stride, next); break;
      case 3: score_rows<T, 3>(q, q_stride, keys, width, n, out, out_stride, next); break;
      case 2: score_rows<T, 2>(q, q_stride, keys, width, n, out, out_stride, next); break;
      default: score_rows<T, 1>(q, q_stride, keys, width, n, out, out_stride, next); break;
    }
    q += step * q_stride;
    out += step * out_stride;
    rows -= step;
    next = nullptr;
  }
}

// Columns [d, width) in steps of NV vectors, then of half as many, down to a partial vector.
template <typename T, int MQ, int NV>
inline void weigh_columns(const float* p, int64_t p_stride, const T* values, int64_t width, int64_t n, float* acc,
                          int64_t acc_stride, int64_t d) {
  auto block = [&](auto&& get) {
    Vec c[MQ][NV];
    for (int m = 0; m < MQ; m++) {
      for (int j = 0; j < NV; j++) c[m][j] = load(acc + m * acc_stride + d + j * VL);
    }
    for (int64_t i = 0; i < n; i++) {
      Vec v[NV];
      for (int j = 0; j < NV; j++) v[j] = get(values + i * width + d + j * VL);
      for (int m = 0; m < MQ; m++) {
        Vec w = splat(p[m * p_stride + i]);
        for (int j = 0; j < NV; j++) c[m][j] += w * v[j];
      }
    }
    for (int m = 0; m < MQ; m++) {
      for (int j = 0; j < NV; j++) store(acc + m * acc_stride + d + j * VL, c[m][j]);
    }
  };
  for (; d + NV * VL <= width; d += NV * VL) block([](const T* x) { return load(x); });
  if constexpr (NV > 1) {
    if (d < width) weigh_columns<T, MQ, NV / 2>(p, p_stride, values, width, n, acc, acc_stride, d);
  } else {
    if (d < width) block([&](const T* x) { return load_some(x, width - d); });
  }
}

// acc[m, :] += sum over i < n of p[m, i] * values[i, :]; acc rows are padded to a multiple of VL.
template <typename T>
inline void weigh_few(const float* p, int64_t p_stride, int64_t rows, const T* values, int64_t width, int64_t n,
                      float* acc, int64_t acc_stride, const T* next) {
  if (next) prefetch_bytes(next, n * width * sizeof(T));
  while (rows > 0) {
    int64_t step = rows_at_once(rows);
    switch (step) {
      case 4: weigh_columns<T, 4, 2>(p, p_stride, values, width, n, acc, acc_stride, 0); break;
      case 3: weigh_columns<T, 3, 4>(p, p_stride, values, width, n, acc, acc_stride, 0); break;
      case 2: weigh_columns<T, 2, 4>(p, p_stride, values, width, n, acc, acc_stride, 0); break;
      default: weigh_columns<T, 1, 8>(p, p_stride, values, width, n, acc, acc_stride, 0); break;
    }
    p += step * p_stride;
    acc += step * acc_stride;
    rows -= step;
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

// n values of one page, rows [at, at + n) of the chunk: panels[d / NR, row, d % NR], each panel `chunk` rows long.
template <typename T>
inline void pack_values(const T* values, int64_t width, int64_t n, int64_t at, int64_t chunk, float* panels) {
  for (int64_t i = 0; i < n; i++) {
    const T* src = values + i * width;
    for (int64_t d = 0; d < width; d += VL) {
      float* dst = panels + (d / NR) * chunk * NR + (at + i) * NR + d % NR;
      store(dst, d + VL <= width ? load(src + d) : load_some(src + d, width - d));
    }
  }
}

// C[R, NR] = (accumulate ? C : 0) + A[R, k] * B[k, NR].
template <int R, bool accumulate>
inline void multiply_block(const float* a, int64_t lda, const float* b, int64_t k, float* c, int64_t ldc) {
  Vec acc[R][2];
  for (int r = 0; r < R; r++) {
    for (int j = 0; j < 2; j++) acc[r][j] = accumulate ? load(c + r * ldc + j * VL) : Vec{};
  }
  for (int64_t i = 0; i < k; i++) {
    Vec b0 = load(b + i * NR), b1 = load(b + i * NR + VL);
    for (int r = 0; r < R; r++) {
      Vec x = splat(a[r * lda + i]);
      acc[r][0] += x * b0;
      acc[r][1] += x * b1;
    }
  }
  for (int r = 0; r < R; r++) {
    for (int j = 0; j < 2; j++) store(c + r * ldc + j * VL, acc[r][j]);
  }
}

template <bool accumulate>
inline void multiply(int64_t rows, const float* a, int64_t lda, const float* b, int64_t k, float* c, int64_t ldc) {
  switch (rows) {
    case 6: multiply_block<6, accumulate>(a, lda, b, k, c, ldc); break;
    case 5: multiply_block<5, accumulate>(a, lda, b, k, c, ldc); break;
    case 4: multiply_block<4, accumulate>(a, lda, b, k, c, ldc); break;
    case 3: multiply_block<3, accumulate>(a, lda, b, k, c, ldc); break;
    case 2: multiply_block<2, accumulate>(a, lda, b, k, c, ldc); break;
    default: multiply_block<1, accumulate>(a, lda, b, k, c, ldc); break;
  }
}

}  // namespace paged_kv
