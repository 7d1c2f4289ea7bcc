// Vectors of the widest kind that the instruction set of this translation unit has, and elementary functions on them.
//
// The kernels are compiled once per instruction set, each time into the namespace JAXGRAD_ISA. The namespace, and the
// absence of templates of the standard library, keep the linker from merging a function compiled for AVX-512 with the
// same function compiled for older processors.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "cpu/runtime/storage.h"

#ifndef JAXGRAD_ISA
#error "compile with -DJAXGRAD_ISA=<a name for the instruction set>"
#endif

#define JAXGRAD_INLINE inline __attribute__((always_inline))

namespace jaxgrad::JAXGRAD_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T, kVectorBytes>::type;

// Integers as wide as T: the type of the result of a comparison of vectors.
template <class T>
struct MaskOf {
  using type = int32_t;
};
template <>
struct MaskOf<double> {
  using type = int64_t;
};
template <class T>
using Bits = Vector<typename MaskOf<T>::type>;

template <class T>
JAXGRAD_INLINE Vector<T> splat(T value) {
  return value - Vector<T>{};
}

template <class V, class P>
JAXGRAD_INLINE V read_as(const P* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof(V));
  return vector;
}

// --- storage ----------------------------------------------------------------------------------------------------

JAXGRAD_INLINE float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  return read_as<float>(&bits);
}

// Vectors of 16-bit elements have half the width.
using Halves = VectorOf<uint16_t, kVectorBytes / 2>::type;
using Words = Vector<uint32_t>;

