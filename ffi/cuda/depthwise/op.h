// The weight gradient of depthwise convolutions on the GPU, by a kernel of our own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/depthwise/tiling.h"
#include "cuda/runtime/driver.h"

namespace jaxgrad {

struct DepthwiseFilterKey : ConvShape {
  FloatType type{};
  int device = 0;

  bool operator==(const DepthwiseFilterKey& other) const {
    return ConvShape::operator==(other) && type == other.type && device == other.device;
  }
};

// The kernel, compiled for one shape and loaded on one device. Immutable.
class DepthwiseFilterPlan {
 public:
  DepthwiseFilterPlan(const DepthwiseShape& shape, const DepthwiseTiling& tiling, const Gpu& gpu);
  ~DepthwiseFilterPlan();
  DepthwiseFilterPlan(const DepthwiseFilterPlan&) = delete;
  DepthwiseFilterPlan& operator=(const DepthwiseFilterPlan&) = delete;

  // x and dy, channels last; dw; and workspace_bytes() of partial sums. All of them start at multiples of 16 bytes.
  void run(CUstream stream, const void* x, const void* dy, void* dw, void* workspace) const;

  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  DepthwiseTiling tiling_;
  int64_t workspace_bytes_, elements_;  // of dw
  std::shared_ptr<const std::string> code_;
  CUmodule module_ = nullptr;
  CUfunction partial_ = nullptr, sum_ = nullptr;
};

// Throws NoPlan where the kernel cannot take a call, or the device. Compiles nothing.
void check_depthwise_filter(const DepthwiseFilterKey& key);

// Throws nvrtc::Error where nothing can be compiled for a device.
void check_compiler(int device);

// The plan of a key: compiled and loaded at its first use, then kept. Throws NoPlan where the kernel cannot take the
// call or the GPU, nvrtc::Error where it cannot be compiled, driver::Error. Thread-safe, and allowed during a capture.
// The key's device is the current one.
std::shared_ptr<const DepthwiseFilterPlan> depthwise_filter_plan(const DepthwiseFilterKey& key);

}  // namespace jaxgrad
