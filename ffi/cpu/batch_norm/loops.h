// Loops over the elements of a task: reduce() sums over each column, apply() writes each element. The summands and
// results are defined by an operation (operations.h), which does not depend on the layout:
//
//   Op::Params                      vectors of the column parameters that the operation reads
//   op.at(j), op.of(c)              the Params of the columns from j on, or of column c in every lane
//   op.add(i, lanes, params, sums)  adds the `lanes` elements from i on to kSums vectors
//   op.apply(i, lanes, params)      writes the `lanes` elements from i on
#pragma once

#include "cpu/batch_norm/layout.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// Vectors of columns whose sums stay in registers during a loop over rows.
constexpr int kChunk = kRegisters == 32 ? 8 : 4;
// Separate sums for consecutive vectors of a run, so that consecutive additions do not depend on each other.
constexpr int kRunSums = 4;

template <int N>
struct Vectors {
  static constexpr int kCount = N;
};

// Calls body(j, Vectors<N>{}, lanes) for chunks of N vectors that cover columns [begin, end).
template <class T, class Body>
JAXGRAD_INLINE void for_chunks(int64_t begin, int64_t end, Body body) {
  constexpr int kL = kLanes<T>;
  int64_t j = begin;
  for (; j + kChunk * kL <= end; j += kChunk * kL) body(j, Vectors<kChunk>{}, AllLanes<T>{});
  if constexpr (kChunk == 8) {
    if (j + 4 * kL <= end) {
      body(j, Vectors<4>{}, AllLanes<T>{});
      j += 4 * kL;
    }
  }
  for (; j + kL <= end; j += kL) body(j, Vectors<1>{}, AllLanes<T>{});
  if (j < end) body(j, Vectors<1>{}, static_cast<int>(end - j));
}

// Sums the columns from j on over `rows` rows and calls done(s, j, vector) with each sum.
template <class T, int kVectors, class Op, class Lanes, class Done>
JAXGRAD_INLINE void reduce_chunk(const Op& op, const BatchNormLayout& layout, int64_t first_row, int64_t rows,
                                 int64_t j, Lanes lanes, Done done) {
  constexpr int kL = kLanes<T>;
  typename Op::Params params[kVectors];
  Vector<T> sums[kVectors][Op::kSums];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    params[v] = op.at(j + v * kL);
#pragma GCC unroll 3
    for (int s = 0; s < Op::kSums; ++s) sums[v][s] = Vector<T>{};
  }
  int64_t i = first_row * layout.width + j;
  for (int64_t row = 0; row < rows; ++row, i += layout.width) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) op.add(i + v * kL, lanes, params[v], sums[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 3
    for (int s = 0; s < Op::kSums; ++s) done(s, j + v * kL, sums[v][s]);
}

// Sums a channel over a block of runs and calls done(s, value) with each sum.
template <class T, class Op, class Done>
JAXGRAD_INLINE void reduce_runs(const Op& op, const BatchNormLayout& layout, int64_t block, int64_t channel,
                                Done done) {
  constexpr int kL = kLanes<T>;
  const typename Op::Params params = op.of(channel);
  const int64_t length = layout.run_length(block), end = layout.end_outer(block);
  Vector<T> sums[kRunSums][Op::kSums] = {};
  for (int64_t outer = layout.first_outer(block); outer < end; ++outer) {
    const int64_t first = (outer * layout.shape.C + channel) * layout.shape.inner + layout.first_inner(block);
    int64_t j = 0;
    for (; j + kRunSums * kL <= length; j += kRunSums * kL) {
#pragma GCC unroll 4
      for (int v = 0; v < kRunSums; ++v) op.add(first + j + v * kL, AllLanes<T>{}, params, sums[v]);
    }
    for (; j + kL <= length; j += kL) op.add(first + j, AllLanes<T>{}, params, sums[0]);
    if (j < length) op.add(first + j, static_cast<int>(length - j), params, sums[1]);
  }
  for (int s = 0; s < Op::kSums; ++s) {
    double total = 0;
    for (int lane = 0; lane < kL; ++lane)
      for (int v = 0; v < kRunSums; ++v) total += static_cast<double>(sums[v][s][lane]);
    done(s, static_cast<T>(total));
  }
}

// Fills sums[s][block, column] for the columns of the task.
template <class T, class Op>
void reduce(const Op& op, const BatchNormLayout& layout, const BatchNormTask& task, T* const* sums) {
  const int64_t at = task.block * layout.stride;
  if (layout.in_columns) {
    const int64_t first_row = layout.first_row(task.block), rows = layout.rows_of(task.block);
    for_chunks<T>(task.begin, task.end, [&](int64_t j, auto vectors, auto lanes) {
      reduce_chunk<T, decltype(vectors)::kCount>(
          op, layout, first_row, rows, j, lanes,
          [&](int s, int64_t column, Vector<T> sum) { store(sums[s] + at + column, sum); });
    });
  } else {
    for (int64_t c = task.begin; c < task.end; ++c)
      reduce_runs<T>(op, layout, task.block, c, [&](int s, T sum) { sums[s][at + c] = sum; });
  }
}

template <class T, class Op>
void apply(const Op& op, const BatchNormLayout& layout, const BatchNormTask& task) {
  if (layout.in_columns) {
    const int64_t rows = layout.rows_of(task.block);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = (layout.first_row(task.block) + row) * layout.width + task.begin;
      for_vectors<T>(task.end - task.begin,
                     [&](int64_t j, auto lanes) { op.apply(first + j, lanes, op.at(task.begin + j)); });
    }
  } else {
    const int64_t length = layout.run_length(task.block), end = layout.end_outer(task.block);
    for (int64_t outer = layout.first_outer(task.block); outer < end; ++outer)
      for (int64_t c = task.begin; c < task.end; ++c) {
        const int64_t first = (outer * layout.shape.C + c) * layout.shape.inner + layout.first_inner(task.block);
        const typename Op::Params params = op.of(c);
        for_vectors<T>(length, [&](int64_t j, auto lanes) { op.apply(first + j, lanes, params); });
      }
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
