// Runs the parts of a call on threads that have scratch memory of their own.
#pragma once

#include "cpu/depthwise/axes.h"
#include "cpu/runtime/arena.h"
#include "cpu/runtime/parallel_for.h"
#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// In the workspace, the number of channels is rounded up to a multiple of this: the float32 lanes of the widest vector,
// that of AVX-512. So the size of a workspace does not depend on the instruction set.
constexpr int64_t kPaddedLanes = 16;
// Limit of the positions that a thread copies for one box of results: those of the box, and those of the inputs that
// it reads. With 16 float32 channels for each position, the copies take half a megabyte, which stays in the cache of a
// core.
constexpr int64_t kMaxCopiedPositions = 8192;
constexpr int64_t kTasksPerThread = 4;

// How a call is divided. Activations whose channels are not their last axis are copied, one vector of channels of one
// box at a time; others are read in place.
struct Scratch {
  int64_t inputs, outputs;  // positions of each worker; none where nothing is copied

  int64_t floats() const { return (inputs + outputs) * kPaddedLanes; }
};

// Calls body(task, scratch of the worker) for all tasks. Each worker claims tasks until none is left.
template <class Body>
void run_tasks(Parallel& parallel, int64_t tasks, int64_t workers, float* scratch, int64_t scratch_floats, Body body) {
  int64_t next = 0;
  parallel_for(parallel, min_of(tasks, workers), [&](int64_t worker) {
    float* const own = scratch + worker * scratch_floats;
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < tasks;) body(task, own);
  });
}

// The threads that may run a call with a workspace of this size, of which `shared` bytes are for all of them.
inline int64_t workers_of(int64_t workspace_bytes, int64_t shared, int64_t scratch_floats, int64_t threads) {
  if (scratch_floats == 0) return threads;
  const int64_t fitting = (workspace_bytes - shared) / (scratch_floats * static_cast<int64_t>(sizeof(float)));
  return max_of(1, min_of(threads, fitting));
}

}  // namespace jaxgrad::JAXGRAD_ISA
