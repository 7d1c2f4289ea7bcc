// The three convolution passes on the CPU, computed by oneDNN, and in small_plan.h by jaxgrad. No XLA types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/lru_cache.h"
#include "cpu/conv/plan_key.h"
#include "cpu/conv/schedule.h"
#include "cpu/runtime/parallel.h"

namespace jaxgrad {

// A kernel for a problem: a oneDNN primitive with the reorders of its operands, or that of small_plan.h. Immutable:
// several threads may run a plan at the same time, each with buffers of its own.
class ConvPlan {
 public:
  virtual ~ConvPlan() = default;

  virtual int64_t workspace_bytes() const = 0;
  virtual std::string implementation() const = 0;  // the name of the kernel, in oneDNN if it is one of its
  // first, second: (x, w), (dy, w) or (x, dy), depending on the pass. bias: input of the forward pass, output of the
  // weight gradient, null without bias.
  virtual void run(const void* first, const void* second, void* bias, void* result, std::byte* workspace) const = 0;
};

// Returns the cached plan of a key and builds it on a miss. Throws onednn::Error; the status is dnnl_unimplemented if
// oneDNN has no kernel. Thread-safe.
std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key);

CacheInfo conv_plan_cache_info();

// Frees the cached plans and the primitives that oneDNN keeps. Those in use stay until their call ends.
void clear_conv_plan_cache();

// An array of a call. Those of independent problems follow each other.
template <class T>
struct ConvArray {
  T* data;
  int64_t bytes;  // of one problem

  T* of(int64_t problem) const { return data == nullptr ? nullptr : data + problem * bytes; }
};

// The arrays of ConvPlan::run().
struct ConvArrays {
  ConvArray<const std::byte> first, second;
  ConvArray<std::byte> bias, result;
};

// Bytes of workspace of a call.
int64_t conv_workspace(const ConvPlan& plan, const ConvSchedule& schedule);

// Runs the plan for every problem of the schedule. Rethrows what the plan throws.
void run_conv(const ConvPlan& plan, const ConvSchedule& schedule, const ConvArrays& arrays, std::byte* workspace,
              Parallel& parallel);

}  // namespace jaxgrad
