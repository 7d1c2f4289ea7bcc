// A parallel loop, as the kernels see it: no XLA type and no standard library behind it.
#pragma once

#include <cstdint>

namespace jaxgrad {

class Parallel {
 public:
  using Body = void (*)(void* context, int64_t task);

  virtual ~Parallel() = default;

  // The number of threads that may take part, the caller's own among them.
  virtual int64_t threads() const = 0;

  // Runs body(context, i) for each i in [0, tasks), in any order and on any thread, and returns when all are done.
  virtual void run(int64_t tasks, void* context, Body body) = 0;
};

}  // namespace jaxgrad
