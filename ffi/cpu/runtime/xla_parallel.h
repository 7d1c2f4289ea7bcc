// A parallel loop on the thread pool of XLA, so that kernels do not compete with XLA for cores.
#pragma once

#include "cpu/runtime/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgrad {

// The calling thread claims tasks like every other thread, so the loop ends even if all threads of the pool are busy or
// run such loops themselves: no thread waits for a task that has not started.
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
