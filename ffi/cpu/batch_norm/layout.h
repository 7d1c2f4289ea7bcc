// Divides x into blocks and tasks, and lays out the workspace of batch normalization.
//
// A task computes the partial sums of a block. The size of a block depends only on the shape of x, and the blocks are
// merged in their order, so the results depend on neither the number of threads nor their timing. There are two
// layouts:
//
//   columns  for short runs of elements of one channel (inner is small). x is read as rows of `width` columns. Each
//            column belongs to one channel. A row has as many periods of C * inner elements as make it whole vectors.
//            A block is `block_rows` rows; the elements after the last whole row are a last block of one shorter row.
//   runs     for long runs of elements of one channel. A column is a channel. A block is the same part of `group` runs,
//            at `group` consecutive indices of outer.
//
// Each instruction set has its own copy, so that the object files of the kernels share no function.
#pragma once

#include "cpu/batch_norm/op.h"
#include "cpu/runtime/arena.h"

#ifndef JAXGRAD_ISA
#error "compile with -DJAXGRAD_ISA=<a name for the instruction set>"
#endif

namespace jaxgrad::JAXGRAD_ISA {

constexpr int64_t kPadColumns = 16;          // lanes of the widest vector of floats
constexpr int64_t kMinWidth = 64;            // minimum width of a row
constexpr int64_t kMinPeriod = 256;          // narrower periods are repeated until a row is whole vectors
constexpr int64_t kMinRun = 32;              // runs shorter than this are read as columns
constexpr int64_t kBlockElements = 1 << 14;  // of a block of columns; fits the cache for the second reading
constexpr int64_t kRunElements = 1 << 12;    // of one channel in a block of runs
constexpr int64_t kTaskElements = 1 << 15;

constexpr int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : (value > high ? high : value);
}
constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// The elements of a task: a range of the columns of a block.
struct BatchNormTask {
  int64_t block, begin, end;  // columns [begin, end)
};

struct BatchNormLayout {
  explicit BatchNormLayout(const BatchNormShape& s) : shape(s), in_columns(s.inner < kMinRun) {
    if (in_columns) {
      span = s.inner;
      repeat = 1;
      const int64_t period = s.C * s.inner;
      while (repeat * period < kMinWidth || (period < kMinPeriod && repeat * period % kPadColumns != 0)) ++repeat;
      width = repeat * period;
      rows = s.elements() / width;
      tail = s.elements() % width;
      block_rows = clamped(kBlockElements / width, 64, 1024);
      blocks = divide_up(rows, block_rows) + (tail > 0 ? 1 : 0);
      range = clamped(kTaskElements / block_rows / kPadColumns * kPadColumns, kPadColumns, width);
    } else {
      span = repeat = 1;
      width = s.C;
      group = clamped(kRunElements / s.inner, 1, s.outer);
      part = round_up(divide_up(s.inner, divide_up(s.inner, 2 * kRunElements)), kPadColumns);
      parts = divide_up(s.inner, part);
      blocks = divide_up(s.outer, group) * parts;
      range = clamped(kTaskElements / (group * part), 1, width);
    }
    stride = round_up(width, kPadColumns);
    ranges = divide_up(width, range);
  }

  // The number of elements of each channel.
  int64_t channel_count() const { return shape.outer * shape.inner; }

  int64_t tasks() const { return blocks * ranges; }
  BatchNormTask task(int64_t index) const {
    const int64_t block = index / ranges, begin = index % ranges * range;
    const int64_t columns = block_columns(block), end = begin + range;
    return {block, begin, end < columns ? end : columns};
  }

  bool is_tail(int64_t block) const { return in_columns && block * block_rows >= rows; }
  int64_t block_columns(int64_t block) const { return is_tail(block) ? tail : width; }
  // The number of rows of a block of columns.
  int64_t rows_of(int64_t block) const {
    return is_tail(block) ? 1 : clamped(rows - block * block_rows, 0, block_rows);
  }
  int64_t first_row(int64_t block) const { return is_tail(block) ? rows : block * block_rows; }
  // For a block of runs: its outer indices, and its part of each run.
  int64_t first_outer(int64_t block) const { return block / parts * group; }
  int64_t end_outer(int64_t block) const { return clamped(first_outer(block) + group, 0, shape.outer); }
  int64_t first_inner(int64_t block) const { return block % parts * part; }
  int64_t run_length(int64_t block) const { return clamped(shape.inner - first_inner(block), 0, part); }
  // The number of elements of each column in a block.
  int64_t count(int64_t block) const {
    return in_columns ? rows_of(block) : (end_outer(block) - first_outer(block)) * run_length(block);
  }

  // Calls body(column) for the columns of a channel. The last, shorter row may lack the later columns.
  template <class Body>
  void for_columns(int64_t channel, Body body) const {
    for (int64_t r = 0; r < repeat; ++r)
      for (int64_t i = 0; i < span; ++i) body((r * shape.C + channel) * span + i);
  }

  BatchNormShape shape;
  bool in_columns;
  int64_t width, repeat, span;  // columns: repeat periods of C channels, each of span neighboring columns
  int64_t stride;               // width, padded
  int64_t rows = 0, tail = 0, block_rows = 1;
  int64_t group = 1, part = 0, parts = 1;
  int64_t blocks;
  int64_t range, ranges;  // columns of a block per task, and tasks per block
};

constexpr int kMaxSums = 3, kMaxParameters = 5;

template <class T>
struct BatchNormScratch {
  BatchNormScratch(const BatchNormLayout& layout, Arena& arena) {
    for (T*& sum : sums) sum = arena.take<T>(layout.blocks * layout.stride);
    for (T*& parameter : parameters) parameter = arena.take<T>(layout.stride);
    for (double*& total : totals) total = arena.take<double>(layout.stride);
  }

  T* sums[kMaxSums];              // [blocks, stride]
  T* parameters[kMaxParameters];  // [stride]: coefficients of each column
  double* totals[kMaxSums];       // [stride]
};

}  // namespace jaxgrad::JAXGRAD_ISA
