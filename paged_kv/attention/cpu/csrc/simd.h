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
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define PAGED_KV_UNROLL _Pragma("GCC unroll 16")
#define PAGED_KV_INLINE inline __attribute__((always_inline))
#define PAGED_KV_LAMBDA_INLINE __attribute__((always_inline))

namespace paged_kv {

// -DPAGED_KV_VECTOR_BYTES=64 on a processor without AVX-512 runs the wide code in pairs of narrow instructions: slower, but
// every index and layout of it can be tested there.
#if !defined(PAGED_KV_VECTOR_BYTES)
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define PAGED_KV_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define PAGED_KV_VECTOR_BYTES 32
#else
#define PAGED_KV_VECTOR_BYTES 16
#endif
#endif
#if PAGED_KV_VECTOR_BYTES == 64 && defined(__AVX512F__) && defined(__AVX512BW__)
#define PAGED_KV_AVX512 1
#else
#define PAGED_KV_AVX512 0
#endif
#if PAGED_KV_VECTOR_BYTES == 32 && defined(__AVX2__)
#define PAGED_KV_AVX2 1
#else
#define PAGED_KV_AVX2 0
#endif
// Dot products of bf16 pairs; -DPAGED_KV_BF16_DOT=1 runs them on any processor, from ordinary products.
#if !defined(PAGED_KV_BF16_DOT)
#if PAGED_KV_AVX512 && defined(__AVX512BF16__)
#define PAGED_KV_BF16_DOT 1
#else
#define PAGED_KV_BF16_DOT 0
#endif
#endif

constexpr int kVecBytes = PAGED_KV_VECTOR_BYTES;
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
#if PAGED_KV_AVX512
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif PAGED_KV_AVX2 && defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec out;
  for (int i = 0; i < VL; i++) out[i] = static_cast<float>(p[i]);
  return out;
#endif
}

inline VecBits load_bits(const void* p) {
  VecBits bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

// Half of 2 * VL elements at p, in *pair order*: the first and the second VL of them, but for bf16 the even and the odd
// ones, which costs a shift or a mask where widening in order costs a widening and a shift. See pair_place.
template <int half, typename T>
inline Vec load_half(const T* p) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const VecBits bits = load_bits(p);
    return reinterpret_cast<Vec>(half ? bits & 0xffff0000u : bits << 16);
  } else {
    return load(p + half * VL);
  }
}

// Whether scores of a dtype are dot products of pairs.
template <typename T>
constexpr bool kPairDots = PAGED_KV_BF16_DOT && std::is_same_v<T, c10::BFloat16>;

// acc[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1] for 2 * VL bf16 elements of each, summed up in fp32.
inline Vec dot_pairs(Vec acc, VecBits a, VecBits b) {
#if PAGED_KV_AVX512 && defined(__AVX512BF16__)
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a),
                                                reinterpret_cast<__m512bh>(b)));
#else
  acc += reinterpret_cast<Vec>(a & 0xffff0000u) * reinterpret_cast<Vec>(b & 0xffff0000u);
  return acc + reinterpret_cast<Vec>(a << 16) * reinterpret_cast<Vec>(b << 16);
#endif
}

// Element d of a row of `width` elements: the last width % (2 * VL) keep their order.
template <typename T>
inline int64_t pair_place(int64_t d, int64_t width) {
  if (!std::is_same_v<T, c10::BFloat16> || d >= width / (2 * VL) * (2 * VL)) return d;
  return d / (2 * VL) * (2 * VL) + d % 2 * VL + d % (2 * VL) / 2;
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

// The greater; b when either is NaN, as the processor's instruction.
inline Vec vmax(Vec a, Vec b) {
#if PAGED_KV_AVX512
  return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif PAGED_KV_AVX2
  return reinterpret_cast<Vec>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// To the nearest number of T, ties to even, in fp32.
template <typename T>
inline Vec rounded(Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const VecBits bits = reinterpret_cast<VecBits>(v);
    const Vec nearest = reinterpret_cast<Vec>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    return v == v ? nearest : v;
  } else {
#if PAGED_KV_AVX512
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT)));
#elif PAGED_KV_AVX2 && defined(__F16C__)
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT)));
#else
    for (int i = 0; i < VL; i++) v[i] = static_cast<float>(static_cast<T>(v[i]));
    return v;
