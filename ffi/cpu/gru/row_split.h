// Splits the rows of the batch into tasks.
#pragma once

#include "cpu/runtime/arena.h"

namespace jaxgrad::JAXGRAD_ISA {

// Rows [begin, end) of one direction. One task computes all time steps of these rows.
struct RowRange {
  int64_t direction, begin, end;
};

// Splits the batch of each direction so that every thread has rows and the rows of a task fit its cache.
class RowSplit {
 public:
  RowSplit(int64_t directions, int64_t rows, int64_t threads) : rows_(rows) {
    const int64_t per_direction = (threads + directions - 1) / directions;
    blocks_ = round_up((rows + kMaxRows - 1) / kMaxRows, per_direction);
    if (blocks_ > rows) blocks_ = rows;
    tasks = directions * blocks_;
  }
  RowRange operator[](int64_t task) const {
    const int64_t block = task % blocks_;
    return {task / blocks_, block * rows_ / blocks_, (block + 1) * rows_ / blocks_};
  }

  int64_t tasks;

 private:
  static constexpr int64_t kMaxRows = 64;
  int64_t rows_, blocks_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
