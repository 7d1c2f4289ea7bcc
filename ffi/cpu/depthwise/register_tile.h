// The innermost loops: products of several positions and several taps, in registers. Lanes are channels.
//
// Element i of a row of inputs, counted in steps, meets tap k at output t where i = t kStride + k. So each input is
// loaded once for all taps of a chunk.
#pragma once

#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

constexpr int kMaxChunk = 4;  // taps at a time
// Outputs whose sums, or whose dy, are in registers: 7 or 14, which divide the sizes of many networks.
constexpr int kTile = kRegisters * 7 / 16;

// The sums in registers: outputs, and vectors of channels. Two vectors share the loops over the window and the checks
// of a narrow tile, for which 16 registers are too few.
template <int kOutputCount, int kVectorCount>
struct TileShape {
  static constexpr int kOutputs = kOutputCount, kVectors = kVectorCount;
};
using WideTile = TileShape<kTile, 1>;
using NarrowTile = TileShape<kTile / 2, 2>;
using SmallTile = TileShape<kTile / 2, 1>;  // for the vector of channels that narrow tiles leave over
constexpr bool kHasNarrowTile = kRegisters >= 32;

// The inputs that `kOutputs` outputs and a chunk of taps read.
template <int kOutputs, int kChunk, int kStride>
constexpr int kInputs = (kOutputs - 1) * kStride + kChunk;

// A set of inputs, as bits. Inputs outside of the set are padding or, after part(), of outputs that do not exist.
class InputSet {
 public:
  static constexpr int kMax = 64;

  InputSet() = default;
  InputSet(int64_t begin, int64_t end) : bits_(below(end) & ~below(begin)) {}

  bool has(int i) const { return (bits_ >> i & 1) != 0; }
  bool is_all(int n) const { return bits_ == below(n); }
  // The inputs [begin, begin + count) of the set, counted from `begin`. begin and count are less than kMax.
  InputSet part(int64_t begin, int64_t count) const {
    InputSet found;
    found.bits_ = bits_ >> begin & ~(~uint64_t{0} << count);
    return found;
  }

 private:
  static uint64_t below(int64_t n) { return n <= 0 ? 0 : n >= kMax ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

  uint64_t bits_ = 0;
};

// Keeps the compiler from loading a value again for each product, or from computing with it ahead.
JAXGRAD_INLINE Vector<float> in_register(Vector<float> value) {
#if defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+v"(value));
#endif
  return value;
}

JAXGRAD_INLINE int64_t in_register(int64_t value) {
  asm("" : "+r"(value));
  return value;
}

// Calls body(input t kStride + k, v, t, k) for all vectors v of channels, outputs t and taps k of a chunk, input by
// input.
template <int kVectors, int kOutputs, int kChunk, int kStride, bool kChecks, class S, class Lanes, class Body>
JAXGRAD_INLINE void for_products(const S* x, int64_t x_step, InputSet inside, Lanes lanes, Body body) {
#pragma GCC unroll 32
  for (int i = 0; i < kInputs<kOutputs, kChunk, kStride>; ++i) {
    if (kChecks && __builtin_expect(!inside.has(i), 0)) continue;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<float> input = in_register(load(x + i * x_step + v * kLanes<float>, lanes));
#pragma GCC unroll 4
      for (int k = 0; k < kChunk; ++k)
        if (i >= k && (i - k) % kStride == 0 && (i - k) / kStride < kOutputs) body(input, v, (i - k) / kStride, k);
    }
  }
}

// sums[v][t] += x[t kStride + k] w[k], for all taps k of a chunk.
template <int kChunk, int kStride, bool kChecks, int kVectors, int kOutputs, class S, class Lanes>
JAXGRAD_INLINE void add_taps(Vector<float> (&sums)[kVectors][kOutputs], const S* x, int64_t x_step, InputSet inside,
                             const float* w, int64_t w_step, Lanes lanes) {
  Vector<float> weights[kVectors][kChunk];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
    for (int k = 0; k < kChunk; ++k) weights[v][k] = load(w + k * w_step + v * kLanes<float>);
  for_products<kVectors, kOutputs, kChunk, kStride, kChecks>(
      x, x_step, inside, lanes, [&](const Vector<float>& input, int v, int t, int k) __attribute__((always_inline)) {
        sums[v][t] += input * weights[v][k];
      });
}

// sums[k] += x[t kStride + k] dy[t], for all outputs t.
template <int kOutputs, int kChunk, int kStride, bool kChecks, class S, class Lanes>
JAXGRAD_INLINE void add_outputs(float* sums, int64_t sums_step, const S* x, int64_t x_step, InputSet inside,
                                const Vector<float> (&dy)[kOutputs], Lanes lanes) {
  Vector<float> totals[kChunk] = {};
  for_products<1, kOutputs, kChunk, kStride, kChecks>(
      x, x_step, inside, lanes, [&](const Vector<float>& input, int, int t, int k) __attribute__((always_inline)) {
        totals[k] += input * dy[t];
      });
#pragma GCC unroll 4
  for (int k = 0; k < kChunk; ++k) store(sums + k * sums_step, load(sums + k * sums_step) + totals[k]);
}

// Calls body(k, Constant<n>) for chunks of n taps that cover [0, taps), n at most `chunk`.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <class Body>
JAXGRAD_INLINE void for_chunks(int64_t taps, int chunk, Body body) {
  for (int64_t k = 0; k < taps;) {
    const int64_t left = taps - k;
    int64_t n = left < chunk ? left : chunk;
    if (left == kMaxChunk + 1 && chunk == kMaxChunk) n = 3;  // 3 and 2 load fewer inputs than 4 and 1
    if (n == 4) body(k, Constant<4>{});
    if (n == 3) body(k, Constant<3>{});
    if (n == 2) body(k, Constant<2>{});
    if (n == 1) body(k, Constant<1>{});
    k += n;
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