#endif
  }
}

// VL elements, each rounded once.
template <typename T>
inline void store_rounded(T* p, Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    store(p, v);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const HalfBits bits = __builtin_convertvector(reinterpret_cast<VecBits>(rounded<T>(v)) >> 16, HalfBits);
    std::memcpy(static_cast<void*>(p), &bits, sizeof(bits));
  } else {
    for (int i = 0; i < VL; i++) p[i] = static_cast<T>(v[i]);
  }
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

// out[0..3] = sums of a0..a3.
inline void horizontal_sum4(Vec a0, Vec a1, Vec a2, Vec a3, float* out) {
  const Vec a[4] = {a0, a1, a2, a3};
#if PAGED_KV_AVX512 || PAGED_KV_AVX2
  __m256 h[4];
  for (int i = 0; i < 4; i++) {
#if PAGED_KV_AVX512
    __m512 z = reinterpret_cast<__m512>(a[i]);
    h[i] = _mm256_add_ps(_mm512_castps512_ps256(z),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z), 1)));
#else
    h[i] = reinterpret_cast<__m256>(a[i]);
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

// exp(x) = scale * part + scale, scale a power of two and part = exp(r) - 1 with |r| <= ln(2) / 2; x in [-87, 88].
// part is r + r^2 q(r), q of degree 4 fitted for the smallest relative error of exp, 3e-9. One-step reduction: its error
// grows with |x|, but what a softmax makes of such an x is as small. N vectors in step hide the latency of the chain.
template <int N>
PAGED_KV_INLINE void split_exp(const Vec* x, Vec* scale, Vec* part) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  Vec r[N], square[N], low[N];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) scale[i] = x[i] * 1.44269504f + magic;
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) r[i] = x[i] - (scale[i] - magic) * 0.693147181f;
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) square[i] = r[i] * r[i];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) low[i] = r[i] * 0.16666521f + 0.49999994f;
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) part[i] = r[i] * 8.3687259e-3f + 4.1668389e-2f;
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) part[i] = square[i] * 1.3814581e-3f + part[i];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) part[i] = square[i] * part[i] + low[i];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) part[i] = square[i] * part[i] + r[i];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) {
    scale[i] = reinterpret_cast<Vec>((reinterpret_cast<VecI>(scale[i]) << 23) + 0x3f800000);
  }
}

// x = exp(x) for N vectors of x <= 88; not less than exp(-87) = 1.6e-38.
template <int N>
PAGED_KV_INLINE void vexp(Vec* x) {
  Vec scale[N], part[N];
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) x[i] = vmax(splat(-87.0f), x[i]);
  split_exp<N>(x, scale, part);
  PAGED_KV_UNROLL for (int i = 0; i < N; i++) x[i] = scale[i] * part[i] + scale[i];
}

inline Vec vtanh(Vec x) {
  Vec y = 2.0f * x;  // tanh(x) = e / (e + 2) with e = exp(2x) - 1
  y = y > 40.0f ? splat(40.0f) : y;
  y = y < -40.0f ? splat(-40.0f) : y;
  Vec scale, part;
  split_exp<1>(&y, &scale, &part);
  Vec e = scale * part + (scale - 1.0f);
  return e / (e + 2.0f);
}

// x / (1 + exp(-x)), the activation called SiLU or swish. Below -88 it is not 0 but as good as.
inline Vec vsilu(Vec x) {
  Vec e = -x;
  e = e > 88.0f ? splat(88.0f) : e;
  vexp<1>(&e);
  return x / (1.0f + e);
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
