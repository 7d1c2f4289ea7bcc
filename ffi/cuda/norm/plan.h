// How the normalization kernels divide a call over a GPU. No CUDA calls.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "common/norm_shape.h"
#include "cuda/norm/kernel_arguments.h"
#include "cuda/runtime/float_type.h"

namespace jaxgrad {

enum class NormPass : int64_t { kForward, kStatistics, kNormalize, kBackward };

// The array by which the backward pass knows the argument of the activation, where x is not enough.
enum class NormThird { kNone = 0, kY = 1, kResidual = 2 };

struct NormKey {
  NormPass pass;
  NormShape shape;
  FloatType type;
  Activation activation = Activation::kNone;
  bool centered = true, frozen = false;
  bool residual = false;  // is added, or its gradient is written
  NormThird third = NormThird::kNone;
  bool needs_dx = true, needs_sums = true;  // of the backward pass; sums: dscale or dbias

  using Values = std::array<int64_t, 15>;
  Values values() const {
    return {static_cast<int64_t>(pass),
            shape.S,
            shape.O,
            shape.C,
            shape.I,
            shape.G,
            shape.K,
            static_cast<int64_t>(type),
            static_cast<int64_t>(activation),
            centered,
            frozen,
            residual,
            static_cast<int64_t>(third),
            needs_dx,
            needs_sums};
  }
};

struct NormGpu {
  int64_t multiprocessors, shared_bytes;  // of a block, at most
};

// The source that is compiled for a call, without kDeviceSource, and its launch.
struct NormProgram {
  std::string definitions;
  const char* source;
  const char* kernel;
  bool has_columns;  // which of the arguments holds
  NormColumns columns{};
  NormRows rows{};
  int64_t blocks = 0, threads = 0, shared_bytes = 0;
  bool cooperative = false;  // blocks wait for each other
  // Offsets in the workspace, and its size.
  int64_t partials = 0, sums = 0, flags = 0, workspace_bytes = 0;
};

// Throws NoPlan for calls that the kernels do not take.
NormProgram norm_program(const NormKey& key, const NormGpu& gpu);

}  // namespace jaxgrad
