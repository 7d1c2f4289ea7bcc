// Packs the weights and operands of the GRU into panels for gemm.h.
#pragma once

#include "cpu/runtime/arena.h"
#include "cpu/runtime/gemm.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// Packs columns [column, column + vectors * lanes) of B = source^T, [K, N], into one panel. The source, [N, K], has
// `gate` rows per gate. In B, zeros pad each gate to `padded_gate` columns and K to a multiple of kBlock.
template <class S, class T = Compute<S>>
void pack_transposed(const S* source, int64_t K, int64_t gate, int64_t padded_gate, int64_t column, int vectors,
                     T* panel) {
  constexpr int kL = kLanes<T>;
  const int64_t padded_K = round_up(K, kBlock), width = vectors * kL;
  for (int v = 0; v < vectors; ++v) {
    // Padded gates are multiples of the lanes, so a vector lies within one gate.
    const int64_t first = column + v * kL, within = first % padded_gate;
    const S* rows = source + (first / padded_gate * gate + within) * K;
    const int64_t real = gate - within < kL ? gate - within : kL;
    for (int64_t k = 0; k < padded_K; k += kL) {
      T square[kL][kL];
      for (int n = 0; n < kL; ++n) {
        Vector<T> line{};
        if (n < real && k < K) line = K - k >= kL ? load(rows + n * K + k) : load(rows + n * K + k, int(K - k));
        store(square[n], line);
      }
      const int64_t lines = padded_K - k < kL ? padded_K - k : kL;
      for (int64_t kk = 0; kk < lines; ++kk)
        for (int n = 0; n < kL; ++n) panel[(k + kk) * width + v * kL + n] = square[n][kk];
    }
  }
}

// Packs B = source, [gates * gate, N], with each gate padded to `padded_gate` rows and N to whole vectors.
template <class S, class T = Compute<S>>
void pack_gates(const S* source, int64_t gates, int64_t gate, int64_t padded_gate, int64_t N, int64_t column,
                int vectors, T* panel) {
  for (int64_t g = 0; g < gates; ++g)
    for (int64_t j = 0; j < padded_gate; ++j) {
      pack_row(j < gate ? source + (g * gate + j) * N : nullptr, N, column, vectors, panel);
      panel += vectors * kLanes<T>;
    }
}

}  // namespace jaxgrad::JAXGRAD_ISA
