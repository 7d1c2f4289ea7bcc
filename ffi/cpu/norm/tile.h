// Loops over the elements of a tile: reduce() sums over each column, apply() writes each element. The summands and
// results are defined by an operation (operations.h), which does not depend on the layout, and by its parameters
// (parameters.h):
//
//   op.add(i, lanes, params, sums)  adds the `lanes` elements from i on to Op::kSums vectors
//   op.apply(i, lanes, params)      writes the `lanes` elements from i on
//   source.at(j, lanes), source.of(c)
//                                   the parameters of the columns from j on, or of column c in every lane
#pragma once

#include "cpu/runtime/ranges.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// A part of x. Column c in [begin, end) has `run` elements in each row, from first + row * row_step + c * run_step on.
// Tiles with `in_columns` have run = run_step = 1, and are read across the columns.
struct Tile {
  bool in_columns;
  int64_t first, rows, row_step;
  int64_t begin, end;
  int64_t run, run_step;
};

// Vectors of columns whose sums stay in registers during a loop over rows.
constexpr int kChunk = kRegisters == 32 ? 8 : 4;
// Separate sums for consecutive vectors of a run, so that consecutive additions do not depend on each other.
constexpr int kRunSums = 4;

template <int N>
struct Vectors {
  static constexpr int kCount = N;
};

// Calls body(j, Vectors<N>{}, lanes) for chunks of N vectors, at most kMax, that cover columns [begin, end).
template <class T, int kMax, class Body>
JAXGRAD_INLINE void for_chunks(int64_t begin, int64_t end, Body body) {
  constexpr int kL = kLanes<T>;
  int64_t j = begin;
  for (; j + kMax * kL <= end; j += kMax * kL) body(j, Vectors<kMax>{}, AllLanes<T>{});
  if constexpr (kMax == 8) {
    if (j + 4 * kL <= end) {
      body(j, Vectors<4>{}, AllLanes<T>{});
      j += 4 * kL;
    }
  }
  if constexpr (kMax > 1)
    for (; j + kL <= end; j += kL) body(j, Vectors<1>{}, AllLanes<T>{});
  if (j < end) body(j, Vectors<1>{}, static_cast<int>(end - j));
}

// Sums the columns from j on over all rows and calls done(s, j, vector) with each sum.
template <class T, int kVectors, class Op, class Source, class Lanes, class Done>
JAXGRAD_INLINE void reduce_chunk(const Op& op, const Source& source, const Tile& tile, int64_t j, Lanes lanes,
                                 Done done) {
  constexpr int kL = kLanes<T>;
  typename Source::Params params[kVectors];
  Vector<T> sums[kVectors][Op::kSums];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    params[v] = source.at(j + v * kL, lanes);
#pragma GCC unroll 3
    for (int s = 0; s < Op::kSums; ++s) sums[v][s] = Vector<T>{};
  }
  int64_t i = tile.first + j;
  for (int64_t row = 0; row < tile.rows; ++row, i += tile.row_step) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) op.add(i + v * kL, lanes, params[v], sums[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 3
    for (int s = 0; s < Op::kSums; ++s) done(s, j + v * kL, sums[v][s]);
}

// Adds the elements [first, first + length) to sums. params_at(j, lanes) are the parameters of those from first + j on.
template <class T, class Op, class ParamsAt>
JAXGRAD_INLINE void add_run(const Op& op, int64_t first, int64_t length, ParamsAt params_at,
                            Vector<T> (&sums)[kRunSums][Op::kSums]) {
  constexpr int kL = kLanes<T>;
  int64_t j = 0;
  for (; j + kRunSums * kL <= length; j += kRunSums * kL) {
#pragma GCC unroll 4
    for (int v = 0; v < kRunSums; ++v)
      op.add(first + j + v * kL, AllLanes<T>{}, params_at(j + v * kL, AllLanes<T>{}), sums[v]);
  }
  for (; j + kL <= length; j += kL) op.add(first + j, AllLanes<T>{}, params_at(j, AllLanes<T>{}), sums[0]);
  if (j < length) {
    const int lanes = static_cast<int>(length - j);
    op.add(first + j, lanes, params_at(j, lanes), sums[1]);
  }
}

// Fills sums[s][column] for the columns of the tile. Operations and parameters are copies: what is written could
// otherwise change them, and each element would read them again.
template <class T, class Op, class Source>
void reduce(Op op, Source source, const Tile& tile, T* const* sums, int64_t at) {
  if (tile.in_columns) {
    for_chunks<T, Op::kMaxVectors>(tile.begin, tile.end, [&](int64_t j, auto vectors, auto lanes) {
      reduce_chunk<T, decltype(vectors)::kCount>(
          op, source, tile, j, lanes, [&](int s, int64_t column, Vector<T> sum) { store(sums[s] + at + column, sum); });
    });
    return;
  }
  for (int64_t c = tile.begin; c < tile.end; ++c) {
    const typename Source::Params params = source.of(c);
    Vector<T> found[kRunSums][Op::kSums] = {};
    for (int64_t row = 0; row < tile.rows; ++row)
      add_run<T>(
          op, tile.first + row * tile.row_step + c * tile.run_step, tile.run, [&](int64_t, auto) { return params; },
          found);
    for (int s = 0; s < Op::kSums; ++s) {
      double total = 0;
      for (int lane = 0; lane < kLanes<T>; ++lane)
        for (int v = 0; v < kRunSums; ++v) total += static_cast<double>(found[v][s][lane]);
      sums[s][at + c] = static_cast<T>(total);
    }
  }
}

template <class T, class Op, class Source>
void apply(Op op, Source source, const Tile& tile) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t first = tile.first + row * tile.row_step;
    if (tile.in_columns) {
      for_vectors<T>(tile.end - tile.begin, [&](int64_t j, auto lanes) {
        op.apply(first + tile.begin + j, lanes, source.at(tile.begin + j, lanes));
      });
      continue;
    }
    for (int64_t c = tile.begin; c < tile.end; ++c) {
      const typename Source::Params params = source.of(c);
      for_vectors<T>(tile.run, [&](int64_t t, auto lanes) { op.apply(first + c * tile.run_step + t, lanes, params); });
    }
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
