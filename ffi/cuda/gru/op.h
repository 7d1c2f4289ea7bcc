// The recurrence of the GRU on the GPU. No XLA types.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

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
  bool has_lengths = false, has_resets = false, has_reset_h = false, has_clip = false;
  int64_t problems = 0, rows = 0, hidden = 0;
  int device = 0;
};

// The hidden units for which clusters and teams have room: those of a call, rounded up; 0 if there are too many.
int64_t gru_padded_hidden(int64_t hidden);

// What holds the recurrent weights of a problem, and computes some of its rows in all steps.
enum class GruHolder {
  kBlock,        // one block, which multiplies in float32: few hidden units
  kTensorBlock,  // one block, which multiplies on tensor cores: few hidden units, many rows
  kCluster,      // a cluster of blocks, which exchange states through shared memory
  kTeam,         // a team of blocks, which exchange through global memory: many hidden units, or a GPU without clusters
};

// Which kernel computes a call, and how the rows are split.
struct GruVariant {
  GruHolder holder = GruHolder::kTeam;
  int padded = 0, units = 0, row_tiles = 0, batches = 0, pair = 1;  // as sizes.cuh defines them
  int rows = 0;                                                     // that a holder computes at once
  int64_t tiles = 0;                                                // parts of the rows of a problem
  int64_t holders = 0;                                              // of a launch
  int shared_bytes = 0;
  int64_t workspace_bytes = 0;
};

// The variant for a call on a device. Throws NoPlan if the kernels do not support the call or the device. Compiles
// nothing.
GruVariant gru_variant(const GruKey& key);

// The variant for blocks of so many rows: 1, or up to 96 hidden units also 2 or 4. The call has at most 128 hidden
// units.
GruVariant gru_block_variant(const GruKey& key, int rows);

// The variant for blocks that multiply so many tiles of rows on tensor cores: 1 or 2. The call has at most 128 hidden
// units, in bfloat16, float16 or TF32.
GruVariant gru_tensor_block_variant(const GruKey& key, int row_tiles);

int gru_threads(const GruVariant& variant);  // of a block

// The source of the kernel of a pass: its definitions, which determine all of it, then device.cuh, instructions.cuh and
// this text.
std::string gru_definitions(const GruKey& key, const GruVariant& variant);
const char* gru_source(const GruKey& key, const GruVariant& variant);

class GruKernel;

// The kernel for one pass, loaded on one device, and its launch. Immutable.
class GruPlan {
 public:
  GruPlan(std::shared_ptr<const GruKernel> kernel, const GruVariant& variant, int64_t problems);

  int64_t workspace_bytes() const { return variant_.workspace_bytes; }
  std::shared_ptr<const void> kernel() const { return kernel_; }  // which several plans share

  // Sets what of `arguments` depends on the variant. The workspace has workspace_bytes().
  void run(CUstream stream, GruArguments arguments, void* workspace) const;

 private:
  std::shared_ptr<const GruKernel> kernel_;
  GruVariant variant_;
  int64_t problems_;
};

// Compiles and loads the kernel, if it is not cached. The key's device must be current. Throws NoPlan as gru_variant()
// does, nvrtc::Error and driver::Error. Thread-safe; allowed while the stream is captured.
GruPlan gru_plan(const GruKey& key);

}  // namespace jaxgrad
