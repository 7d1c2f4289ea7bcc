// A parallel loop on XLA's own pool of threads, so that a kernel never competes with XLA for the cores.
#pragma once

#include "cpu/runtime/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// The calling thread works too and claims tasks like every other, so the loop ends even when the pool's threads are
// all busy elsewhere (or are all inside loops of this kind): nobody ever waits for a task that no thread is running.
class XlaParallel final : public Parallel {
 public:
  explicit XlaParallel(xla::ffi::ThreadPool& pool);

  int64_t threads() const override { return threads_; }
  void run(int64_t tasks, void* context, Body body) override;

 private:
  xla::ffi::ThreadPool& pool_;
  int64_t threads_;
};

}  // namespace jaxgrad