#if defined(__AVX512F__)
JAXGRAD_INLINE Vector<float> widen_float16(Halves h) { return (Vector<float>)_mm512_cvtph_ps((__m256i)h); }
JAXGRAD_INLINE Halves narrow_float16(Vector<float> v) {
  return (Halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
JAXGRAD_INLINE Vector<float> widen_float16(Halves h) { return (Vector<float>)_mm256_cvtph_ps((__m128i)h); }
JAXGRAD_INLINE Halves narrow_float16(Vector<float> v) {
  return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Subnormal halves use integer arithmetic, because the threads of XLA flush subnormal floats to zero.
JAXGRAD_INLINE Vector<float> widen_float16(Halves h) {
  const Words word = __builtin_convertvector(h, Words);
  const Words sign = (word & 0x8000u) << 16, magnitude = word & 0x7fffu;
  const Words normal = (magnitude << 13) + (112u << 23);
  const Words special = (magnitude << 13) | 0x7f800000u;
  // A subnormal half is its integer times 2^-24, exactly.
  const Vector<float> subnormal = __builtin_convertvector((Vector<int32_t>)magnitude, Vector<float>) * 0x1p-24f;
  Words bits = (magnitude >= 0x7c00u) ? special : normal;
  bits = (magnitude < 0x400u) ? (Words)subnormal : bits;
  return (Vector<float>)(bits | sign);
}
JAXGRAD_INLINE Halves narrow_float16(Vector<float> v) {
  const Words word = (Words)v, sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
  // Rounds to nearest, ties to even: adds just under half a unit in the last place of the result.
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the integer of a subnormal half in the low bits of the float; the addition itself rounds it.
  const Words subnormal = (Words)((Vector<float>)magnitude + 0.5f) - 0x3f000000u;
  const Words infinite = splat(uint32_t{0x7c00u}), nan = splat(uint32_t{0x7e00u});
  Words bits = (magnitude < 0x38800000u) ? subnormal : normal;
  bits = (magnitude >= 0x47800000u) ? infinite : bits;
  bits = (magnitude > 0x7f800000u) ? nan : bits;
  return __builtin_convertvector(bits | sign, Halves);
}
#endif

JAXGRAD_INLINE Vector<float> widen_bfloat16(Halves h) {
#if defined(__AVX512F__)
  const Words words = (Words)_mm512_cvtepu16_epi32((__m256i)h);  // GCC 12 converts the halves of a vector one by one
#else
  const Words words = __builtin_convertvector(h, Words);
#endif
  return (Vector<float>)(words << 16);
}
JAXGRAD_INLINE Halves narrow_bfloat16(Vector<float> v) {
  const Words word = (Words)v;
  const Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const Words quiet_nan = (word >> 16) | 0x40u;
  return __builtin_convertvector((word & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded, Halves);
}

JAXGRAD_INLINE Vector<float> load(const float* p) { return read_as<Vector<float>>(p); }
JAXGRAD_INLINE Vector<double> load(const double* p) { return read_as<Vector<double>>(p); }
JAXGRAD_INLINE Vector<float> load(const BFloat16* p) { return widen_bfloat16(read_as<Halves>(p)); }
JAXGRAD_INLINE Vector<float> load(const Float16* p) { return widen_float16(read_as<Halves>(p)); }

JAXGRAD_INLINE void store(float* p, Vector<float> v) { __builtin_memcpy(p, &v, sizeof v); }
JAXGRAD_INLINE void store(double* p, Vector<double> v) { __builtin_memcpy(p, &v, sizeof v); }
JAXGRAD_INLINE void store(BFloat16* p, Vector<float> v) {
  const Halves h = narrow_bfloat16(v);
  __builtin_memcpy(p, &h, sizeof h);
}
JAXGRAD_INLINE void store(Float16* p, Vector<float> v) {
  const Halves h = narrow_float16(v);
  __builtin_memcpy(p, &h, sizeof h);
}

// The number of lanes that lie within an array: all of them, as a compile-time constant. An int stands for a tail.
template <class T>
struct AllLanes {
  constexpr operator int() const { return kLanes<T>; }
};

template <class S>
JAXGRAD_INLINE Vector<Compute<S>> load(const S* p, AllLanes<Compute<S>>) {
  return load(p);
}
template <class S>
JAXGRAD_INLINE void store(S* p, Vector<Compute<S>> v, AllLanes<Compute<S>>) {
  store(p, v);
}
#if defined(__AVX512F__)
JAXGRAD_INLINE uint32_t lane_mask(int lanes) { return (uint32_t{1} << lanes) - 1; }
JAXGRAD_INLINE __mmask8 lane_mask8(int lanes) { return static_cast<__mmask8>(lane_mask(lanes)); }
JAXGRAD_INLINE __mmask16 lane_mask16(int lanes) { return static_cast<__mmask16>(lane_mask(lanes)); }

JAXGRAD_INLINE Vector<float> load(const float* p, int lanes) {
  return (Vector<float>)_mm512_maskz_loadu_ps(lane_mask16(lanes), p);
}
JAXGRAD_INLINE Vector<double> load(const double* p, int lanes) {
  return (Vector<double>)_mm512_maskz_loadu_pd(lane_mask8(lanes), p);
}
JAXGRAD_INLINE Vector<float> load(const BFloat16* p, int lanes) {
  return widen_bfloat16((Halves)_mm256_maskz_loadu_epi16(lane_mask16(lanes), p));
}
JAXGRAD_INLINE Vector<float> load(const Float16* p, int lanes) {
  return widen_float16((Halves)_mm256_maskz_loadu_epi16(lane_mask16(lanes), p));
}
JAXGRAD_INLINE void store(float* p, Vector<float> v, int lanes) {
  _mm512_mask_storeu_ps(p, lane_mask16(lanes), (__m512)v);
}
JAXGRAD_INLINE void store(double* p, Vector<double> v, int lanes) {
  _mm512_mask_storeu_pd(p, lane_mask8(lanes), (__m512d)v);
}
JAXGRAD_INLINE void store(BFloat16* p, Vector<float> v, int lanes) {
  _mm256_mask_storeu_epi16(p, lane_mask16(lanes), (__m256i)narrow_bfloat16(v));
}
JAXGRAD_INLINE void store(Float16* p, Vector<float> v, int lanes) {
  _mm256_mask_storeu_epi16(p, lane_mask16(lanes), (__m256i)narrow_float16(v));
}
#else
// Copies elements, at most kMax, in a few pieces.
template <int kMax, class S>
JAXGRAD_INLINE void copy_lanes(S* to, const S* from, int lanes) {
#pragma GCC unroll 5
  for (int size = kMax, at = 0; size > 0; size /= 2) {
    if ((lanes & size) == 0) continue;
    __builtin_memcpy(to + at, from + at, size * sizeof(S));
    at += size;
  }
}
template <class S>
JAXGRAD_INLINE Vector<Compute<S>> load(const S* p, int lanes) {
  S buffer[kLanes<Compute<S>>] = {};
  copy_lanes<kLanes<Compute<S>>>(buffer, p, lanes);
  return load(buffer);
}
template <class S>
JAXGRAD_INLINE void store(S* p, Vector<Compute<S>> v, int lanes) {
  S buffer[kLanes<Compute<S>>];
  store(buffer, v);
  copy_lanes<kLanes<Compute<S>>>(p, buffer, lanes);
}
#if defined(__AVX2__)
// A store with a mask is no faster than copy_lanes().
JAXGRAD_INLINE Vector<float> load(const float* p, int lanes) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return (Vector<float>)_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), lane));
}
#endif
#endif

