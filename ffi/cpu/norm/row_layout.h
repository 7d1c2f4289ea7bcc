// Divides groups whose elements are contiguous in memory (O = 1), rows, into tasks.
#pragma once

#include "cpu/norm/layout.h"

namespace jaxgrad::JAXGRAD_ISA {

// A group of a sample: the first channel, and the index of the group among those of all samples.
struct Row {
  int64_t sample, channel, group;
};

// Consecutive rows. Each step of a call runs on all of them before the next step: the steps of a single short row would
// wait for each other.
struct Rows {
  static constexpr int64_t kMax = 16;
  const Row& operator[](int64_t i) const { return rows[i]; }

  Row rows[kMax];
  int64_t count = 0;
};

// Divides the rows into tasks: `block` samples of a call times `range` groups. Their sizes depend only on the shape of
// x. Short runs of elements of one channel are read as columns, as in layout.h.
struct RowLayout {
  static constexpr int64_t kMaxElements = 1 << 17;    // of a row of runs
  static constexpr int64_t kCacheElements = 1 << 12;  // of the rows that a step runs on
  static constexpr int64_t kMinBlock = 8, kMaxBlock = 1024;

  // A single sample with statistics for each channel is left to blocks: a batch.
  static bool suits(const NormShape& s) {
    return s.O == 1 && (s.I < kMinRun || s.group_elements() <= kMaxElements) && (s.S > 1 || s.G < s.C);
  }

  explicit RowLayout(const NormShape& shape) : s(shape), span(shape.I < kMinRun ? shape.I : 1) {
    const int64_t samples = s.call_samples(), elements = s.sample_elements();
    block = clamped(kTaskElements / elements, min_of(kMinBlock, ceil_div(samples, kMinBlock)), kMaxBlock);
    blocks = ceil_div(samples, block);
    range = clamped(kTaskElements / (block * s.group_elements()), 1, s.G);
    ranges = ceil_div(s.G, range);
  }

  bool in_columns() const { return s.I < kMinRun; }
  int64_t width() const { return s.C * span; }
  int64_t tasks() const { return s.K * blocks * ranges; }

  // The elements of a row.
  Tile tile(const Row& row) const {
    const int64_t first = row.sample * s.sample_elements();
    return {in_columns(),
            first,
            1,
            0,
            row.channel * span,
            (row.channel + s.group_channels()) * span,
            in_columns() ? 1 : s.I,
            in_columns() ? 1 : s.I};
  }

  // The call, and the part of the gradients of scale and bias that a task computes: the channels [begin, end).
  struct Task {
    int64_t call, part, begin, end;
  };
  Task task(int64_t index) const {
    const int64_t part = index / ranges, group = index % ranges * range;
    return {part / blocks, part, group * s.group_channels(), min_of(group + range, s.G) * s.group_channels()};
  }

  // Calls body(rows) for the rows of a task.
  template <class Body>
  void for_rows(const Task& task, Body body) const {
    const int64_t begin = task.call * s.call_samples() + task.part % blocks * block;
    const int64_t end = min_of(begin + block, (task.call + 1) * s.call_samples());
    const int64_t at_once = clamped(kCacheElements / s.group_elements(), 1, Rows::kMax);
    Rows rows;
    for (int64_t sample = begin; sample < end; ++sample)
      for (int64_t c = task.begin; c < task.end; c += s.group_channels()) {
        rows.rows[rows.count++] = {sample, c, sample * s.G + c / s.group_channels()};
        if (rows.count < at_once) continue;
        body(rows);
        rows.count = 0;
      }
    if (rows.count > 0) body(rows);
  }

  NormShape s;
  int64_t span;           // columns of a channel
  int64_t block, blocks;  // samples of a task, and such blocks of a call
  int64_t range, ranges;  // groups of a task
};

}  // namespace jaxgrad::JAXGRAD_ISA
