// Vectors of floats: loads with conversion, stores, reductions, exp and tanh.
//
// Written with GCC/Clang vector extensions, so one text compiles to AVX-512, AVX2, SSE and NEON; intrinsics appear only
// where the extensions cannot say it (F16C conversion, transposes, fast horizontal sums) and always have a portable twin.
// Every element type is widened to fp32 in registers; nothing here accumulates in less than fp32.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace paged_kv {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int VL = kVecBytes / 4;  // floats in a vector

typedef float Vec __attribute__((vector_size(kVecBytes)));
typedef int32_t VecI __attribute__((vector_size(kVecBytes)));
typedef float VecMem __attribute__((vector_size(kVecBytes), aligned(4), may_alias));
typedef uint32_t VecBits __attribute__((vector_size(kVecBytes)));
typedef uint16_t HalfBits __attribute__((vector_size(kVecBytes / 2)));
typedef uint16_t HalfBitsMem __attribute__((vector_size(kVecBytes / 2), aligned(2), may_alias));

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

inline Vec splat(float x) {
  return x - Vec{};  // x - 0 is x for every x, also -0
}

inline Vec load(const float* p) {
  return *reinterpret_cast<const VecMem*>(p);
}

inline Vec load(const c10::BFloat16* p) {
  HalfBits bits = *reinterpret_cast<const HalfBitsMem*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, VecBits) << 16);
}

inline Vec load(const c10::Half* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec out;
  for (int i = 0; i < VL; i++) out[i] = static_cast<float>(p[i]);
  return out;
#endif
}

// The first n < VL elements, the rest zero; reads nothing past them.
template <typename T>
inline Vec load_some(const T* p, int64_t n) {
  T padded[VL];
  std::memset(static_cast<void*>(padded), 0, sizeof(padded));
  std::memcpy(static_cast<void*>(padded), p, n * sizeof(T));
  return load(static_cast<const T*>(padded));
}

inline void store(float* p, Vec v) {
  *reinterpret_cast<VecMem*>(p) = v;
}

inline Vec vmax(Vec a, Vec b) {
  return a > b ? a : b;
}

inline float horizontal_sum(Vec v) {
  float total = 0;
  for (int i = 0; i < VL; i++) total += v[i];
  return total;
}

inline float horizontal_max(Vec v) {
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
}

// out[i] = sum of a[i], for four vectors at once.
inline void horizontal_sum4(const Vec a[4], float* out) {
#if defined(__AVX__)
  __m256 h[4];
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512 z = reinterpret_cast<__m512>(a[i]);
    h[i] = _mm256_add_ps(_mm512_castps512_ps256(z),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z), 1)));
#elif defined(__AVX2__)
    h[i] = reinterpret_cast<__m256>(a[i]);
#else
    h[i] = _mm256_castps128_ps256(reinterpret_cast<__m128>(a[i]));
    h[i] = _mm256_insertf128_ps(h[i], _mm_setzero_ps(), 1);
#endif
  }
  __m256 s01 = _mm256_add_ps(_mm256_unpacklo_ps(h[0], h[1]), _mm256_unpackhi_ps(h[0], h[1]));
  __m256 s23 = _mm256_add_ps(_mm256_unpacklo_ps(h[2], h[3]), _mm256_unpackhi_ps(h[2], h[3]));
  __m256 s = _mm256_add_ps(_mm256_shuffle_ps(s01, s23, _MM_SHUFFLE(1, 0, 1, 0)),
                           _mm256_shuffle_ps(s01, s23, _MM_SHUFFLE(3, 2, 3, 2)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = horizontal_sum(a[i]);
#endif
}

// exp(x) - 1 = scale * part + (scale - 1), with scale a power of two and part = exp(r) - 1, |r| <= ln(2) / 2.
// x must lie in [-87, 88]. Taylor to r^7: the first term left out is below 2^-27 of the sum.
inline void split_exp(Vec x, Vec* scale, Vec* part) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  Vec shifted = x * 1.44269504f + magic;
  Vec n = shifted - magic;
  Vec r = x - n * 0.693359375f;  // ln(2) in two parts, the first exact in few bits
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  *part = (p * r) * r + r;
  *scale = reinterpret_cast<Vec>((reinterpret_cast<VecI>(shifted) << 23) + 0x3f800000);
}

// exp(x) for x <= 88; below -87 (where fp32 turns denormal) zero.
inline Vec vexp(Vec x) {
  Vec scale, part;
  split_exp(x < -87.0f ? splat(-87.0f) : x, &scale, &part);
  Vec y = scale * part + scale;
  return x < -87.0f ? Vec{} : y;
}

inline Vec vtanh(Vec x) {
  Vec y = 2.0f * x;  // tanh(x) = e / (e + 2) with e = exp(2x) - 1
  y = y > 40.0f ? splat(40.0f) : y;
  y = y < -40.0f ? splat(-40.0f) : y;
  Vec scale, part;
  split_exp(y, &scale, &part);
  Vec e = scale * part + (scale - 1.0f);
  return e / (e + 2.0f);
}

inline float exp1(float x) {
  return std::exp(x);
}

// Eight rows of eight floats, row stride `from`, written as eight columns with row stride `to`.
template <typename T>
inline void transpose8(const T* src, int64_t from, float* dst, int64_t to) {
#if defined(__AVX2__)
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) {
    if constexpr (std::is_same_v<T, float>) {
      r[i] = _mm256_loadu_ps(src + i * from);
    } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
      __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * from));
      r[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    } else {
      float wide[8];
      for (int j = 0; j < 8; j++) wide[j] = static_cast<float>(src[i * from + j]);
      r[i] = _mm256_loadu_ps(wide);
    }
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i + 0] = _mm256_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(dst + i * to, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(dst + (i + 4) * to, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; i++) {
    for (int j = 0; j < 8; j++) dst[j * to + i] = static_cast<float>(src[i * from + j]);
  }
#endif
}

}  // namespace paged_kv
