// The interface of a parallel loop. It includes neither XLA nor the standard library, so that the kernels, which are
// compiled once per instruction set, share no inline function through it.
#pragma once

#include <cstdint>

namespace jaxgrad {

class Parallel {
 public:
  using Body = void (*)(void* context, int64_t task);

  virtual ~Parallel() = default;

  // The largest number of threads that may run the loop, the calling thread included.
  virtual int64_t threads() const = 0;

  // Runs body(context, i) for i in [0, tasks), in any order, on any thread. Rethrows an exception of a task at the end.
  virtual void run(int64_t tasks, void* context, Body body) = 0;
};

}  // namespace jaxgrad
