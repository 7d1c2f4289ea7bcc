// A loop on the calling thread, for calls that are too small to pay for waking another thread.
//
// Not part of parallel.h: the files that are compiled once per instruction set must not instantiate it.
#pragma once

#include "cpu/runtime/parallel.h"

namespace jaxgrad {

class SerialParallel final : public Parallel {
 public:
  int64_t threads() const override { return 1; }
  void run(int64_t tasks, void* context, Body body) override {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
  }
};

}  // namespace jaxgrad
