// The loop that wakes nobody. Kept out of parallel.h, and so out of the files that are compiled for each instruction
// set.
#pragma once

#include "cpu/runtime/parallel.h"

namespace jaxgrad {

// The caller's own thread alone: for calls too small to be worth waking another.
class OneThread final : public Parallel {
 public:
  int64_t threads() const override { return 1; }
  void run(int64_t tasks, void* context, Body body) override {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
  }
};

}  // namespace jaxgrad
