// The convolution triangle on the CPU, by oneDNN: y = conv(x, w) and its two transposes, dx from (dy, w), dw from (x,
// dy).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/conv_problem.h"
#include "common/lru_cache.h"
#include "cpu/runtime/parallel.h"

namespace jaxgrad {

enum class ConvType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

// Everything that a plan bakes in; what plans are cached under.
struct ConvKey : ConvShape {
  ConvType type;
  bool has_bias;  // forward: a bias is added; backward filter: its gradient is wanted
  int threads;    // that the call runs with: the blocking and the scratch memory depend on it

  bool operator==(const ConvKey& other) const;
};

struct ConvKeyHash {
  size_t operator()(const ConvKey& key) const;
};

// A primitive with the reorders around it. Immutable: any number of threads may run it at once, each on its own
// buffers.
class ConvPlan {
 public:
  virtual ~ConvPlan() = default;

  virtual int64_t workspace_bytes() const = 0;
  virtual std::string implementation() const = 0;  // oneDNN's name of the kernel
  // first, second: (x, w), (dy, w) or (x, dy). bias: the bias to add, or the bias gradient's result; null without one.
  virtual void run(const void* first, const void* second, void* bias, void* result, std::byte* workspace) const = 0;
};

// The plan of a key: built at its first use, then kept. Throws onednn::Error, with status dnnl_unimplemented where
// oneDNN has no kernel. Thread-safe.
std::shared_ptr<const ConvPlan> conv_plan(const ConvKey& key);

PlanCacheInfo conv_plan_cache_info();

// A call: independent convolutions of one shape, the examples, whose arrays lie one after the other.
struct ConvWork {
  ConvKey key;
  int64_t examples = 1;
  int64_t workers = 1;  // that share the examples, each with a workspace of its own
};

// An array of a call, and the bytes of it that belong to one example.
template <class T>
struct ConvArray {
  T* data;
  int64_t bytes;

  T* of(int64_t example) const { return data == nullptr ? nullptr : data + example * bytes; }
};

// As `ConvPlan::run` takes them.
struct ConvArrays {
  ConvArray<const std::byte> first, second;
  ConvArray<std::byte> bias, result;
};

// Runs the plan of `work` on every example. Throws what the plan throws.
void run_conv(const ConvPlan& plan, const ConvWork& work, const ConvArrays& arrays, std::byte* workspace,
              Parallel& parallel);

}  // namespace jaxgrad
