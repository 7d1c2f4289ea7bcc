// Divides the samples of x into blocks and tasks, and lays out the scratch of a sample.
//
// A task computes the partial sums of a block. The size of a block depends only on the shape of x, and the blocks are
// merged in their order, so the results depend on neither the number of threads nor their timing. There are two
// layouts:
//
//   columns  for short runs of elements of one channel (I is small). A sample is read as rows of `width` columns. Each
//            column belongs to one channel. A row has as many periods of C * I elements as make it whole vectors. A
//            block is `block_rows` rows; the elements after the last whole row are a last block of one shorter row.
//   runs     for long runs of elements of one channel. A column is a channel. A block is the same part of `group` runs,
//            at `group` consecutive indices of O.
//
// Each instruction set has its own copy, so that the object files of the kernels share no function.
#pragma once

#include "cpu/norm/op.h"
#include "cpu/norm/parameters.h"
#include "cpu/norm/tile.h"
#include "cpu/runtime/arena.h"

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

// The elements of a task: a range of the columns of a block.
struct NormTask {
  int64_t block, begin, end;  // columns [begin, end)
};

struct NormLayout {
  explicit NormLayout(const NormShape& s) : shape(s), in_columns(s.I < kMinRun) {
    if (in_columns) {
      span = s.I;
      repeat = 1;
      const int64_t period = s.C * s.I;
      while (repeat * period < kMinWidth || (period < kMinPeriod && repeat * period % kPadColumns != 0)) ++repeat;
      width = repeat * period;
      rows = s.sample_elements() / width;
      tail = s.sample_elements() % width;
      block_rows = clamped(kBlockElements / width, 64, 1024);
      blocks = ceil_div(rows, block_rows) + (tail > 0 ? 1 : 0);
      range = clamped(kTaskElements / block_rows / kPadColumns * kPadColumns, kPadColumns, width);
    } else {
      span = repeat = 1;
      width = s.C;
      group = clamped(kRunElements / s.I, 1, s.O);
      part = round_up(ceil_div(s.I, ceil_div(s.I, 2 * kRunElements)), kPadColumns);
      parts = ceil_div(s.I, part);
      blocks = ceil_div(s.O, group) * parts;
      range = clamped(kTaskElements / (group * part), 1, width);
    }
    stride = round_up(width, kPadColumns);
    ranges = ceil_div(width, range);
  }

  int64_t tasks() const { return blocks * ranges; }
  NormTask task(int64_t index) const {
    const int64_t block = index / ranges, begin = index % ranges * range;
    return {block, begin, min_of(begin + range, block_columns(block))};
  }

  bool is_tail(int64_t block) const { return in_columns && block * block_rows >= rows; }
  int64_t block_columns(int64_t block) const { return is_tail(block) ? tail : width; }

  // The elements of a task, in the sample that starts at the element `first` of x.
  Tile tile(const NormTask& task, int64_t first) const {
    Tile tile{in_columns, first, 1, width, task.begin, task.end, 1, 1};
    if (in_columns) {
      if (!is_tail(task.block)) tile.rows = min_of(block_rows, rows - task.block * block_rows);
      tile.first += (is_tail(task.block) ? rows : task.block * block_rows) * width;
    } else {
      const int64_t outer = task.block / parts * group, inner = task.block % parts * part;
      tile.rows = min_of(group, shape.O - outer);
      tile.row_step = shape.C * shape.I;
      tile.first += outer * tile.row_step + inner;
      tile.run = min_of(part, shape.I - inner);
      tile.run_step = shape.I;
    }
    return tile;
  }

  // The number of elements of each column in a block.
  int64_t count(int64_t block) const {
    const Tile whole = tile({block, 0, 0}, 0);
    return whole.rows * whole.run;
  }

  // Calls body(column) for the columns of the channels [begin, end). The last, shorter row may lack the later columns.
  template <class Body>
  void for_columns(int64_t begin, int64_t end, Body body) const {
    for (int64_t r = 0; r < repeat; ++r)
      for (int64_t j = (r * shape.C + begin) * span; j < (r * shape.C + end) * span; ++j) body(j);
  }
  template <class Body>
  void for_channel_columns(int64_t channel, Body body) const {
    for_columns(channel, channel + 1, body);
  }
  template <class Body>
  void for_group_columns(int64_t index, Body body) const {
    for_columns(index * shape.group_channels(), (index + 1) * shape.group_channels(), body);
  }

  int64_t first_column(int64_t index) const { return index * shape.group_channels() * span; }  // of a group

  NormShape shape;
  bool in_columns;
  int64_t width, repeat, span;  // columns: repeat periods of C channels, each of span neighboring columns
  int64_t stride;               // width, padded
  int64_t rows = 0, tail = 0, block_rows = 1;
  int64_t group = 1, part = 0, parts = 1;
  int64_t blocks;
  int64_t range, ranges;  // columns of a block per task, and tasks per block
};

constexpr int kMaxSums = 3;

// The scratch of one sample.
template <class T>
struct NormScratch {
  NormScratch(const NormLayout& layout, Arena& arena) {
    for (T*& sum : sums) sum = arena.take<T>(layout.blocks * layout.stride);
    for (T*& parameter : parameters) parameter = arena.take<T>(layout.stride);
    for (double*& total : totals) total = arena.take<double>(layout.stride);
  }

  T* sums[kMaxSums];           // [blocks, stride]
  T* parameters[kParameters];  // [stride]
  double* totals[kMaxSums];    // [stride]
};

}  // namespace jaxgrad::JAXGRAD_ISA
