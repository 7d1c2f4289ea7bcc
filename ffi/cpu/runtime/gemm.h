// Matrix products C[m, n] = A[m, k] B[k, n] of packed operands; the caller's epilogue stores or adds the result.
//
// B is packed into panels of one to three vectors of columns; a panel holds its K rows one after the other. A is
// blocked as [K / kBlock][rows][kBlock], so that the elements of a tile have fixed distances whether the sum runs over
// the columns of A (read by rows) or over its rows (read by columns). A tile of C stays in registers during the sum
// over K. Then the epilogue receives it, vector by vector.
#pragma once

#include "cpu/runtime/arena.h"
#include "cpu/runtime/gemm_layout.h"
#include "cpu/runtime/parallel_for.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

constexpr int kTileRows = kRegisters == 32 ? 8 : 4;
constexpr int kTileVectors = 3;

// Splits N columns, a multiple of the lanes of a vector, into panels of nearly equal width.
template <class T>
struct Panels {
  explicit Panels(int64_t n)
      : count((n / kLanes<T> + kTileVectors - 1) / kTileVectors),
        narrow(count ? n / kLanes<T> / count : 0),
        wider(count ? n / kLanes<T> % count : 0) {}

  int vectors(int64_t panel) const { return static_cast<int>(narrow + (panel < wider ? 1 : 0)); }
  int64_t column(int64_t panel) const { return (panel * narrow + (panel < wider ? panel : wider)) * kLanes<T>; }

  int64_t count, narrow, wider;
};

// acc[i][j] = sum over k of A(i, k) B(k, j); `a` and `b` point at the tile's first elements. K is a multiple of kBlock.
// By rows, A(i, k) is a[k / 8 * a_stride + i * 8 + k % 8]; by columns (kByColumns), A(i, k) is a[k * 8 + i].
template <class T, int kRows, int kVectors, bool kByColumns>
JAXGRAD_INLINE void multiply_tile(Vector<T> (&acc)[kRows][kVectors], int64_t K, const T* a, int64_t a_stride,
                                  const T* b) {
  constexpr int kLanesT = kLanes<T>;
  // A small tile has several partial sums, so that consecutive additions do not depend on each other.
  constexpr int kTile = kRows * kVectors;
  constexpr int kSums = kTile >= 8 ? 1 : kTile >= 4 ? 2 : kTile >= 2 ? 4 : 8;
  Vector<T> sum[kSums][kRows][kVectors];
#pragma GCC unroll 8
  for (int s = 0; s < kSums; ++s)
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) sum[s][i][j] = Vector<T>{};
  for (int64_t k = 0; k < K; k += kBlock) {
#pragma GCC unroll 8
    for (int kk = 0; kk < kBlock; ++kk) {
      Vector<T> b_vectors[kVectors];
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) b_vectors[j] = load(b + (kk * kVectors + j) * kLanesT);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const T a_element = kByColumns ? a[kk * kBlock + i] : a[i * kBlock + kk];
#pragma GCC unroll 3
        for (int j = 0; j < kVectors; ++j) sum[kk % kSums][i][j] += a_element * b_vectors[j];
      }
    }
    a += kByColumns ? kBlock * kBlock : a_stride;
    b += kBlock * kVectors * kLanesT;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) {
      acc[i][j] = sum[0][i][j];
#pragma GCC unroll 8
      for (int s = 1; s < kSums; ++s) acc[i][j] += sum[s][i][j];
    }
}

template <class T, int kRows, int kVectors, bool kByColumns, class Epilogue>
JAXGRAD_INLINE void tile(int64_t K, const T* a, int64_t a_stride, const T* b, int64_t row, int64_t column,
                         Epilogue epilogue) {
  Vector<T> acc[kRows][kVectors];
  multiply_tile<T, kRows, kVectors, kByColumns>(acc, K, a, a_stride, b);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) epilogue(row + i, column + j * kLanes<T>, acc[i][j]);
}

