// The recurrence of the GRU on the GPU, computed by the kernels of forward.cu and backward.cu. No XLA types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/lru_cache.h"
#include "cuda/gru/kernel_arguments.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/float_type.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {

// Everything that a plan depends on.
struct GruKey {
  bool is_backward = false;
  FloatType type{};
  bool allow_tf32 = false;  // for float32
  bool linear_before_reset = false;
  int64_t problems = 0, rows = 0, hidden = 0;
  int device = 0;
};

// The hidden units for which the kernels have registers: those of a call, rounded up.
int64_t gru_padded_hidden(int64_t hidden);

class GruKernel;

// The kernel for one pass, loaded on one device, and its launch. Immutable.
class GruPlan {
 public:
  GruPlan(std::shared_ptr<const GruKernel> kernel, int row_tiles, int64_t problems, int64_t rows, int blocks);

  // `arguments.tiles` is set here.
  void run(CUstream stream, GruArguments arguments) const;

 private:
  std::shared_ptr<const GruKernel> kernel_;
  int tiles_, blocks_;
  int64_t problems_;
};

// Throws NoPlan if the kernels do not support the call or the device. Compiles nothing.
void check_gru(const GruKey& key);

// Compiles and loads the kernel, if it is not cached. The key's device must be current. Throws NoPlan as check_gru()
// does, nvrtc::Error and driver::Error. Thread-safe; allowed while the stream is captured.
std::shared_ptr<const GruPlan> gru_plan(const GruKey& key);

// The source of a kernel for a number of row tiles, for tests.
std::string gru_source(const GruKey& key, int row_tiles);

}  // namespace jaxgrad
