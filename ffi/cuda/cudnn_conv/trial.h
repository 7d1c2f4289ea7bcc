// Runs the engines of one problem on memory of its own, to compare their results with a reference and to time them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/conv_reference/op.h"
#include "cuda/cudnn_conv/execution.h"
#include "cuda/cudnn_conv/graph.h"
#include "cuda/cudnn_conv/plan_key.h"
#include "cuda/runtime/cudnn.h"
#include "cuda/runtime/driver.h"

namespace jaxgrad {

int64_t bytes_of(const ConvKey& key, const ConvOperand& operand);

class ConvTrial {
 public:
  // Allocates the operands, the result and a workspace, and fills the operands with random values. Throws
  // driver::Error, with CUDA_ERROR_OUT_OF_MEMORY if memory lacks.
  ConvTrial(const ConvKey& key, int64_t workspace_bytes);

  // Runs a plan and returns the milliseconds it took. Holds the handle of the device only for the launch: other threads
  // may use it while this one waits. Throws cudnn::Error if the plan is at fault, driver::OutOfMemory and
  // driver::DeviceFault if it is not.
  float run(const cudnn::Descriptor& plan);

  // Whether a plan's workspace fits: a plan may need more than cuDNN announced for its configuration.
  bool has_workspace(int64_t bytes) const { return bytes <= workspace_bytes_; }

  // Whether error_of() can be called: NVRTC is there.
  bool has_reference() const { return kernels_ != nullptr; }

  // Runs a plan and returns the largest error of the sampled elements of its result, as a multiple of what rounding
  // explains: above 1, the plan is wrong. Infinity if the result has a NaN, or if relu(NaN) is a number. Throws as
  // run() does.
  double error_of(const cudnn::Descriptor& plan, bool has_transforms);

 private:
  struct Expected {
    double value, absolute;  // the latter is the sum of the absolute products
  };

  void fill_operands();

  // The sampled elements, computed from the operands.
  std::vector<Expected> reference();

  // Runs a plan and returns the sampled elements of its result.
  std::vector<double> sampled_result(const cudnn::Descriptor& plan);

  // Whether each sampled element that reads x is NaN where all of x is.
  bool keeps_nan(const cudnn::Descriptor& plan);

  const ConvKey key_;
  const std::shared_ptr<const ReferenceKernels> kernels_;
  const ReferenceProblem problem_;
  const int64_t workspace_bytes_;
  const std::vector<int64_t> elements_;  // that are sampled; empty without kernels
  driver::Stopwatch watch_;
  driver::Memory x_, w_, y_, bias_, workspace_, samples_, sums_, values_;
  std::vector<bool> reads_x_;       // of each sample; empty before the first use
  std::vector<Expected> expected_;  // of each sample; empty before the first use
};

}  // namespace jaxgrad