// Multiplies all rows of A with one panel of B. `stride` is the distance between the blocks of columns of A.
template <class T, int kVectors, class Epilogue>
void multiply_panel(int64_t rows, int64_t K, const T* a, int64_t stride, const T* b, int64_t column,
                    Epilogue epilogue) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows)
    tile<T, kTileRows, kVectors, false>(K, a + i * kBlock, stride, b, i, column, epilogue);
  if constexpr (kTileRows == 8) {
    if (i + 4 <= rows) {
      tile<T, 4, kVectors, false>(K, a + i * kBlock, stride, b, i, column, epilogue);
      i += 4;
    }
  }
  if (i + 2 <= rows) {
    tile<T, 2, kVectors, false>(K, a + i * kBlock, stride, b, i, column, epilogue);
    i += 2;
  }
  if (i < rows) tile<T, 1, kVectors, false>(K, a + i * kBlock, stride, b, i, column, epilogue);
}

// Calls epilogue(row, column, vector) for all of C[rows, N]. `a` is blocked with `block_rows` rows per block and points
// at the first row to read; `b` is [K, N], packed.
template <class T, class Epilogue>
void multiply(int64_t rows, int64_t K, const T* a, int64_t block_rows, const T* b, int64_t N, Epilogue epilogue) {
  const Panels<T> panels(N);
  const int64_t stride = block_rows * kBlock;
  for (int64_t p = 0; p < panels.count; ++p) {
    const int64_t column = panels.column(p);
    const T* panel = b + column * K;
    switch (panels.vectors(p)) {
      case 1:
        multiply_panel<T, 1>(rows, K, a, stride, panel, column, epilogue);
        break;
      case 2:
        multiply_panel<T, 2>(rows, K, a, stride, panel, column, epilogue);
        break;
      default:
        multiply_panel<T, 3>(rows, K, a, stride, panel, column, epilogue);
    }
  }
}

// Packs columns [column, column + vectors * lanes) of a row of B that has `columns` columns before padding. A null row
// is a row of zeros.
template <class S, class T = Compute<S>>
JAXGRAD_INLINE void pack_row(const S* row, int64_t columns, int64_t column, int vectors, T* to) {
  constexpr int kL = kLanes<T>;
  for (int v = 0; v < vectors; ++v) {
    const int64_t first = column + v * kL, real = row == nullptr ? 0 : columns - first;
    store(to + v * kL, real >= kL ? load(row + first) : real > 0 ? load(row + first, int(real)) : Vector<T>{});
  }
}

// --- blocked operands ---------------------------------------------------------------------------------------------

template <class T>
JAXGRAD_INLINE T* blocked(T* base, int64_t block_rows, int64_t row, int64_t column) {
  return base + column / kBlock * (block_rows * kBlock) + row * kBlock + column % kBlock;
}

// The vector of `row` that begins at `column`, a multiple of the lanes.
template <class T>
JAXGRAD_INLINE Vector<T> load_blocked(const T* base, int64_t block_rows, int64_t row, int64_t column) {
  const T* p = blocked(base, block_rows, row, column);
  if constexpr (kLanes<T> <= kBlock) {
    return load(p);
  } else {
    Vector<T> v;
    __builtin_memcpy(&v, p, sizeof v / 2);
    __builtin_memcpy(reinterpret_cast<char*>(&v) + sizeof v / 2, p + block_rows * kBlock, sizeof v / 2);
    return v;
  }
}
template <class T>
JAXGRAD_INLINE void store_blocked(T* base, int64_t block_rows, int64_t row, int64_t column, Vector<T> v) {
  T* p = blocked(base, block_rows, row, column);
  if constexpr (kLanes<T> <= kBlock) {
    store(p, v);
  } else {
    __builtin_memcpy(p, &v, sizeof v / 2);
    __builtin_memcpy(p + block_rows * kBlock, reinterpret_cast<const char*>(&v) + sizeof v / 2, sizeof v / 2);
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