// The first lanes of a vector, followed by zeros.
template <class T>
JAXGRAD_INLINE Vector<T> zero_tail(Vector<T> v, AllLanes<T>) {
  return v;
}
template <class T>
JAXGRAD_INLINE Vector<T> zero_tail(Vector<T> v, int lanes) {
  Bits<T> lane;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < lanes ? v : Vector<T>{};
}

// Calls body(j, lanes) for vectors that cover [0, n).
template <class T, class Body>
JAXGRAD_INLINE void for_vectors(int64_t n, Body body) {
  int64_t j = 0;
  for (; j + kLanes<T> <= n; j += kLanes<T>) body(j, AllLanes<T>{});
  if (j < n) body(j, static_cast<int>(n - j));
}

// --- elementary functions ------------------------------------------------------------------------------------------

template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 0x1.8p23f, kLimit = 87.0f, kTanhLimit = 20.0f;
  static constexpr int kMantissaBits = 23, kBias = 127, kTerms = 7;
};
template <>
struct ExpConstants<double> {
  static constexpr double kLog2e = 1.4426950408889634, kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kRound = 0x1.8p52, kLimit = 708.0, kTanhLimit = 44.0;
  static constexpr int kMantissaBits = 52, kBias = 1023, kTerms = 13;
};

// Splits exp(y) = scale (1 + rest) with scale = 2^k and rest = exp(r) - 1, |r| <= ln(2) / 2. The Taylor series of rest
// is cut where the next term is below 2e-8 |r| in float and 2e-17 |r| in double. Requires |y| <= kLimit; propagates
// NaN.
template <class T>
JAXGRAD_INLINE void split_exp(Vector<T> y, Vector<T>& scale, Vector<T>& rest) {
  using K = ExpConstants<T>;
  using Int = typename MaskOf<T>::type;
  const Vector<T> shifted = y * K::kLog2e + K::kRound;  // the low bits hold the nearest integer
  const Vector<T> k = shifted - K::kRound;
  const Vector<T> r = (y - k * K::kLn2High) - k * K::kLn2Low;
  const Bits<T> integer = (Bits<T>)shifted - (Bits<T>)splat(K::kRound);
  scale = (Vector<T>)((integer + Int{K::kBias}) << K::kMantissaBits);
  T factorial = 1;
  for (int i = 2; i <= K::kTerms; ++i) factorial *= static_cast<T>(i);
  Vector<T> sum = splat(1 / factorial);
#pragma GCC unroll 16
  for (int i = K::kTerms; i > 2; --i) {
    factorial /= static_cast<T>(i);
    sum = sum * r + 1 / factorial;
  }
  rest = sum * (r * r) + r;
}

template <class T>
JAXGRAD_INLINE Vector<T> clamp(Vector<T> v, T limit) {  // propagates NaN
  v = v > limit ? splat(limit) : v;
  return v < -limit ? splat(-limit) : v;
}

template <class T>
JAXGRAD_INLINE Vector<T> sigmoid(Vector<T> x) {
  Vector<T> scale, rest;
  split_exp<T>(clamp<T>(-x, ExpConstants<T>::kLimit), scale, rest);
  return 1 / ((scale * rest + scale) + 1);
}

// tanh(x) = e / (e + 2) with e = exp(2 |x|) - 1, which is accurate relative to x down to zero.
template <class T>
JAXGRAD_INLINE Vector<T> tanh(Vector<T> x) {
  const Bits<T> sign = (Bits<T>)x & (Bits<T>)splat(T(-0.0));
  const Vector<T> twice = (Vector<T>)((Bits<T>)x ^ sign) * 2;
  Vector<T> scale, rest;
  split_exp<T>(clamp<T>(twice, ExpConstants<T>::kTanhLimit), scale, rest);
  const Vector<T> e = scale * rest + (scale - 1);
  return (Vector<T>)((Bits<T>)(e / (e + 2)) | sign);
}

}  // namespace jaxgrad::JAXGRAD_ISA
